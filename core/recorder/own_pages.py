"""The pages of a recorder as its own writer sees them: read in place, in the process that writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..frames import Frame
from ..values import Value
from . import layout
from .layout import SegmentField
from .pages import decode_frame
from .writer import OpenPage, RecorderWriter

_FRAMES, _VALUES = int(SegmentField.FRAMES), int(SegmentField.VALUES)
_FRAME_BASE, _VALUE_BASE = int(SegmentField.FRAME_BASE), int(SegmentField.VALUE_BASE)


class OwnPages:
    """Frames of pages that the ring still holds. A segment that was overwritten has none."""

    def __init__(self, writer: RecorderWriter) -> None:
        self._writer = writer

    def frame(self, page: OpenPage, index: int) -> Frame | None:
        """Frame `index` of a page; None if it was overwritten."""
        for head, at in self.segments(page, reverse=True):
            position = index - head[_FRAME_BASE]
            if 0 <= position < head[_FRAMES]:
                return self._decode(page, at, position)
        return None

    def frames(self, page: OpenPage) -> list[Frame]:
        """The frames of a page that were not overwritten."""
        return [
            self._decode(page, at, position) for head, at in self.segments(page) for position in range(head[_FRAMES])
        ]

    def before(self, page: OpenPage) -> list[OpenPage]:
        """Earlier pages of the same root that the ring still holds something of, the first of them first."""
        found: dict[int, OpenPage] = {}
        number = min(page.held, default=0) - 1
        while (at := self._writer.segment_at(number)) is not None:
            head = self._head(at)
            if head[SegmentField.ROOT] == page.root and head[SegmentField.PAGE] < page.number:
                key, batch, step = head[SegmentField.PAGE], head[SegmentField.BATCH], head[SegmentField.STEP]
                found.setdefault(key, OpenPage(key, page.root, batch, step)).held.insert(0, number)
            number -= 1
        return [found[key] for key in sorted(found)]

    def table(self, at: int, dtype: Any, count: int) -> Any:
        """A table of the file as a NumPy array of records, in place: `count` of `dtype` from offset `at` on."""
        import numpy  # not at the top: a process that only writes does without it

        return numpy.frombuffer(self._writer.view, dtype, count, at)

    def segments(self, page: OpenPage, *, reverse: bool = False) -> Iterator[tuple[list[int], int]]:
        """(header, offset in the file) of the segments that are still this page's."""
        for number in reversed(page.held) if reverse else list(page.held):
            at = self._writer.segment_at(number)
            if at is None:
                continue
            head = self._head(at)
            if head[SegmentField.PAGE] == page.number:
                yield head, at

    def _head(self, at: int) -> list[int]:
        """The header of the segment at this offset: see SegmentField."""
        with self._writer.view[at : at + layout.SEGMENT_HEADER_BYTES].cast("q") as view:
            return view.tolist()

    def _decode(self, page: OpenPage, at: int, position: int) -> Frame:
        data = self._writer.view
        fields = layout.FRAME.unpack_from(data, at + layout.FRAMES_AT + position * layout.FRAME.size)
        first, count = fields[6], fields[7]
        start = at + layout.ROWS_AT + first * layout.ROW.size
        rows = layout.ROW.iter_unpack(data[start : start + count * layout.ROW.size])
        return decode_frame(page.batch, fields, rows, self._value_at(page), self._writer.names)

    def _value_at(self, page: OpenPage) -> Callable[[int], Value | None]:
        def value_at(index: int) -> Value | None:
            if index == layout.NOTHING:
                return None
            for head, at in self.segments(page, reverse=True):
                position = index - head[_VALUE_BASE]
                if 0 <= position < head[_VALUES]:
                    start = at + layout.VALUES_AT + position * layout.VALUE.size
                    return Value(*layout.VALUE.unpack_from(self._writer.view, start))
            return None

        return value_at
