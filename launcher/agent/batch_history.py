"""How large the outputs of one rank's modules and its loss were, batch by batch: all at first, coarser with age.

It is read from pages that the recorder holds anyway. It takes a bounded share of a processor, so of a rank whose
batches are very short it sees only some; and bounded memory for any length of run. It is sent once, when the rank has
ended and somebody has asked for one of its batches. How long its steps took is kept likewise.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TypeVar

import numpy
from msgspec.structs import replace

from ...core.events.agent_events import LimitForecast, StepTimes
from ...core.events.definitions import Definition, ModuleDef, SlotDef
from ...core.events.run_position import RunPosition
from ...core.frames import LOSS_MODULE
from ...core.growth_run import MOST_BATCHES, SizeSeries, growing_run, known_sizes
from ...core.recorder.layout import PARTS, HeadField, TimedStep
from ...core.recorder.page_tables import PageTables
from ...core.recorder.reader import RecorderReader
from ...core.values import DTYPE_MAX, DTYPE_NAMES
from ...core.wire.beat import HotModule
from ...core.wire.columns import ABSENT, MOST_STEPS, OutputSlots, number_of, pack, pack_starts, pack_steps
from ...core.wire.messages import PageMessage, RankHistoryMessage
from .forecast import BatchRow, LimitCrossing, RootForecasts, closest
from .step_pages import StepPages

# How the kept history of a long run gets coarser with age. Pure.

T = TypeVar("T")


def thinned(rows: Sequence[T], number: Callable[[T], int], every: int) -> list[T]:
    """Keep one of 2 numbers of the rows older than `every`, one of 4 of the rows twice as old, and so on.

    `number` counts the rows as they came.

    >>> thinned(range(12), int, 4)
    [0, 4, 6, 8, 9, 10, 11]
    """
    newest = number(rows[-1])
    kept: dict[tuple[int, int], T] = {}
    for row in rows:
        step = 1 << max(0, ((newest - number(row)) // every).bit_length())
        kept.setdefault((step, number(row) // step), row)
    return list(kept.values())


def spread(rows: Sequence[T], most: int) -> list[T]:
    """At most `most`: half of them are the newest, half are older ones at even distances."""
    if len(rows) <= most:
        return list(rows)
    newest = rows[-(most // 2) :]
    older = rows[: -(most // 2)]
    left = most - len(newest)
    return [*(older[n * len(older) // left] for n in range(left)), *newest]


SHARE = 0.0015
"""The share of one processor that it may take for all ranks of a node."""
EVERY_BATCH = 64
"""The newest batches of a root, each of which is kept; of those before, one of 2, of 4, and so on, 32 of each."""
BYTES = 8 << 20
"""The most bytes of one rank; beyond it the oldest rows are dropped first."""
SENT_BYTES = 128 << 10
"""The most bytes of one root that are sent, before packing."""
_PENDING_S = 1.0
"""How long to wait for numbers that come back late from a device."""
_AT_A_TIME = 4
"""The most batches read in one turn."""
_LAST = 16
"""The last pages of the ring, read when the rank has ended."""


class RankHistory:
    """The history of one rank in one attempt, one of `ranks` on its node. `clock` is processor time in seconds."""

    def __init__(self, ranks: int = 1, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._share = SHARE / ranks
        self._slots = OutputSlots()
        self._dtypes: dict[int, int] = {}
        self._rows: dict[int, list[BatchRow]] = {}
        """By root, in the order of their batches."""
        self._bytes = 0
        self._done = -1
        """The last page read."""
        self._since: tuple[int, float] = (-1, 0.0)
        """A page whose numbers are late, and since when."""
        self._due = 0.0
        self._modules: dict[int, ModuleDef] = {}
        self._module_of: dict[int, int] = {}
        """Slot -> module."""
        self._loss_columns: set[int] = set()
        self.loss = -1.0
        """The absolute value of the loss of the newest batch that was read, to 8 bits; -1: none."""
        self._forecasts: dict[int, RootForecasts] = {}
        """By root."""
        self._told: list[LimitForecast] = []
        self.forecast_error: Exception | None = None
        """The first error of ours in them."""
        self.steps = StepPages()
        self._hottest: list[HotModule] = []
        self._hottest_of: tuple[int, ...] = ()

    def define(self, entries: Iterable[Definition]) -> None:
        """New definitions of the rank."""
        entries = list(entries)
        self._slots.define(entries)
        self.steps.define(entries)
        for entry in entries:
            if isinstance(entry, ModuleDef):
                self._modules[entry.id] = entry
            elif isinstance(entry, SlotDef):
                self._module_of[entry.id] = entry.module
                module = self._modules.get(entry.module)
                if module is not None and module.name == LOSS_MODULE and entry.id in self._slots.slots:
                    self._loss_columns.add(self._slots.slots.index(entry.id))

    def read(self, reader: RecorderReader, header: tuple[int, ...], now: float) -> None:
        """Look at the newest batches that are over, if it is time for that. `now` is monotonic time in seconds."""
        number = header[HeadField.PAGE] - 1
        if now < self._due or number <= self._done:
            return
        began = self._clock()
        if self._since[0] != number:
            self._since = number, now
        late = now - self._since[1] > _PENDING_S
        self.steps.read_again(reader, late=late)
        for earlier in range(max(self._done + 1, number - _AT_A_TIME + 1), number + 1):
            self._take(reader.page(earlier), late=late)
        self._due = now + (self._clock() - began) / self._share

    def told(self, rank: int, attempt: int) -> list[LimitForecast]:
        """The forecasts that were made since the last call: a module before the ones around it."""
        told = sorted(self._told, key=lambda each: each.module.count(".") + (each.module != ""), reverse=True)
        self._told = []
        return [replace(each, where=replace(each.where, rank=rank, attempt=attempt)) for each in told]

    def hottest(self, rank: int, most: int) -> list[HotModule]:
        """The modules closest to their limit in the newest batch of each root."""
        newest = tuple(rows[-1].batch for rows in self._rows.values())
        if newest != self._hottest_of:
            self._hottest_of = newest
            self._hottest = [
                HotModule(rank, rows[-1].batch, module.name, DTYPE_NAMES[self._dtypes[column]], *how_close)
                for rows in self._rows.values()
                for column, *how_close in closest(rows, self._dtypes, most + 1)  # one may be the loss
                if (module := self._module(column)) is not None
            ]
        return self._hottest

    def _module(self, column: int) -> ModuleDef | None:
        """None for the loss, too: no limit of its dtype is of interest."""
        found = self._modules.get(self._module_of.get(self._slots.slots[column], -1))
        return found if found is not None and found.name != LOSS_MODULE else None

    def finish(self, reader: RecorderReader) -> None:
        """The rank has ended: read the pages that its recorder still holds."""
        for held in reader.held()[-_LAST:]:
            if held.number > self._done:
                self._take(reader.page(held.number), late=True)

    def growth_began(self, root: int, batch: int) -> int | None:
        """The first batch of the growth that led to an overflow in `batch`: of the output that grew first.

        None if no output of this root ran away.
        """
        rows = [row for row in self._rows.get(root, []) if row.batch <= batch][-MOST_BATCHES:]
        sizes: dict[int, SizeSeries] = {}
        for row in rows:
            for column, code in zip(row.columns.tolist(), row.codes, strict=True):
                sizes.setdefault(column, []).append((row.batch, number_of(code)))
        runs = (growing_run(known_sizes(series, batch), batch) for series in sizes.values())
        return min((run[1][0] for run in runs if run), default=None)

    def _take(self, page: PageMessage | None, *, late: bool) -> None:
        if page is None:
            return
        tables = PageTables(page)
        reading = self._slots.read(tables)
        if reading.pending and not late:
            return
        self._done = page.number
        self.steps.read(page, tables, late=late)
        if not len(reading.columns):
            return
        self._dtypes.update(zip(reading.columns.tolist(), reading.dtypes.tolist(), strict=True))
        rows = self._rows.setdefault(page.root, [])
        row = BatchRow(page.batch, page.step, reading.columns.astype(numpy.uint32), reading.codes)
        rows.append(row)
        self._read_loss(row)
        self._bytes += _size(row)
        if len(rows) % EVERY_BATCH == 0 or self._bytes > BYTES:
            self._thin()
        try:
            told = self._forecasts.setdefault(page.root, RootForecasts()).update(self._rows[page.root], self._dtypes)
            self._told += [found for each in told if (found := self._forecast(*each, page)) is not None]
        except Exception as error:  # it decides nothing, and costs the history nothing
            self.forecast_error = self.forecast_error or error

    def _read_loss(self, row: BatchRow) -> None:
        for column in self._loss_columns:
            at = int(numpy.searchsorted(row.columns, column))
            if at < len(row.columns) and row.columns[at] == column:
                self.loss = number_of(row.codes[at])

    def _forecast(self, column: int, passing: LimitCrossing, page: PageMessage) -> LimitForecast | None:
        module = self._module(column)
        if module is None:
            return None
        where = RunPosition(0, 0, page.step, page.batch, "", page.number, time_ns=time.time_ns())
        dtype = DTYPE_NAMES[self._dtypes[column]]
        return LimitForecast(where, module.name, module.cls, dtype, DTYPE_MAX[dtype], *passing)

    def _thin(self) -> None:
        for root, rows in self._rows.items():
            self._rows[root] = thinned(rows, attrgetter("batch"), EVERY_BATCH)
        self._bytes = sum(_size(row) for rows in self._rows.values() for row in rows)
        while self._bytes > BYTES and any(len(rows) > 1 for rows in self._rows.values()):
            rows = max(self._rows.values(), key=len)
            left = rows[len(rows) // 2 :]
            self._bytes -= sum(map(_size, rows[: len(rows) // 2]))
            rows[:] = left

    def messages(self, rank: int, attempt: int) -> list[RankHistoryMessage]:
        """All of it, one message for each root."""
        found = []
        for root, rows in self._rows.items():
            used = sorted({column for row in rows for column in row.columns.tolist()})
            rows = spread(rows, max(8, SENT_BYTES // (2 * max(1, len(used)))))
            place = numpy.full(len(self._slots.slots), 0, numpy.int64)
            place[used] = numpy.arange(len(used))
            codes = numpy.full((len(rows), len(used)), ABSENT, numpy.uint16)
            for n, row in enumerate(rows):
                codes[n, place[row.columns]] = row.codes
            batches, steps = [row.batch for row in rows], [row.step for row in rows]
            slots, dtypes = [self._slots.slots[n] for n in used], bytes(self._dtypes[n] for n in used)
            found.append(RankHistoryMessage(rank, attempt, root, batches, steps, slots, dtypes, pack(codes)))
        return found


def _size(row: BatchRow) -> int:
    """Bytes in memory, with what Python needs for it."""
    return int(row.columns.nbytes + row.codes.nbytes) + 400


# How long the parts of one rank's steps took: a sample of its steps for the collector, the same steps on all ranks.
#
# A sample consists of blocks of consecutive steps, so that an occasional event shows as one. It is bounded for any
# length of run: each time it is full, every second block is dropped.

LAST_STEPS = 64
"""How many of the last steps the limit of rests is learned from (rank_stalls.py)."""
BLOCK = 8
"""Consecutive steps."""


_NEVER = 1 << 63


class RankStepTimes:
    """The step times of one rank in one attempt."""

    def __init__(self) -> None:
        self._seen = 0
        """Timed steps so far."""
        self._every = 1
        """One block of this many is kept."""
        self._kept: list[tuple[TimedStep, int]] = []
        """With the nanoseconds from the beginning of the first step of all."""
        self._began_ns = _NEVER
        """When that began: a step is read after its end, and soon after most."""
        self._any_lost = False
        self._total_ns = [0] * len(PARTS)
        self._taken = 0
        self.last_s: deque[float] = deque(maxlen=LAST_STEPS)
        """Seconds of the last steps that were timed, in their order."""

    def read(self, reader: RecorderReader, header: tuple[int, ...]) -> None:
        """Take the steps that were timed since the last look. What the ring has lost meanwhile is not in the sums."""
        if header[HeadField.STEPS_TIMED] == self._seen:
            return
        for count, step in reader.steps(self._seen):
            self._any_lost |= count != self._seen + 1
            self._seen = count
            self.add(step)
        self._began_ns = min(self._began_ns, time.time_ns() - sum(self._total_ns))

    def add(self, step: TimedStep) -> None:
        """One step more."""
        self._taken += 1
        self.last_s.append(sum(step.parts) / 1e9)
        start_ns = sum(self._total_ns)
        for part, ns in enumerate(step.parts):
            self._total_ns[part] += ns
        if step.number // BLOCK % self._every:
            return
        self._kept.append((step, start_ns))
        if len(self._kept) > MOST_STEPS:
            self._every *= 2
            self._kept = [kept for kept in self._kept if not kept[0].number // BLOCK % self._every]

    @property
    def so_far(self) -> tuple[int, list[int]]:
        """(steps that were taken, microseconds of all of them in each part)."""
        return self._taken, [ns // 1000 for ns in self._total_ns] if self._taken else []

    def event(self, where: RunPosition) -> StepTimes | None:
        """The times so far; None if no step was timed."""
        if not self._kept:
            return None
        steps, starts_ns = zip(*self._kept, strict=True)
        is_known = self._began_ns < _NEVER and not self._any_lost
        placed = (self._began_ns, pack_starts(starts_ns)) if is_known else ()
        return StepTimes(where, self._seen, [ns / 1e9 for ns in self._total_ns], pack_steps(steps), *placed)
