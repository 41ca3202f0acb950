"""Where the ranks of a node stand just before their launcher stops them, as another rank has failed.

What a rank waited in, or did instead, is gone with its process. The launch asks for it, and nothing else waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path

from ...core.recorder.layout import file_name
from ...core.recorder.reader import NotReady, RecorderReader
from ...core.wire.pipe import LastLook
from .stacks import LOOK_S, StackLook

_TURN_S = 0.1
"""Over which a rank's use of the processor is measured at least."""


def last_looks(folder: Path, attempt: int, pids: Mapping[int, int]) -> dict[int, LastLook]:
    """Ask these ranks (rank -> process id) and wait for their answers, 0.3 s if all of them answer, at most LOOK_S.

    Not those whose scripts have ended: they take themselves down.
    """
    still_s = {rank: _still_s(folder / file_name(rank, attempt)) for rank in pids}
    pids = {rank: pid for rank, pid in pids.items() if still_s[rank] is not None}
    began = now = time.monotonic()
    looks = {rank: StackLook(folder, rank, attempt, pid, began) for rank, pid in pids.items()}
    sizes: list[int] = [-1]
    while looks and now - began < LOOK_S:
        time.sleep(_TURN_S)
        now, before = time.monotonic(), sizes
        for look in looks.values():
            look.ask_again(now)
        sizes = [look.size for look in looks.values() if look.was_asked]
        if all(sizes) and sizes == before:  # whole, too
            break
    found = {}
    for rank, look in looks.items():
        if look.is_due(now, may_spy=False, look_s=0.0):
            seen = look.result()
            found[rank] = LastLook(seen.stack, seen.state, seen.busy, still_s[rank] or 0.0)
    return found


def _still_s(recorder: Path) -> float | None:
    """None of a rank whose script has raised, which it says itself, or has ended."""
    with suppress(OSError, NotReady), closing(RecorderReader(recorder)) as reader:
        state = reader.state()
        return state.age_s if state.phase not in ("raised", "finished") else None
    return 0.0
