"""Where a rank stands, as its node agent sees it from outside: process groups, calls, threads, signals."""

from __future__ import annotations

from typing import Literal

import msgspec

EndedPart = Literal["", "forward", "backward", "optimizer"]
"""A part of a batch that has ended, with no other begun since; "" is unknown."""


class IssuedOperation(msgspec.Struct, frozen=True):
    """One operation that a rank has begun on a process group."""

    number: int
    """Counts the group's collectives from 1 on; below 0: the group's sends and receives, from -1 on."""
    operation: str
    """`all_reduce`, `send`; "" is unknown."""
    dtype: str = ""
    """`float32`; "" is unknown, or there is no tensor."""
    elements: int = 0
    peer: int = -1
    """Rank within the group: the root, or whom it sends to or receives from; -1 is none or any."""
    began_ns: int = 0
    """When it began, by the host's own clock; 0: not known."""
    took_ns: int = 0
    """From then until the host saw its end; 0: it did not."""


class GroupState(msgspec.Struct, frozen=True):
    """What a rank shows of its communication in one process group."""

    name: str
    members: str
    """Ranks as text, `0-6:2,7` (core/recorder/group_table.py); "" is unknown."""
    size: int
    begun: int = 0
    """Number of the last collective that it has begun."""
    ended: int = 0
    """Highest number that it has waited for to its end."""
    phase: str = "none"
    """`issuing`, `waiting`, `failed` (the call or the wait has raised) or `none`."""
    at: int = 0
    """What it issues or waits for now, or did last: see `IssuedOperation.number`."""
    since_s: float = 0.0
    """How long it has been there, in seconds."""
    recent: list[IssuedOperation] = []
    """The last few, by number."""
    pending: int | None = None
    """Number of the first operation that its device has not completed, by NCCL's flight recorder; 0: none; None: not
    known."""
    pending_s: float = 0.0
    """How long its device has had that, in seconds."""
    timeout_s: float = 0.0
    """After how long a wait in it ends the rank, in seconds; 0: not known, or nothing does."""


class StackLine(msgspec.Struct, frozen=True):
    """One call of a stack. Line 0: of a native function."""

    file: str
    line: int
    function: str
    text: str = ""
    """The source, where it could be read."""

    @property
    def shown(self) -> str:
        """`/home/me/train.py:41 in main: dist.all_reduce(loss)`"""
        return f"{self.file}:{self.line} in {self.function}" + (f": {self.text}" if self.text else "")

    @property
    def short(self) -> str:
        """`train.py:41 in main: dist.all_reduce(loss)`, `memcpy of libc.so.6`"""
        name = self.file.rpartition("/")[2]
        return (
            f"{self.function} of {name}" if not self.line else self.shown.removeprefix(self.file[: -len(name) or None])
        )


class ThreadSeen(msgspec.Struct, frozen=True):
    """One thread of a rank, as it was seen from outside."""

    name: str
    state: str = ""
    """A letter as in /proc/PID/stat; "" is unknown."""
    kernel: str = ""
    """The function of the kernel in which it waits: `hrtimer_nanosleep`; "" is none, or not to be seen."""
    system_call: str = ""
    """`clock_nanosleep`; "" as above."""
    at: str = ""
    """`data.py:7 in load`; "" is unknown."""


class HeardSignal(msgspec.Struct, frozen=True):
    """A signal has reached a handler of a rank's script (core/recorder/heard_signals.py). Times by its host's clock."""

    number: int
    time_ns: int = 0
    """When it first came from outside of the rank, and not from its launcher; 0: it did not."""
    batch: int = -1
    """The rank's batch then; -1: before the first one."""
    sender: int = 0
    """The process that sent it; 0: the kernel, or one of another namespace of processes."""
    parent_ns: int = 0
    """When it first came from the rank's parent, its launcher; 0: it did not."""
