"""Which frames of a page the judge should see: found in its tables at once, so that only those are decoded.

A page of a transformer has thousands of rows, and a mask of -inf in nearly every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import numpy

from ...core.recorder import layout
from ...core.recorder.layout import SegmentField
from ...core.recorder.own_pages import OwnPages
from ...core.recorder.tables import FRAMES, ROWS, VALUES
from ...core.recorder.writer import OpenPage
from ...core.values import PENDING, NonFinite

Mask = Callable[[Any, Any, Any], Any]
"""(dtype codes, high, meta), arrays of one length -> an array of bool."""


def frames_to_judge(
    own: OwnPages,
    page: OpenPage,
    start: int,
    notable: Mask,
    arguments: Any,
    undecided: Set[int] = frozenset(),
    *,
    everything: bool,
) -> tuple[list[int], int]:
    """(indices of the frames from `start` on with a notable row, index of the first frame that was not looked at).

    That is the first frame with a number that is on its way, unless `everything` that comes is there. `arguments` is an
    array of bool by slot: a row of one of these is never notable by itself.

    The call around one with a bad value is found as well, finite or not: it decides what becomes of that. `undecided`
    are the indices of earlier frames with such a value.
    """
    segments = list(own.segments(page))
    values = _values(own, segments)
    found: list[int] = []
    end = start
    waiting: list[tuple[int, int]] = []
    for head, at in segments:
        base, count = head[SegmentField.FRAME_BASE], head[SegmentField.FRAMES]
        skip = max(0, start - base)
        frames = own.table(at + layout.FRAMES_AT, FRAMES, count)
        if skip >= count:
            _around(frames, numpy.isin(frames["index"], list(undecided)), waiting)
            continue
        rows = own.table(at + layout.ROWS_AT, ROWS, head[SegmentField.ROWS])
        stats = values[numpy.minimum(rows["value"].astype(numpy.int64), len(values) - 1)]
        pending = stats["meta"] == PENDING
        interesting = notable(rows["dtype"], stats["high"], stats["meta"]) & ~pending
        interesting &= ~arguments[numpy.minimum(rows["slot"], len(arguments) - 1)]
        # Sums from the left: a frame has such a row if the sum grows over its rows.
        sums = numpy.concatenate(([0], numpy.cumsum(interesting))), numpy.concatenate(([0], numpy.cumsum(pending)))
        first, last = frames["first"].astype(numpy.int64), (frames["first"] + frames["count"]).astype(numpy.int64)
        has = sums[0][last] > sums[0][first]
        flagged = interesting & ((stats["meta"] & 0xFF) != 0)
        flagged = numpy.concatenate(([0], numpy.cumsum(flagged)))
        bad = (flagged[last] > flagged[first]) & (numpy.arange(count) >= skip)
        if undecided:
            bad |= numpy.isin(frames["index"], list(undecided))
        has |= _around(frames, bad, waiting)
        has = has[skip:]
        if not everything:
            waits = numpy.flatnonzero((sums[1][last] > sums[1][first])[skip:])
            if len(waits):
                has = has[: waits[0]]
                return found + [base + skip + int(place) for place in numpy.flatnonzero(has)], base + skip + int(
                    waits[0]
                )
        found += [base + skip + int(place) for place in numpy.flatnonzero(has)]
        end = base + count
    return found, max(start, end)


def slots_of_masks(own: OwnPages, page: OpenPage, arguments: Any) -> set[int]:
    """The slots of arguments in a page that hold -inf, and nothing else that is not finite. `arguments`: as above."""
    segments = list(own.segments(page))
    values = _values(own, segments)
    found: set[int] = set()
    for head, at in segments:
        rows = own.table(at + layout.ROWS_AT, ROWS, head[SegmentField.ROWS])
        meta = values[numpy.minimum(rows["value"].astype(numpy.int64), len(values) - 1)]["meta"]
        is_mask = (meta != PENDING) & ((meta & 0xFF) == int(NonFinite.NEGINF))
        slots = rows["slot"][is_mask & arguments[numpy.minimum(rows["slot"], len(arguments) - 1)]]
        found.update(int(slot) for slot in slots)
    return found


def _around(frames: Any, bad: Any, waiting: list[tuple[int, int]]) -> Any:
    """An array of bool: the calls around those in `bad`. `waiting` are (parent, depth) of calls of earlier segments."""
    found = numpy.zeros(len(frames), bool)
    parents, depths = frames["parent"], frames["depth"]
    open_ = [(parent, depth, 0) for parent, depth in waiting]
    open_ += [(int(parents[place]), int(depths[place]), int(place) + 1) for place in numpy.flatnonzero(bad)]
    waiting.clear()
    for parent, depth, since in open_:
        around = numpy.flatnonzero((frames["module"][since:] == parent) | (depths[since:] < depth))
        if len(around):
            found[since + around[0]] = True
        else:
            waiting.append((parent, depth))
    return found


def _values(own: OwnPages, segments: list[tuple[list[int], int]]) -> Any:
    """All values of a page by their index, and one behind them that says nothing: for rows without a value."""
    most = max((head[SegmentField.VALUE_BASE] + head[SegmentField.VALUES] for head, _ in segments), default=0)
    values = numpy.zeros(most + 1, VALUES)
    for head, at in segments:
        base, count = head[SegmentField.VALUE_BASE], head[SegmentField.VALUES]
        values[base : base + count] = own.table(at + layout.VALUES_AT, VALUES, count)
    return values
