"""The handle of a watched model, which reads what was recorded of it.

Its verdict is the collector's own decision, from the pages of this process's recorder.
"""

from __future__ import annotations

import os
import random
import socket
import traceback
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

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
from ..core.recorder.step_findings import StepFindings
from ..core.recorder.writer import RecorderWriter
from ..core.settings import as_keywords
from ..core.wire.beat import NodeBeat, RankState
from ..core.wire.messages import AgentBody, AgentHello, EventMessage, NameDefinitions, NodeBye, PageMessage
from .record.collectives import ranks
from .watched_models import failure_of, in_block, remove_hooks, watching

if TYPE_CHECKING:
    from ..collector.facts.run_facts import RunFacts
    from ..collector.report.verdict import Verdict
    from .module_hooks import ModuleHooks


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
        in_block.add(self._hooks)
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
            self._note_failure(remove_hooks(self._hooks))
        self._hooks.progress.raise_kept()

    def _note_failure(self, error: Exception | None) -> None:
        if error is not None and self._failure is None:
            text = "".join(traceback.format_exception_only(error))
            self._failure = ScriptError(self._hooks.where(), type(error).__name__, str(error)[:2000], text)

    @property
    def _closed(self) -> bool:
        return self._owned and self._hooks not in watching

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
        self._settle(rest=True)
        pages = (self._reader.page(held.number) for held in self._reader.held())
        state = self._reader.state()
        events = [*self._events, *([self._failure] if self._failure is not None else [])]
        return facts_of(state, self._definitions, events, [page for page in pages if page is not None])

    def _settle(self, *, rest: bool = False) -> None:
        """`rest`: also read what no hook has read."""
        if not self._closed and os.getpid() == self._pid:
            self._note_failure(failure_of(self._hooks, self._hooks.collect, rest=rest))
        self._read()

    def _read(self) -> None:
        definitions, events = self._reader.new_entries()
        self._names.add(definitions)
        self._definitions += definitions
        self._events += events
