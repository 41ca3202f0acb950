"""`gpuwatch.watch(model)`: the hooks without the launcher, for a script or a notebook."""

from __future__ import annotations

import math
import os
import random
import socket
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from ..core.errors import OverflowDetected
from ..core.events.agent_events import WorkerExit
from ..core.events.alarms import Anomaly, RangeWarning, ScalerSkip
from ..core.events.definitions import Definition
from ..core.events.log_entries import WorkerEvent
from ..core.events.run_position import RunPosition
from ..core.events.script_events import ScriptError
from ..core.frames import Frame, Page, format_frames
from ..core.guest.tell import tell
from ..core.judge import anomaly_of_page
from ..core.recorder.page_tables import PageTables
from ..core.recorder.pages import NameTable, decode_page
from ..core.recorder.reader import RecorderReader
from ..core.recorder.run_folder import make_scratch, remove_scratch
from ..core.recorder.step_findings import StepFindings
from ..core.recorder.writer import RecorderWriter
from ..core.settings import (
    Every,
    Explain,
    OnOverflow,
    Watched,
    WorkerSettings,
    as_keywords,
    worker_options,
    wrong_together,
)
from ..core.signal_errors import from_outside
from ..core.text import shown_name
from ..core.wire.beat import NodeBeat, RankState
from ..core.wire.messages import AgentBody, AgentHello, EventMessage, NameDefinitions, NodeBye, PageMessage
from .rank_process import note_in, wait_for_call
from .record.collectives import ranks
from .session import current_hooks, is_device_error, wait_for_device

if TYPE_CHECKING:
    from torch import nn

    from ..collector.facts.run_facts import RunFacts
    from ..collector.report.verdict import Verdict
    from .module_hooks import ModuleHooks


_watching: weakref.WeakKeyDictionary[ModuleHooks, tuple[int, weakref.ref[nn.Module] | None]]
_watching = weakref.WeakKeyDictionary()
"""Attached hooks of `watch` -> (the process that attached them, their model or None for all), the newest last."""
_in_block: weakref.WeakSet[ModuleHooks] = weakref.WeakSet()
"""Those of a `with`, which removes them at its end."""


def watching_hooks() -> ModuleHooks | None:
    """The hooks of the run that watches this process, else the newest of `watch`; None if there are none."""
    own = [hooks for hooks, (pid, _) in _watching.items() if pid == os.getpid()]
    return current_hooks() or (own[-1] if own else None)


def _replace_older(model: nn.Module | None) -> None:
    """Remove what watches the same model outside of a `with`, or one that is gone: a notebook's cell runs again."""
    mine = [(hooks, of) for hooks, (pid, of) in _watching.items() if pid == os.getpid() and hooks not in _in_block]
    older = [hooks for hooks, of in mine if (of and of()) is model and (of is None) is (model is None)]
    for hooks in (*older, *(hooks for hooks, of in mine if of is not None and of() is None)):
        _remove(hooks)
    if older:
        what = "this model was" if model is not None else "all models were"
        tell(f"gpuwatch: {what} watched already: the new watch replaces the older one, which keeps its record")


def _remove(hooks: ModuleHooks) -> Exception | None:
    """Remove these hooks. The error of a device that has failed, if it has."""
    pid, _ = _watching[hooks]
    failure = None
    if os.getpid() == pid:  # a forked child leaves its parent's recorder alone
        hooks.read_the_rest()
        failure = _failure_of(hooks, hooks.settle)
    hooks.detach()
    del _watching[hooks]
    return failure


def _failure_of(hooks: ModuleHooks, collect: Callable[[], bool]) -> Exception | None:
    """Wait for the numbers of a device. Its error, if it has failed: then none of them arrive."""
    try:
        wait_for_device(collect)
    except Exception as error:
        if from_outside(error) or not is_device_error(error):
            raise
        hooks.rows.never_free()
        return error
    return None


def _forked(reference: weakref.ref[ModuleHooks]) -> None:
    """In a fork: if it calls a watched model, and does not watch it itself, its parent's recorder says so."""
    hooks = reference()
    if hooks is None or hooks not in _watching:
        return
    _, of = _watching[hooks]
    model = of() if of is not None else None
    parts = set(model.modules()) if model is not None else None
    wait_for_call(
        note_in(hooks.progress.fields),
        lambda: watching_hooks() is not None,
        lambda module: parts is None or module in parts,
    )


# The verdict on one process: the collector's own decision, from the pages of this process's recorder.


def facts_of(
    state: RankState, definitions: Iterable[Definition], events: Iterable[WorkerEvent], pages: Iterable[PageMessage]
) -> RunFacts:
    """The facts about this process so far. They say nothing about the other ranks of its process group."""
    # a script without a launcher has no collector of its own: here alone a worker calls the collector's functions
    numbers = random.getstate()
    from ..collector.facts.fold import fold

    random.setstate(numbers)  # rich, which that imports, draws one of Python's random numbers at its import
    messages = _messages(state, definitions, events, pages)
    facts = fold(("process", number, body) for number, body in enumerate(messages))
    facts.report_command = ""
    return facts


def _messages(
    state: RankState, definitions: Iterable[Definition], events: Iterable[WorkerEvent], pages: Iterable[PageMessage]
) -> Iterator[AgentBody]:
    happened = list(events)
    members = ranks() if any(isinstance(event, Anomaly) for event in happened) else 1
    defined, held = list(definitions), list(pages)
    yield AgentHello("process", socket.gethostname(), members, 1, 1, ["gpuwatch.watch"], {}, "")
    yield NameDefinitions(state.rank, state.attempt, defined)
    yield from map(EventMessage, happened)
    yield from held
    steps = StepFindings()
    steps.define(defined)
    for page in held:
        steps.add(page, PageTables(page))
    yield from map(EventMessage, steps.events(state.rank, state.attempt))
    last = held[-1].number if held else -1
    where = RunPosition(state.rank, state.attempt, state.step, state.batch, page=last, seq=state.seq)
    failed = any(isinstance(event, ScriptError) for event in happened)
    yield EventMessage(WorkerExit(where, int(failed), "itself", "script"))
    hooks = state.hooks if state.hooks == "detached" else "attached"
    # the last one: a verdict covers the run so far
    yield NodeBeat([msgspec.structs.replace(state, final=True, left=True, hooks=hooks, world_size=0)], {})
    yield NodeBye("failed" if failed else "ok")


def rank_here() -> int | None:
    """This process's rank in torch.distributed; None outside of a process group."""
    import torch  # not when the name `watch` is imported

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return None


class ModelWatch:
    """A watched model. A context manager that removes its hooks at the end, and at an overflow first prints `report()`.

    A notebook shows it as the report's page.

    Under `gpuwatch launch` the run already watches every model. The handle then reads the run's recorder.
    """

    def __init__(self, hooks: ModuleHooks, recorder: RecorderWriter, of: str, *, owned: bool) -> None:
        self._hooks = hooks
        self._of = of
        """What is watched, in words."""
        self._recorder = recorder
        self._owned = owned
        """The hooks belong to this handle, which removes them. A run's do not."""
        self._reader = RecorderReader(recorder.path)
        self._names = NameTable()
        self._definitions: list[Definition] = []
        self._events: list[WorkerEvent] = []
        self._pid = os.getpid()
        self._failure: ScriptError | None = None
        """The device has failed: nothing more can be read from it, and the script cannot go on."""

    def __repr__(self) -> str:
        """One line: `<watch of Net: last batch 3, 1 batch with inf or nan>`. Waits for no device."""
        bad, batch = len(self.anomalies), self._reader.state().batch
        last = f"last batch {batch}" if batch >= 0 else "no batch yet"
        found = f"{bad} {'batch' if bad == 1 else 'batches'} with inf or nan" if bad else "no inf or nan seen"
        removed = ", removed" if self._closed else ""
        return f"<watch of {self._of}: {last}, {found}{removed}>"

    def __enter__(self) -> ModelWatch:
        _in_block.add(self._hooks)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is OverflowDetected and self._owned:  # a run's own report comes at its end
            tell(self.report())
        self.remove()

    def remove(self) -> None:
        """Remove the hooks. The recording can still be read. A second call does nothing.

        Raises what a signal's handler has raised where torch would have silenced it, if no hook has raised it since.
        """
        if self._owned and not self._closed:
            self._note_failure(_remove(self._hooks))
        self._hooks.progress.raise_kept()

    def _note_failure(self, error: Exception | None) -> None:
        if error is not None and self._failure is None:
            text = "".join(traceback.format_exception_only(error))
            self._failure = ScriptError(self._hooks.where(), type(error).__name__, str(error)[:2000], text)

    @property
    def _closed(self) -> bool:
        return self._owned and self._hooks not in _watching

    # -- what was recorded --------------------------------------------------------------------------------------

    @property
    def events(self) -> list[WorkerEvent]:
        """All events, in order."""
        self._read()
        return list(self._events)

    @property
    def anomalies(self) -> list[Anomaly]:
        """The first non-finite value of each batch that had one."""
        return [event for event in self.events if isinstance(event, Anomaly)]

    @property
    def warnings(self) -> list[RangeWarning]:
        """The first value near overflow or in underflow of each module and role."""
        return [event for event in self.events if isinstance(event, RangeWarning)]

    @property
    def skips(self) -> list[ScalerSkip]:
        """Optimizer steps that a GradScaler has skipped."""
        return [event for event in self.events if isinstance(event, ScalerSkip)]

    def pages(self) -> Iterator[Page]:
        """The batches that the recorder still holds, oldest first.

        Waits up to 2 seconds for numbers that are still on a device.
        """
        self._settle()
        for held in self._reader.held():
            message = self._reader.page(held.number)
            if message is not None:
                yield decode_page(message, self._names)

    def frames(self, batch: int | None = None) -> list[Frame]:
        """All frames of one batch; of the last batch by default."""
        pages = [page for page in self.pages() if batch is None or page.batch == batch]
        return pages[-1].frames if pages else []

    def report(self, max_frames: int = 21) -> str:
        """The verdict's statement, its cause, and the frames up to the first bad row: `abs min  abs max  metadata`."""
        statement = "\n".join(self.verdict().headlines)
        for page in self.pages():
            anomaly = anomaly_of_page(page)
            if anomaly is not None:
                shown = [frame for frame in page.frames if frame.index <= anomaly.frame][-max_frames:]
                return f"{statement}\n{format_frames(shown)}"
        return statement

    def verdict(self) -> Verdict:
        """The verdict of `gpuwatch report` on this process alone, from the pages that its recorder still holds.

        `verdict().statement` is one sentence, `.certainty` is established, supported or unknown; the other fields are
        those of report.json's verdict. Waits up to 2 seconds for numbers that are still on a device. If the device has
        failed, as after an assertion in a kernel, the verdict is a crash.
        """
        facts = self._facts()
        from ..collector.decide.decide import decide

        verdict = decide(facts)
        if not self._owned:  # the run's options apply
            return verdict
        statement, *others = map(as_keywords, [verdict.statement, *verdict.evidence, *verdict.next])
        count = len(verdict.evidence)
        return msgspec.structs.replace(verdict, statement=statement, evidence=others[:count], next=others[count:])

    def _repr_html_(self) -> str:
        """The report's page on this process, for a notebook."""
        facts = self._facts()
        from ..collector.assemble.build import build_report
        from ..collector.report.html.page import embedded, render_html

        report = build_report(facts, run_id="of this process", started=None, ended=None)
        return embedded(render_html(report, spelled=as_keywords if self._owned else str))

    def _facts(self) -> RunFacts:
        if not self._closed and os.getpid() == self._pid:
            self._hooks.reinstall()
            self._hooks.read_the_rest()
        self._settle()
        pages = (self._reader.page(held.number) for held in self._reader.held())
        state = self._reader.state()
        events = [*self._events, *([self._failure] if self._failure is not None else [])]
        return facts_of(state, self._definitions, events, [page for page in pages if page is not None])

    def _settle(self) -> None:
        if not self._closed and os.getpid() == self._pid:
            self._note_failure(_failure_of(self._hooks, self._hooks.collect))
        self._read()

    def _read(self) -> None:
        definitions, events = self._reader.new_entries()
        self._names.add(definitions)
        self._definitions += definitions
        self._events += events


def watch(
    model: nn.Module | None = None,
    *,
    watch: Iterable[Watched] = ("forward", "grads", "weights", "comms"),
    modules: Iterable[str] = (),
    every: Every = 1,
    on_overflow: OnOverflow = "abort",
    sync: bool = False,
    guard_optimizer: bool = False,
    ignore: Iterable[str] = (),
    near_overflow: float = 1.0,
    underflow_share: float = 0.1,
    scaler_skips: int = 12,
    state_every: int = 50,
    explain: Explain = "auto",
    capture: str | os.PathLike[str] = "",
    capture_max: int = 2_000_000_000,
) -> ModelWatch:
    """Watch a model, or, with None, every model of this process. Returns a handle, which is also a context manager.

    The keywords are the options of `gpuwatch launch`. With `on_overflow="abort"`, OverflowDetected is raised at the end
    of the forward, or before the optimizer step, in which something became inf or nan. With "continue" the overflow is
    only listed in `anomalies`. With `capture`, a folder, a forward that overflows is written there, with its weights
    and its data, in at most `capture_max` bytes: `gpuwatch replay FOLDER` runs it again. In a rank that `gpuwatch
    launch` watches, the run's settings apply and the keywords have no effect. A second watch of the same model replaces
    the first one, unless that is in a `with`. Raises ValueError for an invalid keyword, TypeError for a model that is
    none.
    """
    from .module_hooks import ModuleHooks
    from .record.names import class_of

    running = current_hooks()
    if model is not None and not hasattr(model, "named_modules"):
        raise TypeError(f"expected a torch.nn.Module, or None for all models, found {type(model).__name__}")
    if running is not None:
        return ModelWatch(running, running.progress.recorder, "the run's models", owned=False)
    if every != "auto":
        _check_numbers(every=every)
    _check_numbers(
        near_overflow=near_overflow,
        underflow_share=underflow_share,
        scaler_skips=scaler_skips,
        state_every=state_every,
    )
    for name, of, words in (
        ("watch", "words", watch),
        ("modules", "patterns", modules),
        ("ignore", "patterns", ignore),
    ):
        if isinstance(words, str):  # its letters would be patterns, and the * of "head.*" matches every module
            raise ValueError(f"expected {name}= a list of {of}, as in {name}=[{words!r}], found {words!r}")
    parts = tuple(watch)
    for expected, given, is_right in (
        ("watch= some of forward, grads, weights, comms", parts, set(parts) <= set(get_args(Watched))),
        ("on_overflow= abort or continue", on_overflow, on_overflow in get_args(OnOverflow)),
        ("explain= auto, off or a batch number", explain, _is_explain(explain)),
    ):
        if not is_right:
            raise ValueError(f"expected {expected}, found {given!r}")
    settings = WorkerSettings(
        recorder_dir="",
        on_overflow=on_overflow,
        watch=parts,
        modules=list(modules),
        every=every,
        sync=sync,
        guard_optimizer=guard_optimizer,
        ignore=list(ignore),
        near_overflow=near_overflow,
        underflow_share=underflow_share,
        scaler_skips=scaler_skips,
        state_every=state_every,
        explain=explain,
        capture=str(Path(capture).absolute()) if capture else "",
        capture_max=capture_max,
    )
    wrong = wrong_together(settings)
    if wrong:
        raise ValueError(as_keywords(wrong))
    _replace_older(model)
    folder = make_scratch(1)
    remove = partial(_remove_in, os.getpid(), folder)
    rank = rank_here()
    if rank is None:
        rank = int(os.environ.get("RANK", "0"))
    try:
        recorder = RecorderWriter(folder / "recorder", rank=rank, local_rank=0, world_size=1, attempt=0)
        hooks = ModuleHooks(recorder, settings, rank, only=model)
    except BaseException:
        remove()
        raise
    # bound to the hooks, which the modules hold: the script need not keep the handle
    weakref.finalize(hooks, remove)
    hooks.attach()
    _watching[hooks] = os.getpid(), weakref.ref(model) if model is not None else None
    os.register_at_fork(after_in_child=partial(_forked, weakref.ref(hooks)))
    of = shown_name(class_of(model)) if model is not None else "all models"
    return ModelWatch(hooks, recorder, of, owned=True)


def _check_numbers(**given: Any) -> None:
    """Raise ValueError if one is not in the range that its option of the command line has."""
    for name, value in given.items():
        kind, option = worker_options()[name]
        most = option.most or math.inf
        if not isinstance(value, Real if kind is float else Integral) or not option.least <= float(value) <= most:
            reach = f"from {option.least} to {most:g}" if option.most else f"of {option.least} or more"
            raise ValueError(f"expected {name}= {option.of} {reach}, found {name}={value!r}")


def _is_explain(explain: object) -> bool:
    return explain in ("auto", "off") or (type(explain) is int and explain >= 0)


def _remove_in(pid: int, folder: Path) -> None:
    """Remove the folder of a process, if this is that process: a fork has the same exit handlers."""
    if os.getpid() == pid:
        remove_scratch(folder)
