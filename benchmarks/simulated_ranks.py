"""Ranks without a training: what their recorders would hold was made beforehand. All that comes after is the product's.

A rank of this file stands where the node agent's `RankWatch` stands. It hands out the definitions of a model, a page
of one batch after another, and an anomaly when it is asked for one.
"""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy
from gpuwatch.core.events.agent_events import WorkerExit
from gpuwatch.core.events.alarms import Anomaly
from gpuwatch.core.events.definitions import Definition, ModuleDef, RootDef, ShapeDef, SlotDef
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.events.script_events import ScriptExit
from gpuwatch.core.frames import FramePhase, RowKind
from gpuwatch.core.recorder import layout
from gpuwatch.core.recorder import page_tables as tables
from gpuwatch.core.values import DTYPE_CODES, NonFinite, ValueEncoding
from gpuwatch.core.wire.beat import HotModule, NodeBeat, RankState
from gpuwatch.core.wire.columns import pack
from gpuwatch.core.wire.messages import (
    AgentBody,
    EventMessage,
    NameDefinitions,
    PageMessage,
    PageSegment,
    RankHistoryMessage,
    WantedBatch,
)

FLOAT32 = ValueEncoding.FLOAT32 << 8
VARIANTS = 8
"""Pages with other numbers, which the ranks take in turn."""
_DEFINITIONS_AT_ONCE = 700
_RING = 28
"""Pages of 1,000 frames that a recorder holds."""
_EARLIER = 3
"""Pages before the one that is asked for, which are sent too."""


class Model:
    """A chain of modules under one root, as the collector sees it: definitions, and pages with 3 rows to a frame."""

    def __init__(self, num_frames: int) -> None:
        self.num_frames = num_frames
        self.definitions: list[Definition] = [RootDef(0, "Net"), ShapeDef(0, (8, 512)), ShapeDef(1, (512, 512))]
        self.definitions.append(ModuleDef(0, 0, "", "Net"))
        for number in range(1, num_frames):
            self.definitions.append(ModuleDef(number, 0, f"encoder.layers.{number // 8}.block.{number % 8}", "Linear"))
        for number in range(num_frames):
            roles = ("weight", "input[0]", "output")
            self.definitions += [SlotDef(3 * number + place, number, role) for place, role in enumerate(roles)]
        self._variants = [self._segments(random.Random(seed), -1) for seed in range(VARIANTS)]
        self.bad_frame = num_frames // 2
        self._bad = self._segments(random.Random(0), self.bad_frame)

    def page(self, rank: int, number: int, seq: int, *, bad: bool = False) -> PageMessage:
        """Page `number` of a rank, whose batch and step have the same number."""
        segments = self._bad if bad else self._variants[(rank + number) % VARIANTS]
        if seq:
            segments = [_with_seq(segment, seq) for segment in segments]
        return PageMessage(rank, 0, number, 0, number, number, True, segments)

    def history(self, rank: int, last: int) -> RankHistoryMessage:
        """What the agent remembers of a rank: abs max of each output in the 64 batches up to the last."""
        batches = list(range(max(0, last - 63), last + 1))
        numbers = numpy.random.default_rng(rank).random((len(batches), self.num_frames), numpy.float32)
        codes = (numbers.view(numpy.uint32) >> 16).astype(numpy.uint16)
        slots = [3 * number + 2 for number in range(self.num_frames)]
        return RankHistoryMessage(
            rank, 0, 0, batches, batches, slots, bytes([DTYPE_CODES["float32"]]) * len(slots), pack(codes)
        )

    def _segments(self, numbers: random.Random, bad: int) -> list[PageSegment]:
        """`bad` is the frame whose output, and all that comes after it, is inf."""
        value = 0
        rows: list[bytes] = []
        values = [self._value(numbers.random())]
        frames: list[bytes] = []
        given = 0
        for number in [*range(1, self.num_frames), 0]:
            weight, output = len(values), len(values) + 1
            values += [self._value(0.25 + number / 4096), self._value(numbers.random(), inf=0 <= bad <= number)]
            first = len(rows)
            for place, value in enumerate((weight, given, output)):
                rows.append(
                    layout.ROW.pack(
                        3 * number + place, value, int(place == 0), DTYPE_CODES["float32"], RowKind.MEASURED.number, 0
                    )
                )
            parent, depth = (0, 1) if number else (layout.NOTHING, 0)
            index = len(frames)
            frames.append(layout.FRAME.pack(number, parent, depth, FramePhase.FORWARD.number, 0, 0, first, 3, index))
            given = output
        return list(_cut(frames, rows, values))

    @staticmethod
    def _value(number: float, *, inf: bool = False) -> bytes:
        if inf:
            return layout.VALUE.pack(0, 0x7F80_0000, FLOAT32 | NonFinite.POSINF)
        (bits,) = struct.unpack("<I", struct.pack("<f", number))
        return layout.VALUE.pack(bits >> 1, bits, FLOAT32)


def _with_seq(segment: PageSegment, seq: int) -> PageSegment:
    """The segment with its frames after `seq` collectives."""
    frames = numpy.frombuffer(bytearray(segment.frames), tables.FRAMES)
    frames["seq"] = seq
    return msgspec.structs.replace(segment, frames=frames.tobytes())


def _cut(frames: list[bytes], rows: list[bytes], values: list[bytes]) -> Iterator[PageSegment]:
    """Segments as a recorder would cut them: none of the three tables over its size."""
    at = value_at = index = 0
    each = min(layout.FRAMES_PER_SEGMENT, layout.ROWS_PER_SEGMENT // 3, layout.VALUES_PER_SEGMENT // 2)
    while at < len(frames):
        some = frames[at : at + each]
        shifted = []
        for count, frame in enumerate(some):
            fields = list(layout.FRAME.unpack(frame))
            fields[6] = 3 * count
            shifted.append(layout.FRAME.pack(*fields))
        until = len(values) if at + each >= len(frames) else 1 + 2 * (at + len(some))
        yield PageSegment(
            index,
            at,
            value_at,
            b"".join(shifted),
            b"".join(rows[3 * at : 3 * (at + len(some))]),
            b"".join(values[value_at:until]),
        )
        at, value_at, index = at + len(some), until, index + 1


class SimulatedRank:
    """Stands in for `RankWatch`: `poll` is what its recorder has brought since the last call."""

    def __init__(self, model: Model, rank: int, local_rank: int, world_size: int) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.attempt = 0
        self.ended = False
        self.was_removed = False
        self.pages = self.thinned = self.events = 0
        self.traces: Any = None
        """Which batches its agent sends, and what becomes of the others."""
        self._ring: dict[int, int] = {}
        """Of pages that were not sent and that a recorder would still hold: batch -> collectives."""
        self._model = model
        self._world_size = world_size
        self._asked = False
        self._due: list[AgentBody] = []
        entries = model.definitions
        for at in range(0, len(entries), _DEFINITIONS_AT_ONCE):
            self._due.append(NameDefinitions(rank, 0, entries[at : at + _DEFINITIONS_AT_ONCE]))

    def poll(self, now: float) -> list[AgentBody]:
        """New entries."""
        due, self._due = self._due, []
        return due

    def next_page(self, seq: int = 0) -> None:
        """A batch has ended, after `seq` collectives."""
        if self.traces is None or self.traces.takes(self.pages):
            self._send(self.pages, seq)
        else:
            self._ring[self.pages] = seq
            self.thinned += 1
            self._ring.pop(self.pages - _RING, None)
        self.pages += 1

    def _send(self, number: int, seq: int) -> None:
        page = self._model.page(self.rank, number, seq)
        self._due.append(page)
        if self.traces is not None:
            self.traces.sent(page)

    def overflow(self, seq: int) -> int:
        """A batch with an anomaly, seen after `seq` collectives. Returns the time of the event."""
        number = self.pages
        self.events += 1
        self._look_back(number, _EARLIER)
        where = RunPosition(self.rank, 0, number, number, "Net", number, seq, time.time_ns())
        module = self._model.definitions[3 + self._model.bad_frame]
        assert isinstance(module, ModuleDef)
        index = self._model.bad_frame - 1
        anomaly = Anomaly(
            where, index, module.name, module.cls, "forward", "output", "+inf", "float32", [8, 512], True, True, False
        )
        self._due += [EventMessage(anomaly), self._model.page(self.rank, number, seq, bad=True)]
        self.pages += 1
        return where.time_ns

    def want(self, want: WantedBatch, now: float) -> None:
        """It sends the page that was asked for, and its history when it has ended."""
        self._asked = True
        self._look_back(want.batch)

    def _look_back(self, batch: int, earlier: int = 0) -> None:
        for number in [number for number in self._ring if 0 <= batch - number <= earlier]:
            self.thinned -= 1
            self._send(number, self._ring.pop(number))

    def hottest(self) -> list[HotModule]:
        """Modules that are close to their limit."""
        return [
            HotModule(self.rank, self.pages - 1, f"layers.{n}.mlp.fc2", "float16", 3e4, n + 1.1, 0.0) for n in range(4)
        ]

    def state(self, *, final: bool = False) -> RankState:
        """Where it is."""
        batch = self.pages - 1
        return RankState(
            self.rank,
            self.local_rank,
            0,
            1,
            "finished" if final else "forward",
            batch,
            batch,
            batch,
            world_size=self._world_size,
            hooks="attached",
            final=final,
        )

    def end(self, code: int | None, by: str, now: float, look: object = None) -> list[AgentBody]:
        """Its last messages."""
        self.ended = True
        batch = self.pages - 1
        where = RunPosition(self.rank, 0, batch, batch, "Net", batch, batch, time.time_ns())
        exit_ = WorkerExit(where, 0, "itself", "finished")
        return [
            *self.poll(now),
            *([self._model.history(self.rank, batch)] if self._asked else []),
            EventMessage(ScriptExit(where, 0)),
            NodeBeat([self.state(final=True)], {}),
            EventMessage(exit_),
        ]

    def close(self) -> None:
        """Nothing to let go of."""


class NoGpus:
    """Stands in for `GpuWatch`: a child for each of a thousand agents would be a test of this machine."""

    fd: Callable[[], int] | None = None

    def anomaly(self, now: float) -> None:
        """Nothing to ask."""

    def end(self, now: float) -> None:
        """Nothing to ask."""

    def settled(self, now: float) -> bool:
        """Nothing is to come."""
        return True

    def close(self, wait_s: float = 0.0) -> None:
        """Nothing to end."""
