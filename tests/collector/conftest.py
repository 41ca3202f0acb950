"""Builders: what one rank records of a batch, and the messages of a job, by hand."""

from __future__ import annotations

import math
import struct
from types import SimpleNamespace

import pytest
from gpuwatch.core.frames import Phase, RowKind
from gpuwatch.core.messages import (
    AgentBody,
    Beat,
    Bye,
    Definitions,
    EventMessage,
    Hello,
    PageMessage,
    RankState,
    Segment,
)
from gpuwatch.core.recorder import layout
from gpuwatch.core.records import (
    Anomaly,
    Definition,
    Inventory,
    ModuleDef,
    PreflightResult,
    RootDef,
    ScriptError,
    ScriptExit,
    ShapeDef,
    SlotDef,
    Where,
    WorkerExit,
)
from gpuwatch.core.values import DTYPE_CODES, Encoding, NonFinite, name_of

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

    def __init__(self, rank=0, *, root="Net", batch=0, step=None, page=0, attempt=0, seq=0, aborts=True):
        self.rank, self.root, self.batch, self.page, self.attempt, self.seq = rank, root, batch, page, attempt, seq
        self.step = batch if step is None else step
        self.aborts = aborts
        self.anomaly: Anomaly | None = None
        self._definitions: list[Definition] = [RootDef(0, root.partition("#")[0], 0), ShapeDef(0, (2, 3))]
        self._modules: dict[str, int] = {}
        self._slots: dict[tuple[int, str], int] = {}
        self._values: list[tuple[int, int, int]] = []
        self._flags: list[NonFinite] = []
        self._rows: list[tuple[int, ...]] = []
        self._frames: list[bytes] = []

    def tensor(self, number: float = 1.0) -> int:
        """A tensor whose only value is `number`; the same index twice is the same tensor."""
        flags = _flags(number)
        (bits,) = struct.unpack("<I", struct.pack("<f", abs(number)))
        self._values.append((bits, bits, Encoding.FLOAT32 << 8 | flags))
        self._flags.append(flags)
        return len(self._values) - 1

    def _module(self, name: str, cls: str | None = None) -> int:
        """Its number. A parent is known by its name alone until its own call has returned."""
        number = self._modules.setdefault(name, len(self._modules))
        if cls is not None:
            self._definitions = [d for d in self._definitions if not (isinstance(d, ModuleDef) and d.id == number)]
            self._definitions.append(ModuleDef(number, 0, name, cls))
        return number

    def call(self, module, cls, *, given=(), returned=(), weights=None, kwargs=None, parent="", depth=None, seq=None):
        """A module call that has returned; arguments and results are tensors of this batch. Returns its index."""
        number = self._module(module, cls)
        parent_number = layout.NOTHING if module == "" else self._module(parent)
        roles = [(name, value) for name, value in (weights or {}).items()]
        roles += [(f"input[{position}]", value) for position, value in enumerate(given)]
        roles += [(f"kwargs.{name}", value) for name, value in (kwargs or {}).items()]
        output = ["output"] if len(returned) == 1 else [f"output[{position}]" for position in range(len(returned))]
        roles += list(zip(output, returned, strict=True))
        first = len(self._rows)
        for role, value in roles:
            slot = self._slots.setdefault((number, role), len(self._slots))
            if slot == len(self._slots) - 1:
                self._definitions.append(SlotDef(slot, number, role))
            self._rows.append((slot, value, 0, DTYPE_CODES["float32"], RowKind.MEASURED, 0))
        if depth is None:
            depth = 0 if module == "" else module.count(".") + 1
        seq = self.seq if seq is None else seq
        index = len(self._frames)
        self._frames.append(
            layout.FRAME.pack(number, parent_number, depth, Phase.FORWARD, 0, seq, first, len(roles), index)
        )
        self._alarm(index, module, cls, roles, bool(weights), seq)
        return index

    def _alarm(self, index, module, cls, roles, weighted, seq):
        flags = {role: self._flags[value] for role, value in roles}
        bad_inputs = NonFinite.NONE
        bad_weights = NonFinite.NONE
        for role, found in flags.items():
            if role.startswith(("input", "kwargs")):
                bad_inputs |= found
            elif not role.startswith("output"):
                bad_weights |= found
        for role, found in flags.items():
            if not found or self.anomaly is not None:
                continue
            made_here = role.startswith("output") and weighted and not bad_inputs
            activation = role.startswith(("output", "input", "kwargs"))
            if found == NonFinite.NEGINF and activation and not made_here:
                continue
            where = Where(self.rank, self.attempt, self.step, self.batch, self.root, self.page, seq, 1_000)
            self.anomaly = Anomaly(
                where, index, module, cls, "forward", role, name_of(found), "float32", [2, 3],
                not bad_inputs, not bad_weights, self.aborts,
            )  # fmt: skip

    def definitions(self) -> Definitions:
        return Definitions(self.rank, self.attempt, list(self._definitions))

    def page_message(self, *, complete=True, first_frame=0) -> PageMessage:
        rows = b"".join(layout.ROW.pack(*row) for row in self._rows)
        values = b"".join(layout.VALUE.pack(*value) for value in self._values)
        segment = Segment(0, first_frame, 0, b"".join(self._frames[first_frame:]), rows, values)
        return PageMessage(self.rank, self.attempt, self.page, 0, self.batch, self.step, complete, [segment])

    def messages(self, *, page=True) -> list[AgentBody]:
        found: list[AgentBody] = [self.definitions()]
        if self.anomaly is not None:
            found.append(EventMessage(self.anomaly))
        return [*found, self.page_message()] if page else found


def where(rank, *, attempt=0, step=0, batch=0, root="Net", page=0, seq=0, time_ns=1_000) -> Where:
    return Where(rank, attempt, step, batch, root, page, seq, time_ns)


def hello(agent="a0", host="h0", nproc=2, nodes=1, **more) -> Hello:
    given = {"command": ["gpuwatch", "launch", "train.py"], "versions": {"gpuwatch": "0.1"}, "rdzv_id": "job", **more}
    return Hello(agent, host, 1, nproc, nodes, nodes, **given)


def ended(rank, code=0, by="itself", *, phase="script", module=None, cls=None, **place) -> EventMessage:
    return EventMessage(WorkerExit(where(rank, **place), code, by, phase, module, cls))


def finished(rank, **place) -> list[EventMessage]:
    return [EventMessage(ScriptExit(where(rank, **place), 0)), ended(rank, 0, phase="finished", **place)]


def raised(rank, error="ValueError", message="boom", *, module=None, peer=False, **place) -> EventMessage:
    return EventMessage(ScriptError(where(rank, **place), error, message, f"Traceback: {error}", module, peer))


def preflight(rank, outcome, stage="all_reduce", detail="detail", *, stops=True, **place) -> EventMessage:
    return EventMessage(PreflightResult(where(rank, **place), outcome, stage, detail, stops, "gloo", "cpu"))


def state(rank, *, local_rank=0, attempt=0, step=0, batch=0, seq=0, phase="forward", **more) -> RankState:
    return RankState(rank, local_rank, attempt, 100 + rank, phase, step, batch, seq, **more)


BUILDERS = SimpleNamespace(
    Batch=Batch,
    Beat=Beat,
    Bye=Bye,
    Inventory=Inventory,
    NAN=NAN,
    INF=INF,
    NEGINF=NEGINF,
    where=where,
    hello=hello,
    ended=ended,
    finished=finished,
    raised=raised,
    preflight=preflight,
    state=state,
)


@pytest.fixture(scope="session")
def make() -> SimpleNamespace:
    return BUILDERS
