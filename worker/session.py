"""One rank of one attempt: its settings, its recorder, and, once torch is imported, its hooks."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..core.errors import OverflowDetected
from ..core.events.own_limits import OwnFault, ReplacedFunctions
from ..core.events.preflight_events import RankInventoryEvent
from ..core.events.rank_standing import StackLine
from ..core.events.read_tensors import ScriptTensor
from ..core.events.run_position import RunPosition
from ..core.events.script_events import ExitCall, ScriptError, ScriptExit
from ..core.guest.own_imports import own_imports
from ..core.identity import is_from_peer_failure
from ..core.recorder.layout import HeadField, HooksState, RankPhase, seal
from ..core.recorder.stalls import is_users
from ..core.recorder.writer import RecorderWriter
from ..core.settings import WorkerSettings
from ..core.signal_errors import from_outside, handler_in, suppress_own
from ..core.torch_names import NEWEST, missing, release_of
from .answers import answer_with_stacks, have_it_recorded
from .patches import after_import, replaced
from .rank_process import Undo, hear_of_ends, note_at, note_when_used, wait_for_use, watch_children
from .record.collectives import issued, position
from .record.error_text import MESSAGE_CHARACTERS, TRACEBACK_CHARACTERS, error_texts
from .signal_notes import note_signals

if TYPE_CHECKING:
    from .module_hooks import ModuleHooks


SETTLE_S = 2.0

_current: WorkerSession | None = None
"""The session of this process, if it is a watched rank."""


def make_current(session: WorkerSession) -> None:
    """Make `session` the session of this process."""
    global _current
    _current = session


def current_hooks() -> ModuleHooks | None:
    """The hooks of the run that watches this process. None if there are none, as in a forked process."""
    return _current.hooks if _current is not None and _current.is_ours else None


def open_session(settings: WorkerSettings, path: Path, rank: int, local_rank: int, world_size: int) -> WorkerSession:
    """Make the recorder of this process, and the session of it. Raises OSError if there is no room or it exists."""
    recorder = RecorderWriter(path, rank=rank, local_rank=local_rank, world_size=world_size, attempt=settings.attempt)
    session = WorkerSession(settings, recorder, rank)
    make_current(session)
    return session


def begin(path: str, parent: int) -> None:
    """In a child that was spawned by the process of this recorder."""
    if os.getpid() == parent:  # a copy of a process object, not a new process
        return
    after_import("torch", lambda: wait_for_use(partial(note_at, Path(path)), lambda: current_hooks() is not None))


def wait_for_device(collect: Callable[[], bool]) -> bool:
    """Wait a moment for numbers that are on their way from a device. Whether all have arrived, as `collect` says."""
    deadline = time.monotonic() + SETTLE_S
    while not (settled := collect()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return settled


def is_device_error(error: Exception) -> bool:
    """Whether the device has failed, as after an assertion in a kernel. Every later call of the driver raises it."""
    return isinstance(error, RuntimeError) and (
        type(error).__name__ == "AcceleratorError" or str(error).startswith(("CUDA error", "HIP error"))
    )


def watch_the_ends(variables: Callable[[Mapping[Any, Any]], dict[str, str]] = lambda _: {}) -> None:
    """Have the session of this process notice os.exec and os._exit. `variables`: see `hear_of_ends`."""

    def before_exec() -> Undo:
        return _current.goes_on_as_another_program() if _current is not None else lambda: None

    def before_exit(caller: FrameType) -> None:
        if _current is not None:
            _current.leaves(caller)

    hear_of_ends(before_exec, before_exit, variables)


class WorkerSession:
    """The state that the parts of a worker share."""

    def __init__(self, settings: WorkerSettings, recorder: RecorderWriter, rank: int) -> None:
        self.settings = settings
        self.recorder = recorder
        self.rank = rank
        self.hooks: ModuleHooks | None = None
        self._replaced: dict[str, list[str]] = {}
        self._pid = os.getpid()

    @property
    def is_ours(self) -> bool:
        """False in a process that the script has forked: the recorder belongs to its parent."""
        return os.getpid() == self._pid

    def enter(self, phase: RankPhase) -> None:
        """Publish what this rank is doing now."""
        self.recorder.fields[HeadField.PHASE] = phase
        self.recorder.fields[HeadField.MOVED_NS] = time.monotonic_ns()

    def become(self, settings: WorkerSettings, rank: int, local_rank: int, world_size: int) -> None:
        """This process was watched before it was known which rank it is, in which attempt."""
        self.settings, self.rank = settings, rank
        if self.hooks is not None:
            self.hooks.progress.settings, self.hooks.progress.rank = settings, rank
        self.recorder.identify(rank, local_rank, world_size, settings.attempt)

    def where(self) -> RunPosition:
        """The place in the run, for an event."""
        if self.hooks is not None:
            return self.hooks.where()
        return position(issued(), self.rank, self.settings.attempt)

    def record_fault(self, part: str, message: str) -> None:
        """Record an error of gpuwatch itself."""
        self.recorder.append(OwnFault(self.where(), part, message))

    def settle(self, *, failed: bool = False) -> bool:
        """Wait a moment for the last numbers of the device, after the script has ended. Never raises.

        Returns whether all have arrived. `failed`: the script has raised.
        """
        hooks = self.hooks
        if hooks is None:
            return False
        try:
            self._record_replaced()
            if not failed:  # of a device it may be what has failed
                hooks.read_the_rest()
            return wait_for_device(hooks.settle)
        except Exception as error:
            if from_outside(error):
                raise
            if not (failed and is_device_error(error)):  # else the script's exception tells of it
                self.record_fault("settle", f"{type(error).__name__}: {error}")
            return False

    def raised(self, error: BaseException) -> bool:
        """The script has ended with this exception. Whether the recorder has it, with its whole traceback."""
        if not self.is_ours:
            return False
        arrived = self.settle(failed=True)
        message, text = error_texts(error)
        hooks = self.hooks
        is_kept = self.recorder.append(
            ScriptError(
                self.where(),
                type(error).__name__,
                message[:MESSAGE_CHARACTERS],
                text[-TRACEBACK_CHARACTERS:],
                hooks.raised_in(error) if hooks is not None else None,
                is_from_peer_failure(error),
                self._tensors_of(error, message) if arrived else [],
                handler_in(error),
            )
        )
        self.enter(RankPhase.RAISED)
        return is_kept and len(text) <= TRACEBACK_CHARACTERS

    def raise_kept(self) -> None:
        """The script's code has ended. Raise what its signals' handlers have raised where torch would silence it."""
        if self.is_ours and self.hooks is not None:
            self.hooks.progress.raise_kept()

    def finished(self, code: int) -> None:
        """The script has ended, or has called sys.exit."""
        if not self.is_ours:
            return
        arrived, stop = self.settle(), sys.exc_info()[1]
        tensors = self._tensors_of(stop) if arrived and code and isinstance(stop, SystemExit) else []
        handler, message = 0, ""
        if isinstance(stop, SystemExit) and code:
            self._exits_at(walk_tb(stop.__traceback__))
        if isinstance(stop, SystemExit):
            handler, message = handler_in(stop), stop.code[:MESSAGE_CHARACTERS] if isinstance(stop.code, str) else ""
        code = max(-(1 << 31), min(int(code), (1 << 31) - 1))
        self.recorder.append(ScriptExit(self.where(), code, tensors, handler, message))
        self.enter(RankPhase.FINISHED)

    def _exits_at(self, calls: Iterable[tuple[FrameType, int]]) -> None:
        """Record the last of these calls that is of the script's own code, if there is one. No file is read."""
        lines = [StackLine(frame.f_code.co_filename, number, frame.f_code.co_name) for frame, number in calls]
        own = [line for line in lines if is_users(line.shown)]
        if own:
            self.recorder.append(ExitCall(self.where(), own[-1]))

    def _tensors_of(self, error: BaseException, message: str | None = None) -> list[ScriptTensor]:
        """The bad tensors in the script's variables, where it has ended because of one. A device must be at rest.

        `message`: that of an exception, which must speak of nan; None: sys.exit says nothing.
        """
        if "torch" not in sys.modules:
            return []
        with suppress_own(Exception):
            from .explain.script_tensors import frames_of, script_tensors, speaks_of_nan

            tensors: list[ScriptTensor] = []
            if not isinstance(error, OverflowDetected) and (message is None or speaks_of_nan(message)):
                tensors = script_tensors(frames_of(error.__traceback__), waits=False)
            if message is not None or any(each.numbers.value == "nan" for each in tensors):
                return tensors
        return []

    def goes_on_as_another_program(self) -> Undo:
        """The script calls os.exec. Returns what undoes this, as that may fail. Never raises."""
        try:
            phase = RankPhase(self.recorder.fields[HeadField.PHASE])
            if not self.is_ours or phase in (RankPhase.UNWATCHED, RankPhase.FINISHED, RankPhase.RAISED):
                return lambda: None
            self._settle_in_time()
            self.enter(RankPhase.UNWATCHED)
        except Exception as error:  # the recorder is closed
            if from_outside(error):
                raise
            return lambda: None
        return lambda: self.enter(phase)

    def leaves(self, caller: FrameType) -> None:
        """Record the end of the script at os._exit, which runs no exit handlers. Never raises.

        The line is that of who calls it, if that is the script: below multiprocessing's call in a fork stand the frames
        of its parent.
        """
        with suppress_own(Exception):
            fields = self.recorder.fields
            if self.is_ours:
                self._exits_at([(caller, caller.f_lineno)])
            if self.is_ours and fields[HeadField.PHASE] == RankPhase.SCRIPT and self._settle_in_time():
                fields[HeadField.LEFT] = seal(1)

    def _settle_in_time(self) -> bool:
        """Whether all numbers have arrived. A thread that hangs while it holds the lock does not block the exit."""
        if threading.current_thread() is not threading.main_thread():
            return False
        hooks = self.hooks
        return hooks is None or (hooks.progress.lock.comes_free(SETTLE_S) and self.settle())

    def answer_with_stacks(self) -> None:
        """Let the node agent ask for this rank's stack. Never raises."""
        try:
            answer_with_stacks(self.recorder.path.parent, self.rank, self.settings.attempt)
        except Exception as error:
            if from_outside(error):
                raise
            self.record_fault("stacks", f"{type(error).__name__}: {error}")

    def note_signals(self) -> None:
        """Note which signals reach handlers of the script's. Never raises."""
        try:
            note_signals(self.recorder)
        except Exception as error:
            if from_outside(error):
                raise
            self.record_fault("signals", f"{type(error).__name__}: {error}")

    def attach_hooks(self) -> None:
        """Attach the hooks, after torch was imported. Never raises: a run without hooks is better than no run."""
        if not self.is_ours:  # the script imported torch after a fork
            note_when_used(self.recorder, lambda: current_hooks() is not None)
            return
        with own_imports():
            self._attach_hooks()

    def _attach_hooks(self) -> None:
        try:
            from .module_hooks import ModuleHooks

            self._tell_what_torch_lacks()
            torch = sys.modules["torch"]
            for_gpus = torch.version.cuda is not None or torch.version.hip is not None
            have_it_recorded(release_of(str(torch.__version__)) or NEWEST, for_gpus=for_gpus)
            hooks = ModuleHooks(self.recorder, self.settings, self.rank)
            hooks.attach()
            self.hooks = hooks
            self._record_replaced()
            if not for_gpus:  # else it is recorded once a tensor on a device was read
                self.recorder.append(RankInventoryEvent(self.where(), "cpu", {}))
            watch_children(self.recorder, lambda: current_hooks() is not None)
            self.recorder.fields[HeadField.HOOKS] = HooksState.ATTACHED
        except Exception as error:
            if from_outside(error):
                raise
            self.recorder.fields[HeadField.HOOKS] = HooksState.FAILED
            self.record_fault("attach", f"{type(error).__name__}: {error}")

    def _record_replaced(self) -> None:
        """Record which functions are replaced, unless that is recorded: an import may have added some."""
        names = replaced()
        if names != self._replaced:
            self._replaced = names
            self.recorder.append(ReplacedFunctions(self.where(), names))

    def _tell_what_torch_lacks(self) -> None:
        """A name that is gone, though this release should have it, turns one view off: see core/torch_names.py."""
        version = str(sys.modules["torch"].__version__)
        gone: dict[str, list[str]] = {}
        for one in missing(release_of(version) or NEWEST):
            gone.setdefault(one.lost, []).append(one.path)
        for lost, paths in gone.items():
            self.record_fault("names of torch", f"torch {version} has no {', '.join(paths)}: {lost}")
