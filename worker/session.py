"""One rank of one attempt: its settings, its recorder, and, once torch is imported, its hooks."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from ..core.recorder.layout import Field, HooksState, RankPhase
from ..core.recorder.writer import RecorderWriter
from ..core.records import Fault, Where
from ..core.settings import WorkerSettings
from .record.collectives import clock, issued

if TYPE_CHECKING:
    from .hooks.forward import Hooks


_SETTLE_S = 2.0

_current: Session | None = None
"""The session of this process, if it is a watched rank."""


def make_current(session: Session) -> None:
    """Make `session` the session of this process."""
    global _current
    _current = session


def current_hooks() -> Hooks | None:
    """The hooks of the run that watches this process. None if there are none, as in a forked process."""
    return _current.hooks if _current is not None and _current.is_ours else None


class Session:
    """The state that the parts of a worker share."""

    def __init__(self, settings: WorkerSettings, recorder: RecorderWriter, rank: int) -> None:
        self.settings = settings
        self.recorder = recorder
        self.rank = rank
        self.hooks: Hooks | None = None
        self._pid = os.getpid()

    @property
    def is_ours(self) -> bool:
        """False in a process that the script has forked: the recorder belongs to its parent."""
        return os.getpid() == self._pid

    def enter(self, phase: RankPhase) -> None:
        """Publish what this rank is doing now."""
        self.recorder.fields[Field.PHASE] = phase
        self.recorder.fields[Field.MOVED_NS] = time.monotonic_ns()

    def where(self) -> Where:
        """The place in the run, for an event."""
        if self.hooks is not None:
            return self.hooks.where()
        return Where(rank=self.rank, attempt=self.settings.attempt, seq=issued(), time_ns=time.time_ns(), clock=clock())

    def settle(self) -> None:
        """The script has ended: wait a moment for the last numbers of the device. Never raises."""
        hooks = self.hooks
        if hooks is None:
            return
        deadline = time.monotonic() + _SETTLE_S
        try:
            while not hooks.settle() and time.monotonic() < deadline:
                time.sleep(0.005)
        except Exception as error:
            self.recorder.append(Fault(self.where(), "settle", f"{type(error).__name__}: {error}"))

    def attach_hooks(self) -> None:
        """Attach the hooks, after torch was imported. Never raises: a run without hooks is better than no run."""
        try:
            from .hooks.forward import HANDS_OVER_KWARGS, Hooks

            if not HANDS_OVER_KWARGS:
                note = "this release of torch hands no keyword arguments to global hooks: they are not in the frames"
                self.recorder.append(Fault(self.where(), "hooks", note))
            hooks = Hooks(self.recorder, self.settings, self.rank)
            hooks.attach()
            self.hooks = hooks
            self.recorder.fields[Field.HOOKS] = HooksState.ATTACHED
        except Exception as error:
            self.recorder.fields[Field.HOOKS] = HooksState.FAILED
            self.recorder.append(Fault(self.where(), "attach", f"{type(error).__name__}: {error}"))
