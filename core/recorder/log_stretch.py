"""The entries in a stretch of a recorder's log, of which some may be damaged."""

from __future__ import annotations

import zlib

from . import layout

_MAX_ENTRY = 64 << 10
"""Behind a damaged entry, the search finds no entry longer than this."""


class LogStretch:
    """A stretch of the log, or the header; positions count from where that begins."""

    def __init__(self, data: bytes, start: int) -> None:
        self._data = data
        self._start = start

    def entry(self, position: int) -> bytes | None:
        """The payload at `position`; None where there is no whole one."""
        at = position - self._start
        size, checksum = layout.ENTRY.unpack_from(self._data, at)
        payload = self._data[at + layout.ENTRY.size : at + layout.ENTRY.size + size]
        return payload if size and len(payload) == size and zlib.crc32(payload) == checksum else None

    def next_entry(self, position: int, most: int) -> tuple[int, int]:
        """(where the next whole entry begins, bytes that were checked). The end if none is found in `most` bytes."""
        searched = 0
        while position - self._start + layout.ENTRY.size <= len(self._data) and searched < most:
            size, _ = layout.ENTRY.unpack_from(self._data, position - self._start)
            if 0 < size <= _MAX_ENTRY:
                searched += size
                if self.entry(position) is not None:
                    return position, searched
            position += 8
        return self._start + len(self._data), searched
