"""What a launch says to its user."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from shlex import quote
from signal import Signals

import psutil

from ..core.codes import Code, coded
from ..core.errors import RANK_OVERFLOW
from ..core.events import Anomaly
from ..core.frames import module_text
from ..core.host import installed_torch
from ..core.recorder.layout import file_name
from ..core.recorder.reader import NotReady, RecorderReader
from ..core.settings import VARIABLE
from ..core.tell import tell
from ..core.text import ranks_text, shown_name
from ..core.torch_names import notes_on
from ..core.wire.pipe import JobResult
from .agent.process_ends import processes_with


def say(text: str) -> None:
    """One line for the user; the script's own stdout stays untouched."""
    tell(f"gpuwatch: {text}")


def say_signal(number: int) -> None:
    """The ranks have ended because of it."""
    say(f"got {Signals(number).name}; writing the report (Ctrl-C: leave at once)")


def tell_of_torch() -> None:
    """Print what gpuwatch cannot see with the installed torch, a line for each; nothing if it sees everything."""
    for note in notes_on(installed_torch()):
        say(coded(note, Code.TORCH_UNSEEN))


# The overflows that this node's ranks recorded: the launch's own evidence, even if its agent, its collector or its disk
# fails.


class SeenOverflows:
    """By (attempt, rank): the first anomaly, or None where a rank says no more than that there was one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[tuple[int, int], Anomaly | None] = {}

    def look(self, attempt: int, codes: dict[int, int | None]) -> None:
        """The ranks of this attempt have ended with these codes: read their recorders."""
        for rank, code in codes.items():
            seen, first = code == RANK_OVERFLOW, None  # a script may have that code of its own: a recorder tells
            recorder = self._folder / file_name(rank, attempt)
            with suppress(OSError, NotReady), closing(RecorderReader(recorder)) as reader:
                seen, first = reader.overflow_seen, reader.first_anomaly()
            if seen:
                self._seen[attempt, rank] = first

    @property
    def sentence(self) -> str:
        """Who saw one, and the one of the earliest batch; "" where there is none. Which was first, it cannot tell."""
        if not self._seen:
            return ""
        attempt = min(number for number, _ in self._seen)
        ranks = [rank for number, rank in self._seen if number == attempt]
        known = [found for (number, _), found in self._seen.items() if number == attempt and found is not None]
        if not known:
            return f"{ranks_text(ranks)} saw an overflow; the place is unknown"
        first = min(known, key=lambda anomaly: (anomaly.where.batch, anomaly.where.collectives, anomaly.where.rank))
        module = module_text(first.module, first.cls)
        place = f"{first.value} in {shown_name(first.role)} of {module}, {first.phase} of batch {first.where.batch}"
        if len(ranks) == 1:
            return f"{ranks_text(ranks)} saw an overflow: {place}"
        return f"{ranks_text(ranks)} saw an overflow; in the earliest batch, on rank {first.where.rank}: {place}"


def where_it_is(verdict: JobResult | None) -> str:
    """Where to find an overflow that the verdict lacks, as a sentence."""
    if verdict is not None and verdict.overflow_in:
        return (
            "no report shows it yet; make one from this node's spool with: gpuwatch report "
            f"{quote(verdict.overflow_in)}"
        )
    return "the report lacks this overflow: its event was lost in transit"


# Processes that ranks have forked and that have outlived them, such as a data loader's worker that is stuck.
#
# The launch names them to the user and leaves them alone: one of them may be writing a checkpoint.

PATIENCE_S = 8.0
"""torch's own workers look every five seconds whether their rank is still there."""
_MOST = 8


def tell_left_behind(scratch: Path, say: Callable[[str], object], patience_s: float = PATIENCE_S) -> None:
    """Call it after all ranks have ended: names the processes that they left, if these do not end soon."""
    # what runs with the environment that this launch has given to its ranks: a copy of a process keeps that
    there = list(processes_with(VARIABLE, lambda value: str(scratch) in value))
    _, left = psutil.wait_procs(there, timeout=patience_s) if there else ([], [])
    if left:
        pids = ", ".join(str(process.pid) for process in left[:_MOST]) + (", ..." if len(left) > _MOST else "")
        many = len(left) > 1
        text = (
            f"{len(left)} process{'es' if many else ''} that a rank had started {'have' if many else 'has'} outlived "
            f"the rank (a stuck data loader worker, for example) and may hold memory: kill {pids}"
        )
        say(coded(text, Code.LEFT_BEHIND))
