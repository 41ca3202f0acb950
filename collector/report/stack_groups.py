"""Where the ranks stood when they were asked: their stacks, those that are the same together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ...core.events import ThreadSeen
from ...core.stalls import is_users
from ...core.text import ranks_text

if TYPE_CHECKING:
    from .model import RankReport

_MOST_THREADS = 6
MOST_LINES = 12
"""Of each stack, in the text. report.json has more."""


def thread_text(thread: ThreadSeen) -> str:
    """`thread python3, which sleeps, in clock_nanosleep (hrtimer_nanosleep of the kernel)`"""
    parts = [f"thread {thread.name or '(no name)'}"]
    if thread.state:
        parts.append(_STATES.get(thread.state, f"in state {thread.state}"))
    if thread.system_call or thread.kernel:
        kernel = f"{thread.kernel} of the kernel" if thread.kernel else ""
        call = thread.system_call
        parts.append(f"in {call} ({kernel})" if call and kernel else f"in {call or kernel}")
    if thread.at:
        parts.append(f"at {thread.at}")
    return ", ".join(parts)


_STATES = {
    "R": "which runs",
    "S": "which sleeps",
    "D": "which waits for a disk or a driver, and no signal reaches it",
    "T": "which a signal has stopped",
    "t": "which a debugger has stopped",
    "Z": "which has ended",
}


def stacks_text(ranks: Iterable[RankReport]) -> Iterator[str]:
    """Lines: ranks that stand at the same place share one stack."""
    ranks = list(ranks)
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank in ranks:
        if rank.stack:
            groups.setdefault(tuple(rank.stack), []).append(rank.rank)
    others: dict[tuple[str, ...], list[str]] = {}
    for rank in ranks:
        if rank.stack and rank.threads:
            others.setdefault(tuple(rank.stack), rank.threads)
    for stack, numbers in groups.items():
        yield f"Where {ranks_text(numbers)} stood, innermost call first (calls inside of torch are left out)"
        yield from (f"  {line}" for line in own_lines(list(stack))[:MOST_LINES])
        yield from (f"  other {line}" for line in others.get(stack, ())[:_MOST_THREADS])


def own_lines(stack: list[str]) -> list[str]:
    """The innermost call, and below it the user's own lines; [] of an empty stack."""
    return list(dict.fromkeys([*stack[:1], *(line for line in stack if is_users(line))]))
