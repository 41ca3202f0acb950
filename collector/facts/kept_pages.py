"""Pages of all ranks: a few numbers of each stay in memory, and the rest is read again from the store when needed.

A thousand ranks that trace a batch a second send more than any memory holds.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeVar

import numpy

from ...core.events.definitions import Definition
from ...core.frames import LOSS_CLASS, Frame, FramePhase, Page, Row, RowKind
from ...core.recorder.page_tables import PageTables, whole
from ...core.recorder.pages import NameTable, decode_frame
from ...core.roles import GRADIENTS, RoleKind, parse_role
from ...core.signal_errors import from_outside
from ...core.values import DTYPE_NAMES
from ...core.wire.columns import NO_NUMBER, unpack
from ...core.wire.messages import PageMessage, RankHistoryMessage
from ..report.run_figures import HeatModule

# The definitions of all ranks, each kept once: ranks of one role define the same modules in the same order.
#
# rank 0   Net  fc1  fc2  head           a rank is a place in this tree: the last thing that it has defined
# rank 1   Net  fc1  fc2  head           ranks with the same place have the same names
# rank 2   Net  fc1  fc2  norm

_KEPT = 32
"""Places whose names are kept ready: one for each role of a rank, and those of ranks that have just begun."""
START = 0
"""The place of a rank that has defined nothing."""


class SharedNames:
    """Places by what was defined there."""

    def __init__(self) -> None:
        self._numbers: dict[Definition, int] = {}
        self._entries: list[Definition] = []
        self._next: dict[tuple[int, int], int] = {}
        self._came_from: list[tuple[int, int]] = [(START, -1)]
        self._depths = [0]
        self.at = lru_cache(_KEPT)(self._names_at)
        """place -> the names of a rank there. Not to be changed."""

    def after(self, place: int, entries: Iterable[Definition]) -> int:
        """The place of a rank that was at `place` and has defined these."""
        for entry in entries:
            number = self._numbers.setdefault(entry, len(self._entries))
            if number == len(self._entries):
                self._entries.append(entry)
            step = (place, number)
            there = self._next.setdefault(step, len(self._came_from))
            if there == len(self._came_from):
                self._came_from.append(step)
                self._depths.append(self._depths[place] + 1)
            place = there
        return place

    def depth(self, place: int) -> int:
        """How much was defined up to there."""
        return self._depths[place]

    def _names_at(self, place: int) -> NameTable:
        entries: list[Definition] = []
        while place != START:
            place, number = self._came_from[place]
            entries.append(self._entries[number])
        names = NameTable()
        names.add(reversed(entries))
        return names


Load = Callable[[], PageMessage | None]
Weights = dict[tuple[str, str], Row]
"""(module, role) -> row"""

T = TypeVar("T")


class RankNames:
    """The names of one rank, which can still grow."""

    __slots__ = ("_places", "_shared", "place")

    def __init__(self, shared: SharedNames) -> None:
        self._shared = shared
        self._places: dict[str, int] = {}
        """agent -> its place; a restarted agent sends all its definitions again"""
        self.place = START

    def add(self, agent: str, entries: list[Definition]) -> None:
        """Add definitions that an agent has sent for this rank."""
        there = self._places[agent] = self._shared.after(self._places.get(agent, START), entries)
        if self._shared.depth(there) > self._shared.depth(self.place):
            self.place = there

    @property
    def names(self) -> NameTable:
        """As far as they are known."""
        return self._shared.at(self.place)


_MOST_KEPT = {"tables": 8, "frames": 8, "in common": 256}


class PageCache:
    """The most recently used tables and frames, and data that many pages share."""

    def __init__(self) -> None:
        self.names = SharedNames()
        self.keys = itertools.count()
        self._kept: dict[str, OrderedDict[Hashable, Any]] = {kind: OrderedDict() for kind in _MOST_KEPT}

    def get(self, kind: Literal["tables", "frames", "in common"], key: Hashable, make: Callable[[], T]) -> T:
        """The tables or frames of the page with this key, or the data that all pages with this key share."""
        kept = self._kept[kind]
        if key in kept:
            kept.move_to_end(key)
            known: T = kept[key]
            return known
        found = kept[key] = make()
        if len(kept) > _MOST_KEPT[kind]:
            kept.popitem(last=False)
        return found


class KeptPage:
    """One page of one rank."""

    __slots__ = (
        *("_cache", "_common", "_first", "_key", "_last_phase", "_load", "_named", "_names", "_root", "_suspicious"),
        "_has_flags",
        *("attempt", "batch", "cleared_at", "complete", "num_frames", "num_rows", "number", "rank", "step"),
    )

    def __init__(self, message: PageMessage, load: Load, names: RankNames, cache: PageCache) -> None:
        """`load` gives the message again. Raises an error for bytes that no recorder holds."""
        tables = PageTables(message)
        self.rank, self.attempt, self.number = message.rank, message.attempt, message.number
        self.batch, self.step, self.complete = message.batch, message.step, message.complete
        self.num_frames, self.num_rows = len(tables.frames), len(tables.rows)
        self._suspicious: tuple[int, bool] = names.place, tables.suspicious(names.names)
        self._has_flags = bool(tables.flags.any())
        bad = self._suspicious[1]  # nobody asks for the names of another one
        self._named = (names.place, tables.are_named(names.names)) if bad else (-1, False)
        self._root, self._first, self._last_phase = message.root, tables.first_fields, tables.last_phase
        self._load, self._names, self._cache, self._key = load, names, cache, next(cache.keys)
        cache.get("tables", self._key, lambda: tables)
        self._common: tuple[int, tuple[bytes, bytes, bytes]] | None = None
        self.cleared_at = -1
        """`place_of_names` when it was found to hold no alarm."""

    @property
    def root(self) -> str:
        """The root's label."""
        return self._names.names.root_label(self._root)

    @property
    def has_backward(self) -> bool:
        """Frames are in the order in which they happened: a batch with a backward does not end with its forward."""
        return self._last_phase not in (-1, FramePhase.FORWARD.number)

    @property
    def shows_modules(self) -> bool:
        """Whether it has more than losses, or is of a training without modules: nothing else can be in that."""
        return self.num_frames > 0 and (not self._tables.has_losses_alone or self.root == LOSS_CLASS)

    @property
    def has_gradients(self) -> bool:
        """Whether a module of its root has had a gradient, in this batch or before: then the root is trained."""
        names = self._names.names
        own = {module.id for module in names.modules.values() if module.root == self._root}
        return any(slot.module in own and parse_role(slot.role).kind in GRADIENTS for slot in names.slots.values())

    @property
    def first_frame(self) -> Frame | None:
        """The first frame, without its rows."""
        if self._first is None:
            return None
        return decode_frame(self.batch, self._first, (), lambda index: None, self._names.names)

    @property
    def frames(self) -> list[Frame]:
        """All frames, in their order in the page."""
        return self._cache.get("frames", (self._key, self._names.place), lambda: self._tables.decode(self._names.names))

    @property
    def may_hold_alarm(self) -> bool:
        """Whether more than an argument was nan or inf in it. Names that come later can only take that away."""
        return self._suspicious[1]

    @property
    def suspicious_frames(self) -> list[Frame]:
        """The frames in which more than an argument is nan or inf. Nothing else in a page can be an alarm."""
        place, suspicious = self._suspicious
        if suspicious and place != self._names.place:  # a slot that was not known then may be an argument's
            suspicious = self._tables.suspicious(self._names.names)
            self._suspicious = self._names.place, suspicious
        return self._tables.decode_suspicious(self._names.names) if suspicious else []

    @property
    def first_mask(self) -> tuple[Frame, Row] | None:
        """The first argument or buffer of a call that held -inf alone; None if there is none."""
        if not self._has_flags:
            return None
        rows = ((frame, row) for frame in self.frames for row in frame.rows if row.only_neginf)
        return next(((frame, row) for frame, row in rows if row.role_kind in (RoleKind.INPUT, RoleKind.BUFFER)), None)

    @property
    def lost_frames(self) -> int:
        """Frames that were overwritten before they were read."""
        return self._tables.lost_frames

    @property
    def fullness(self) -> tuple[int, bool, int]:
        """The sort key by which the fuller of two copies of a page is kept."""
        return self.num_frames, self.complete, self._tables.arrived

    @property
    def place_of_names(self) -> int:
        """Changes when definitions of its rank come."""
        return self._names.place

    @property
    def as_known(self) -> tuple[int, int]:
        """Changes when another copy or more names arrive. It is cheaper than `==`, which reads both pages whole."""
        return self._key, self._names.place

    @property
    def is_named(self) -> bool:
        """Whether all of its names are known. Without one, a row may be an argument, a weight or an output."""
        place, named = self._named
        if not named and place != self._names.place:  # names are added, and none is taken away
            named = self._tables.are_named(self._names.names)
            self._named = self._names.place, named
        return named

    def prepare(self) -> None:
        """Find out now, while its tables are at hand, what a comparison with other ranks asks for."""
        _ = self._in_common

    def modules(self) -> frozenset[tuple[str, str]]:
        """(name, class) of what its forward has called, without the root."""

        def make() -> frozenset[tuple[str, str]]:
            return frozenset((f.module, f.cls) for f in self.frames if f.phase == FramePhase.FORWARD and f.module)

        return self._cache.get("in common", ("modules", self._names.place, self._in_common[0]), make)

    def calls_in_common(self, make: Callable[[], T]) -> T:
        """What follows from how its calls nest and issue collectives alone; made once for all pages alike."""
        return self._cache.get("in common", ("calls", self._names.place, self._in_common[1]), make)

    def weights(self) -> Weights:
        """As the first call of each module saw them."""
        return self._cache.get("in common", ("weights", self._names.place, self._in_common[2]), self._make_weights)

    @property
    def _in_common(self) -> tuple[bytes, bytes, bytes]:
        """What pages with the same modules, the same nesting of calls, and the same weights have in common."""
        if self._common is None or self._common[0] != self._names.place:
            tables = self._tables
            parts = tables.forward_modules(), tables.shape_of_calls(), tables.weights(self._names.names)
            modules, calls, weights = (hashlib.blake2b(part, digest_size=16).digest() for part in parts)
            self._common = self._names.place, (modules, calls, weights)
        return self._common[1]

    def _make_weights(self) -> Weights:
        found: Weights = {}
        for frame in sorted(self._tables.forward_weights(self._names.names), key=lambda frame: frame.index):
            for row in frame.weights:
                if row.kind == RowKind.MEASURED:
                    found.setdefault((frame.module, row.role), row)
        return found

    @property
    def head(self) -> Page:
        """What it is of, without frames."""
        return self._page([], 0)

    def lazy(self) -> Page:
        """A page whose frames decode their rows on access: to be read, not to be written."""
        return self._page(self.frames, self.lost_frames)

    def whole(self) -> Page:
        """All of it as a value, to be written."""
        return self._page([whole(frame) for frame in self.frames], self.lost_frames)

    def _page(self, frames: list[Frame], lost: int) -> Page:
        return Page(self.rank, self.attempt, self.number, self.root, self.batch, self.step, self.complete, frames, lost)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeptPage) and self.whole() == other.whole()

    __hash__ = None  # type: ignore[assignment]  # two copies of a page are equal, and found by their number

    @property
    def _tables(self) -> PageTables:
        return self._cache.get("tables", self._key, self._make_tables)

    def _make_tables(self) -> PageTables:
        message = self._load()
        return PageTables(message if message is not None else PageMessage(0, 0, 0, 0, self.batch, 0, False, []))


# How large the outputs of a rank's modules were: where it is stored, and the numbers once somebody looks.


_HistoryColumns = tuple[list[HeatModule], list[int], list[int]]
"""(modules, sources, targets): column `sources[i]` of a message belongs to module `targets[i]`"""


@dataclass(frozen=True)
class OpenHistory:
    """The numbers: float32 of shape (batches, modules); NO_NUMBER where there is none. A module stands there once."""

    batches: list[int]
    steps: list[int]
    modules: list[HeatModule]
    numbers: Any


@dataclass(frozen=True)
class KeptHistory:
    """The history of one root of one rank. `load` reads the message again."""

    load: Callable[[], RankHistoryMessage | None]
    names: RankNames
    cache: PageCache
    root_id: int

    @property
    def root(self) -> str:
        """The root's label."""
        return self.names.names.root_label(self.root_id)

    def open(self) -> OpenHistory | None:
        """None if it is lost or damaged."""
        message = self.load()
        if message is None:
            return None
        try:
            numbers = unpack(message)
        except ValueError as error:
            if from_outside(error):
                raise
            return None
        key = ("columns", self.names.place, tuple(message.slots), message.dtypes)
        modules, sources, targets = self.cache.get("in common", key, lambda: self._columns(message))
        found = numpy.full((len(numbers), len(modules)), NO_NUMBER, numpy.float32)
        if len(modules) == len(sources):
            found[:, targets] = numbers[:, sources]
        else:
            for source, target in zip(sources, targets, strict=True):  # the larger one; nan above all
                found[:, target] = numpy.maximum(found[:, target], numbers[:, source])
        return OpenHistory(message.batches, message.steps, modules, found)

    def _columns(self, message: RankHistoryMessage) -> _HistoryColumns:
        names = self.names.names
        place: dict[str, int] = {}
        modules: list[HeatModule] = []
        sources: list[int] = []
        targets: list[int] = []
        for column, (slot_id, dtype) in enumerate(zip(message.slots, message.dtypes, strict=True)):
            slot = names.slots.get(slot_id)
            module = names.modules.get(slot.module) if slot is not None else None
            if module is not None:
                if module.name not in place:
                    place[module.name] = len(modules)
                    known = DTYPE_NAMES[dtype] if dtype < len(DTYPE_NAMES) else "unknown"
                    modules.append(HeatModule(module.name, module.cls, known))
                sources.append(column)
                targets.append(place[module.name])
        return modules, sources, targets
