"""The stacks of a rank, as lines of its part of report.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..report.stacks import thread_text

if TYPE_CHECKING:
    from ..facts.facts import RankFacts


def stack_of(rank: RankFacts) -> list[str]:
    """The rank's last stack, innermost call first: `/home/me/train.py:41 in main: dist.all_reduce(loss)`.

    Of one that did not answer itself: native calls first, and where nothing could be had, what the kernel says of it.
    """
    if not rank.looks:
        return []
    look = rank.looks[-1]
    if look.stack:
        return [*(f"{line.short}, native" for line in look.native), *(line.shown for line in look.stack)]
    return [thread_text(thread) for thread in look.threads]


def threads_of(rank: RankFacts) -> list[str]:
    """Threads of it besides the main one that Python has, as far as they were seen: `loader, at data.py:7 in load`."""
    threads = rank.looks[-1].threads if rank.looks and rank.looks[-1].stack else []
    return [thread_text(thread) for thread in threads if thread.at]
