"""Builders: what one rank records of a batch, and the messages of a job, by hand."""

from __future__ import annotations

import math
import shutil
import struct
from types import SimpleNamespace

import msgspec
import numpy
import pytest
from gpuwatch.collector.facts.kept_pages import KeptPage, PageCache, RankNames
from gpuwatch.core.events.agent_events import WorkerExit
from gpuwatch.core.events.alarms import Anomaly
from gpuwatch.core.events.definitions import Definition, ModuleDef, RootDef, ShapeDef, SlotDef
from gpuwatch.core.events.preflight_events import PreflightBegan, PreflightResult, PreflightStage, RankInventoryEvent
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.events.script_events import ScriptError, ScriptExit
from gpuwatch.core.frames import FramePhase, RowKind, RowMark
from gpuwatch.core.judge import anomaly_of, first_expected_gradient, judge
from gpuwatch.core.preflight import PreflightFinding
from gpuwatch.core.recorder import layout
from gpuwatch.core.recorder.pages import NameTable, decode_page
from gpuwatch.core.values import COUNTED, DTYPE_CODES, SHARE, NonFinite, ValueEncoding
from gpuwatch.core.wire.beat import NodeBeat, RankState
from gpuwatch.core.wire.columns import pack_samples
from gpuwatch.core.wire.keys import agent_name
from gpuwatch.core.wire.messages import (
    AgentBody,
    AgentHello,
    EventMessage,
    NameDefinitions,
    NodeBye,
    PageMessage,
    PageSegment,
    SeriesName,
    TelemetryMessage,
)

NAN, INF, NEGINF = math.nan, math.inf, -math.inf


def _flags(number: float) -> NonFinite:
    if math.isnan(number):
        return NonFinite.NAN
    if math.isinf(number):
        return NonFinite.POSINF if number > 0 else NonFinite.NEGINF
    return NonFinite.NONE


class Batch:
    """One page of one rank. `tensor` makes a value, `call` a frame, in the order in which the calls return.

    The anomaly is raised as the worker's hooks raise it: at the first frame with a value that is not an expected one.
    """

    def __init__(
        self,
        rank=0,
        *,
        root="Net",
        batch=0,
        step=None,
        page=0,
        attempt=0,
        seq=0,
        aborts=True,
        clock=None,
        sent=None,
        received=None,
        time_ns=1_000,
    ):
        self.rank, self.root, self.batch, self.page, self.attempt, self.seq = rank, root, batch, page, attempt, seq
        self.step = batch if step is None else step
        self.aborts = aborts
        self.issued = {"clock": clock or {}, "sent": sent or {}, "received": received or {}}
        self.time_ns = time_ns
        self.anomaly: Anomaly | None = None
        self._definitions: list[Definition] = [
            RootDef(0, root.partition("#")[0], 0),
            ShapeDef(0, (2, 3)),
            ShapeDef(1, (4, 5)),
        ]
        self._modules: dict[str, int] = {}
        self._slots: dict[tuple[int, str], int] = {}
        self._values: list[tuple[int, int, int]] = []
        self._rows: list[tuple[int, ...]] = []
        self._frames: list[bytes] = []

    def tensor(self, number: float = 1.0, *, low=None, zeros=None, subnormals=None) -> int:
        """A tensor whose values are `number`, and `low` if given; the same index twice is the same tensor."""
        (bits,) = struct.unpack("<I", struct.pack("<f", abs(number)))
        (low_bits,) = struct.unpack("<I", struct.pack("<f", abs(number if low is None else low)))
        meta = ValueEncoding.FLOAT32 << 8 | _flags(number)
        if zeros is not None:
            meta |= int(zeros * SHARE) << 16 | int((subnormals or 0.0) * SHARE) << 32 | COUNTED
        self._values.append((low_bits, bits, meta))
        return len(self._values) - 1

    def module(self, name: str, cls: str | None = None) -> int:
        """Its number. A parent is known by its name alone until its own call has returned, or it is defined."""
        number = self._modules.setdefault(name, len(self._modules))
        if cls is not None:
            self._definitions = [d for d in self._definitions if not (isinstance(d, ModuleDef) and d.id == number)]
            self._definitions.append(ModuleDef(number, 0, name, cls))
        return number

    def call(
        self,
        module,
        cls,
        *,
        given=(),
        returned=(),
        weights=None,
        kwargs=None,
        parent="",
        depth=None,
        seq=None,
        collectives=0,
        phase=FramePhase.FORWARD,
        marks=None,
        dtype="float32",
        shapes=None,
    ):
        """A module call that has returned; arguments and results are tensors of this batch. Returns its index.

        A tensor of which no numbers are known is None.
        """
        roles = [(name, value) for name, value in (weights or {}).items()]
        roles += [(f"input[{position}]", value) for position, value in enumerate(given)]
        roles += [(f"kwargs.{name}", value) for name, value in (kwargs or {}).items()]
        output = ["output"] if len(returned) == 1 else [f"output[{position}]" for position in range(len(returned))]
        roles += list(zip(output, returned, strict=True))
        if depth is None:
            depth = 0 if module == "" else module.count(".") + 1
        return self._frame(
            module,
            cls,
            roles,
            phase=phase,
            parent=None if module == "" else parent,
            depth=depth,
            seq=seq,
            collectives=collectives,
            marks=marks,
            dtype=dtype,
            shapes=shapes,
        )

    def backward(self, module, cls, role, number, *, mark=0, seq=None, dtype="float32"):
        """A gradient in the backward: `output`, `output[1]`, or a parameter's name. Returns the frame's index."""
        role = f"grad {role}"
        rows = [(role, self.tensor(number))]
        return self._frame(module, cls, rows, phase=FramePhase.BACKWARD, seq=seq, marks={role: mark}, dtype=dtype)

    def got(self, module, cls, gradients, *, mark=0, seq=None, dtype="float32"):
        """Gradients as the optimizer gets them: {parameter: number}."""
        rows = [(f"grad {name}", self.tensor(number)) for name, number in gradients.items()]
        marks = {role: mark for role, _ in rows}
        return self._frame(module, cls, rows, phase=FramePhase.COLLECTIVE, seq=seq, marks=marks, dtype=dtype)

    def stepped(self, module, cls, weights, *, seq=None):
        """Weights after the step: {parameter: number}; optimizer state as `state exp_avg weight`."""
        rows = [(name, self.tensor(number)) for name, number in weights.items()]
        return self._frame(module, cls, rows, phase=FramePhase.OPTIMIZER, seq=seq)

    def _frame(
        self,
        module,
        cls,
        roles,
        *,
        phase,
        parent=None,
        depth=0,
        seq=None,
        collectives=0,
        marks=None,
        dtype="float32",
        shapes=None,
    ):
        number = self.module(module, cls)
        parent_number = layout.NOTHING if parent is None else self.module(parent)
        first = len(self._rows)
        for role, value in roles:
            slot = self._slots.setdefault((number, role), len(self._slots))
            if slot == len(self._slots) - 1:
                self._definitions.append(SlotDef(slot, number, role))
            mark = (marks or {}).get(role, 0)
            shape = (shapes or {}).get(role, 0)
            kind = RowKind.MEASURED if value is not None else RowKind.NOT_MEASURABLE
            index = layout.NOTHING if value is None else value
            self._rows.append((slot, index, shape, DTYPE_CODES[dtype], kind.number, mark))
        seq = self.seq if seq is None else seq
        index = len(self._frames)
        self._frames.append(
            layout.FRAME.pack(number, parent_number, depth, phase.number, collectives, seq, first, len(roles), index)
        )
        if self.anomaly is None:
            frame = self.decoded().frames[index]
            row = judge(frame).alarm
            if row is not None:
                self._alarm(frame, row)
        return index

    def _alarm(self, frame, row, cause=""):
        anomaly = anomaly_of(self.decoded(), frame, row, aborts=self.aborts, cause=cause)
        place = {"seq": frame.seq, "root": self.root, "time_ns": self.time_ns, **self.issued}
        self.anomaly = msgspec.structs.replace(anomaly, where=msgspec.structs.replace(anomaly.where, **place))

    def skipped(self, cause="GradScaler skipped 12 steps in a row, the last at scale 1"):
        """A GradScaler's alarm over the first gradient of this batch that it was to catch."""
        found = first_expected_gradient(self.decoded().frames)
        assert found is not None
        self._alarm(*found, cause)

    def skipped_batch(self, cause="not inspected: --every 5"):
        """The root's output was bad, in a batch that `--every` skips."""
        assert self.anomaly is not None
        self.anomaly = msgspec.structs.replace(self.anomaly, cause=cause)

    def decoded(self):
        """The page as the collector sees it."""
        names = NameTable()
        names.add(self._definitions)
        return decode_page(self.page_message(), names)

    def kept(self) -> KeptPage:
        """The page as the collector keeps it."""
        message, shelf = self.page_message(), PageCache()
        names = RankNames(shelf.names)
        names.add("a0", self._definitions)
        return KeptPage(message, lambda: message, names, shelf)

    def definitions(self) -> NameDefinitions:
        return NameDefinitions(self.rank, self.attempt, list(self._definitions))

    def page_message(self, *, complete=True, first_frame=0) -> PageMessage:
        rows = b"".join(layout.ROW.pack(*row) for row in self._rows)
        values = b"".join(layout.VALUE.pack(*value) for value in self._values)
        segment = PageSegment(0, first_frame, 0, b"".join(self._frames[first_frame:]), rows, values)
        return PageMessage(self.rank, self.attempt, self.page, 0, self.batch, self.step, complete, [segment])

    def page_before(self, *, masks=False) -> PageMessage:
        """The batch before: the same calls, and all finite; with `masks`, -inf alone is where it is in this batch."""
        kept = NonFinite.NEGINF if masks else NonFinite.NONE
        values = [
            value if not value[2] & 0xFF or NonFinite(value[2] & 0xFF) == kept else (0, 0, value[2] & ~0xFF)
            for value in self._values
        ]
        page = self.page_message()
        segment = msgspec.structs.replace(
            page.segments[0], values=b"".join(layout.VALUE.pack(*value) for value in values)
        )
        return msgspec.structs.replace(
            page, number=self.page - 1, batch=self.batch - 1, step=self.step - 1, segments=[segment]
        )

    def messages(self, *, page=True) -> list[AgentBody]:
        found: list[AgentBody] = [self.definitions()]
        if self.anomaly is not None:
            found.append(EventMessage(self.anomaly))
        return [*found, self.page_message()] if page else found


def where(rank, *, attempt=0, step=0, batch=0, root="Net", page=0, seq=0, time_ns=1_000) -> RunPosition:
    return RunPosition(rank, attempt, step, batch, root, page, seq, time_ns)


def hello(agent="a0", host="h0", nproc=2, nodes=1, **more) -> AgentHello:
    given = {"command": ["gpuwatch", "launch", "train.py"], "versions": {"gpuwatch": "0.1"}, "rdzv_id": "job", **more}
    return AgentHello(agent, host, nproc, nodes, nodes, **given)


def hello_of(identity="a0", **more) -> AgentHello:
    """The hello of an agent whose socket has this identity."""
    return hello(agent_name(identity.encode()), **more)


def ended(
    rank, code=0, by="itself", *, phase="script", module=None, cls=None, times_ns=(0, 0), **place
) -> EventMessage:
    """`times_ns`: when it was last seen alive, and seen to end."""
    alive, ended = times_ns
    return EventMessage(WorkerExit(where(rank, **place), code, by, phase, module, cls, alive_ns=alive, ended_ns=ended))


def telemetry(figures, *, began_s=1000.0, step_s=5.0, troubles=()) -> TelemetryMessage:
    """A node's figures: (what it is of, key of METRICS) -> values `step_s` apart, a count as it stood."""
    names = list(figures)
    table = numpy.array([figures[name] for name in names], float).T
    times = [round((began_s + step_s * n) * 1e9) for n in range(len(table))]
    packed = pack_samples(times, table, [what for _, what in names])
    series = [SeriesName(of, what) for of, what in names]
    return TelemetryMessage(times[0], times[-1] + 10**9, series, packed, list(troubles))


def finished(rank, *, last=None, **place) -> list[AgentBody]:
    """Its script and its process ended well; `last` are fields of its recorder's last state."""
    at = where(rank, **place)
    final = {"phase": "finished", "attempt": at.attempt, "step": at.step, "batch": at.batch, **(last or {})}
    return [
        EventMessage(ScriptExit(at, 0)),
        NodeBeat([state(rank, **{"final": True, "hooks": "attached", **final})], {}),
        ended(rank, 0, phase="finished", **place),
    ]


def broken_off(rank, code=1, by="itself", *, last=None, phase="script", **place) -> list[AgentBody]:
    """Its process ended in the middle, as in an attempt before a restart, and its recorder was read to its end."""
    at = where(rank, **place)
    final = {"phase": phase, "attempt": at.attempt, "step": at.step, "batch": at.batch, **(last or {})}
    return [
        NodeBeat([state(rank, **{"final": True, "hooks": "attached", **final})], {}),
        ended(rank, code, by, phase=phase, **place),
    ]


def raised(rank, error="ValueError", message="boom", *, module=None, peer=False, **place) -> EventMessage:
    return EventMessage(ScriptError(where(rank, **place), error, message, f"Traceback: {error}", module, peer))


def preflight(rank, outcome, stage="all_reduce", detail="detail", *, stops=True, **place) -> EventMessage:
    return EventMessage(PreflightResult(where(rank, **place), outcome, stage, detail, stops, "gloo", "cpu"))


def began(rank, stage, **place) -> EventMessage:
    return EventMessage(PreflightBegan(where(rank, **place), stage, 60.0))


def stage(rank, name, seconds=0.1, grade="ok", detail="", **place) -> EventMessage:
    return EventMessage(PreflightStage(where(rank, **place), name, seconds, detail, grade))


def found(stage, grade="fail", subject="rank", ranks=(), hosts=(), sentence="it is bad", **more) -> PreflightFinding:
    return PreflightFinding(stage, grade, subject, list(ranks), list(hosts), sentence, **more)


def concluded(rank, findings=(), outcome="ok", stage="", detail="", *, stops=None, **place) -> EventMessage:
    stops = any(finding.grade == "fail" for finding in findings) if stops is None else stops
    return EventMessage(
        PreflightResult(where(rank, **place), outcome, stage, detail, stops, "gloo", "cpu", findings=list(findings))
    )


def state(rank, *, local_rank=0, attempt=0, step=0, batch=0, seq=0, phase="forward", pid=None, **more) -> RankState:
    return RankState(rank, local_rank, attempt, 100 + rank if pid is None else pid, phase, step, batch, seq, **more)


BUILDERS = SimpleNamespace(
    Batch=Batch,
    NodeBeat=NodeBeat,
    NodeBye=NodeBye,
    RankInventoryEvent=RankInventoryEvent,
    RowMark=RowMark,
    Phase=FramePhase,
    NAN=NAN,
    INF=INF,
    NEGINF=NEGINF,
    where=where,
    hello=hello,
    hello_of=hello_of,
    ended=ended,
    finished=finished,
    raised=raised,
    preflight=preflight,
    began=began,
    broken_off=broken_off,
    stage=stage,
    found=found,
    concluded=concluded,
    state=state,
    telemetry=telemetry,
)


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium here: apt-get install chromium (.ci/run does that)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def make() -> SimpleNamespace:
    return BUILDERS
