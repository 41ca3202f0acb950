"""Where this rank is in its run (step, batch, page), and the lock under which it writes that into its recorder.

Also the times of a step's parts, and the record of gpuwatch's own errors.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...core.codes import Code, coded
from ...core.events.own_limits import CompiledUnseen, OwnFault, WatchChoice
from ...core.events.run_position import RunPosition
from ...core.events.script_events import GroupTeardown, MeshCoordinates
from ...core.frames import Frame
from ...core.guest.tell import say
from ...core.identity import is_from_peer_failure
from ...core.recorder.layout import PARTS, STEP_BYTES, STEP_ENTRY, STEPS, STEPS_AT, HeadField, HooksState, RankPhase
from ...core.recorder.writer import OpenPage, RecorderWriter
from ...core.settings import WorkerSettings, as_keywords
from ...core.signal_errors import from_outside
from ..patches import PatchLedger
from .collectives import issued, position
from .error_text import MESSAGE_CHARACTERS, TRACEBACK_CHARACTERS, error_texts
from .group_operations import GroupTable
from .roots import RootInfo
from .value_jumps import ValueJumps
from .watch_pace import WatchPace

# One thread at a time writes into the recorder. Autograd has a thread for each device, and it runs gradient hooks
# (torch/csrc/autograd/engine.h, start_device_threads). A script may call modules in threads of its own.
#
# Python that writes a frame holds the lock while it reads the frame's tensors and writes their rows. A page stays open
# for a whole batch, and the lock is free in between.
#
# A signal's handler runs in the main thread, in the middle of whatever that thread does. One that saves a checkpoint
# may issue collectives or call modules, whose hooks take the lock. If the main thread holds it already, it gets it once
# more: it is an RLock (docs.python.org/3/library/threading.html#rlock-objects), where a Lock would wait for itself. If
# another thread holds it, that thread runs on while the handler waits, and gives it back.


try:
    from ..native.core import WriterLock
except ImportError:  # installed without a C compiler: no native writer asks for the holder
    _RLock: Any = type(threading.RLock())

    class WriterLock(_RLock):  # type: ignore[no-redef,misc]
        """Only a lock."""

        def __new__(cls, cursor: array[int]) -> Any:  # noqa: D102
            return super().__new__(cls)

        @property
        def mutex(self) -> Any:
            """Itself."""
            return self


class RecorderLock(WriterLock):
    """A lock for the Python code that writes; the thread that holds it may take it again.

    `__enter__` and `__exit__` are C. In Python a signal's handler may raise as they begin and as they return: the lock
    would be left taken, or be given back without having been taken.

    The native writer takes no lock to write: it writes a frame without interruption, or notices another writer and
    gives up. While another thread holds this lock it gives up at once, and its caller then waits here. `cursor` is that
    of the RecorderWriter: the native writer finds the holder's thread there. It takes the lock likewise, before it
    calls Python to read tensors on a device.
    """

    def is_held_here(self) -> bool:
        """Whether this thread has it: then this is a signal's handler, which has interrupted what writes."""
        return bool(self.mutex._is_owned())

    def comes_free(self, seconds: float) -> bool:
        """Whether this thread could have it within so long."""
        if not self.mutex.acquire(timeout=seconds):
            return False
        self.mutex.release()
        return True


# How long the parts of each optimizer step take on the host: see core/recorder/layout.py.
#
# The hooks say where a part ends. A step is written only if all its parts were seen: a forward, and the end of the
# backward before and after torch has waited for the gradients of other ranks. Nothing here waits for a device.

_now = time.monotonic_ns
_pack = STEP_ENTRY.pack_into
_WAITED, _TIMED = int(HeadField.WAITED_NS), int(HeadField.STEPS_TIMED)
_OUTSIDE, _FORWARD, _BACKWARD, _WAITING, _OPTIMIZER = range(len(PARTS))


class StepClock:
    """One rank's step time by part. Waits in Python calls (`HeadField.WAITED_NS`) count as waiting in any part."""

    def __init__(self, recorder: RecorderWriter) -> None:
        self._view = recorder.view
        self._fields = recorder.fields
        self._spent = [0] * len(PARTS)
        self._since = _now()
        self._waited = 0
        """WAITED_NS at `_since`."""
        self._forwards = False
        self._reduced = False
        """Whether the forward, and the end of a backward, were seen in this step."""
        self._is_forward_over = False
        """The forward has ended, and its backward has not."""

    def forward_begins(self) -> None:
        """A root's forward begins. The time before it was outside: after a step, or after another forward."""
        self._spend(_OUTSIDE)
        self._forwards = True

    def forward_ends(self) -> None:
        """A root's forward has ended."""
        self._spend(_FORWARD)
        self._is_forward_over = True

    def backward_ends(self) -> None:
        """All local gradients are there."""
        self._spend(_BACKWARD)
        self._is_forward_over = False

    def reduction_ends(self) -> None:
        """torch's own work at the end of a backward is over: DDP has waited for the gradients of all ranks."""
        self._spend(_WAITING)
        self._reduced = True

    def optimizer_begins(self) -> None:
        """The optimizer's step begins. Between a backward and this a script clips gradients."""
        self._spend(_BACKWARD if self._is_forward_over else _OPTIMIZER)

    def step_ends(self, number: int) -> None:
        """The optimizer's step has ended, the `number`th one."""
        self._spend(_OPTIMIZER)
        spent = self._spent
        if self._forwards and self._reduced:
            count = self._fields[_TIMED] + 1
            # the count stands at both ends: the agent reads this in another process, and sees by them whether it is
            # whole
            _pack(self._view, STEPS_AT + count % STEPS * STEP_BYTES, count, number, *spent, count)
            self._fields[_TIMED] = count
        spent[:] = (0, 0, 0, 0, 0)
        self._forwards = self._reduced = self._is_forward_over = False

    def _spend(self, part: int) -> None:
        now, waited = _now(), self._fields[_WAITED]
        spent, others = self._spent, waited - self._waited
        if others:
            spent[_WAITING] += others
            self._waited = waited
        spent[part] += now - self._since - others
        self._since = now


# Errors of gpuwatch itself within a hook: they are recorded, and the training goes on.

_MAX_FAULTS = 20
_MOST_MESHES = 32
_MOST_ALERTS = 16


class FaultGuard(NamedTuple):
    """`with` it an error of this part is recorded and goes no further. One that is not gpuwatch's own is raised."""

    record: Callable[[str, Exception], None]
    part: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, Exception) or from_outside(error):
            return False
        self.record(self.part, error)
        return True  # `with` ends the error: only one of gpuwatch's own gets here


class FaultRecorder:
    """Records gpuwatch's own errors. At the `_MAX_FAULTS`th it removes all hooks, and so it owns their ledger."""

    def __init__(self, recorder: RecorderWriter, where: Callable[[], RunPosition]) -> None:
        self._recorder = recorder
        self._count = 0
        self.where = where
        self.patches = PatchLedger(self.record)

    def within(self, part: str) -> FaultGuard:
        """The guard of a part."""
        return FaultGuard(self.record, part)

    def record(self, part: str, error: Exception) -> None:
        """Record an error of this part."""
        self._count += 1
        try:
            if self._count <= _MAX_FAULTS:
                self._append(part, error)
            else:
                self._recorder.count_fault(part)
            if self._count == _MAX_FAULTS:
                self._recorder.fields[HeadField.HOOKS] = HooksState.DETACHED
        except Exception as error:  # the recorder is closed
            if from_outside(error):
                raise
        if self._count == _MAX_FAULTS:
            self.patches.undo()

    def _append(self, part: str, error: Exception) -> None:
        try:
            fault = OwnFault(self.where(), part, f"{type(error).__name__}: {error}")
        except Exception as error:
            if from_outside(error):
                raise
            self._recorder.count_fault(part)
        else:
            self._recorder.append(fault)


class RunProgress:
    """Steps, batches and the current page. The hooks share it."""

    def __init__(self, recorder: RecorderWriter, settings: WorkerSettings, rank: int) -> None:
        self.recorder = recorder
        self.fields = recorder.fields
        self.lock = RecorderLock(recorder.cursor)
        self.groups = GroupTable(recorder)
        self.times = StepClock(recorder)
        self.faults = FaultRecorder(recorder, self.where)
        self.settings = settings
        self.rank = rank
        self.step = 0
        self.batch = -1
        self.watches_weights = "weights" in settings.watch
        self.root: RootInfo | None = None
        """The root of the last page that was begun."""
        self.skipped = False
        """This batch is skipped (`--every`)."""
        self.pace = WatchPace(whole=settings.every != "auto" or settings.after_overflow)
        self.jumps = ValueJumps() if settings.every == "auto" else None
        """None: no value can change which batches are watched."""
        self.rehearses = False
        """torch calls modules with gradients that nobody has written, before it captures a CUDA graph."""
        self._alerts = 0
        self._forecasts = 0
        """Of the agent's, those that are known."""
        self.kept: list[BaseException] = []
        """What signals' handlers have raised, for the next hook to raise: the same list all the time."""
        self._unseen: set[str] = set()
        self._meshes: list[dict[str, int]] = []

    def keep(self, error: BaseException) -> None:
        """Have the next hook raise what a signal's handler has raised, where torch would silence it."""
        self.kept.append(error)

    def raise_kept(self) -> None:
        """Raise it. If there are several, each is raised while the one before is.

        So does Python if a handler raises again before anybody has handled what it raised first: the script gets the
        last one, and the others are in its `__context__`.
        """
        if self.kept:
            # taken out before it is raised: raised twice, it would end what the script does to handle it
            error = self.kept[0]
            del self.kept[0]
            try:
                raise error
            finally:
                self.raise_kept()

    def note_mesh(self, mesh: Any) -> None:
        """Record where the rank is in a new DeviceMesh; a slice of a known one says nothing new."""
        if torch.compiler.is_compiling():
            return
        with self.faults.within("meshes"):
            names, at = mesh.mesh_dim_names, mesh.get_coordinate()
            place = dict(zip(names, map(int, at), strict=True)) if names and at is not None else {}
            if len(self._meshes) < _MOST_MESHES and not any(
                place.items() <= known.items() for known in ({}, *self._meshes)
            ):
                self._meshes.append(place)
                self.recorder.append(MeshCoordinates(self.where(), place))

    def note_teardown(self, error: BaseException) -> None:
        """Record that the script takes its process group down while it handles this exception. Never raises."""
        with self.faults.within("teardown"):
            message, text = error_texts(error)
            said = message[:MESSAGE_CHARACTERS], text[-TRACEBACK_CHARACTERS:]
            self.recorder.append(GroupTeardown(self.where(), type(error).__name__, *said, is_from_peer_failure(error)))

    def where(self, page: OpenPage | None = None, root: str | None = None) -> RunPosition:
        """The place in the run, for an event: now, or that of `page` of the root labelled `root`."""
        label = root if root is not None else self.root.label if self.root is not None else ""
        current = page or (self.root.page if self.root is not None else None)
        step = page.step if page is not None else self.step
        batch, number = (current.batch, current.number) if current is not None else (self.batch, -1)
        return position(issued(), self.rank, self.settings.attempt, step, batch, label, number)

    def unseen_in_compiled(self, where: RunPosition, text: str, calls: bool = False) -> None:
        """Record and print (rank 0) once a sentence on what is not seen of compiled code. `calls`: no call is seen."""
        if text not in self._unseen:
            self._unseen.add(text)
            self.recorder.append(CompiledUnseen(where, text, calls))
            if self.rank == 0:
                say(coded(text, Code.TORCH_UNSEEN))

    def where_of(self, page: OpenPage, frame: Frame) -> RunPosition:
        """The place in the run of a frame, which may be some batches old."""
        root = self.recorder.names.root_label(page.root)
        return position(frame.seq, self.rank, self.settings.attempt, page.step, page.batch, root, page.number)

    def in_users_words(self, text: str) -> str:
        """Advice with options as this user writes them: of a launch as they are, of `gpuwatch.watch` as keywords."""
        return text if self.settings.recorder_dir else as_keywords(text)

    def alert(self, where: RunPosition, why: str) -> None:
        """A value is out of line at `where`: with `--every auto` the next steps are watched whole."""
        if self.pace.alert() and self._alerts < _MOST_ALERTS:
            self._alerts += 1
            self.recorder.append(WatchChoice(where, 1, alert=why))

    def look_for_forecasts(self) -> None:
        """The node agent may have forecast an overflow."""
        count = self.fields[HeadField.FORECASTS]
        if count != self._forecasts:
            self._forecasts = count
            self.alert(self.where(), "an overflow is forecast")

    def begin_page(self, root: RootInfo) -> OpenPage:
        """End the root's last page and begin its next one."""
        page = self.next_page(root)
        self.recorder.resume_page(page)
        self.groups.notice()
        self.fields[HeadField.SEQ] = issued()
        return page

    def next_page(self, root: RootInfo) -> OpenPage:
        """Likewise, but nothing is written in it so far: it takes no room in the recorder."""
        before = root.page
        if before is not None:
            self.recorder.end_page(before)
        self.batch = max(0, root.batches - 1)
        self.root = root
        page = root.page = self.recorder.next_page(root.id, self.batch, self.step)
        page.with_gradients = torch.is_grad_enabled()
        page.rehearses = self.rehearses
        return page

    def resume(self, page: OpenPage) -> None:
        """Make `page` the current page again."""
        if self.recorder.page is not page:
            self.recorder.resume_page(page)
            self.fields[HeadField.SEQ] = issued()

    def enter(self, phase: RankPhase, module: int = -1) -> None:
        """Publish what this rank is doing, for the agent."""
        self.fields[HeadField.PHASE] = phase
        self.fields[HeadField.MODULE] = module
