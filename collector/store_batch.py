"""What the run store has to write: messages, definitions, beats and facts, in one transaction."""

from __future__ import annotations

import sqlite3
import zlib
from contextlib import suppress
from dataclasses import dataclass, field

_ADD = "INSERT OR IGNORE INTO message (agent, n, received_ns, kind, body, crc) VALUES (?, ?, ?, ?, ?, ?)"
_BEAT = "INSERT OR REPLACE INTO beat (agent, received_ns, body, crc) VALUES (?, ?, ?, ?)"
_DEFINE = "INSERT OR IGNORE INTO definition (id, body, crc) VALUES (?, ?, ?)"
_SET = "INSERT OR REPLACE INTO run VALUES (?, ?)"

Row = tuple[str, int, int, str, bytes]
"""agent, number, received (ns), kind, body"""
Key = tuple[str, int]
"""agent, number"""


def crc_of(data: bytes, *of: str | int) -> int:
    """The checksum of a row: of its body, and of what it is found by."""
    return zlib.crc32(data, zlib.crc32(" ".join(map(str, of)).encode()))


@dataclass
class Batch:
    """What is written together."""

    messages: dict[Key, Row] = field(default_factory=dict)
    definitions: list[tuple[int, bytes]] = field(default_factory=list)
    beats: dict[str, tuple[str, int, bytes]] = field(default_factory=dict)
    """agent -> agent, received (ns), body"""
    facts: dict[str, str] = field(default_factory=dict)
    has_event: bool = False
    num_bytes: int = 0
    """Of the bodies of the messages."""

    def __bool__(self) -> bool:
        return bool(self.messages or self.beats or self.facts)

    def add(self, row: Row, is_event: bool) -> None:
        """Take a message that is not in it yet."""
        self.messages[row[:2]] = row
        self.num_bytes += len(row[4])
        self.has_event |= is_event

    def drop_pages(self, most: int) -> int:
        """Forget pages and histories, oldest first, until it has at most so many bytes. Returns how many."""
        dropped = 0
        for key, (_, _, _, kind, body) in list(self.messages.items()):
            if self.num_bytes <= most:
                break
            if kind in ("page", "history"):
                del self.messages[key]
                self.num_bytes -= len(body)
                dropped += 1
        return dropped

    def followed_by(self, newer: Batch) -> Batch:
        """Both in one."""
        return Batch(
            {**self.messages, **newer.messages},
            [*self.definitions, *newer.definitions],
            {**self.beats, **newer.beats},
            {**self.facts, **newer.facts},
            self.has_event or newer.has_event,
            self.num_bytes + newer.num_bytes,
        )

    def write(self, db: sqlite3.Connection) -> Exception | None:
        """All of it, or nothing and why; an event is on the disk itself before this returns."""
        try:
            db.execute(f"PRAGMA synchronous={'FULL' if self.has_event else 'NORMAL'}")
            db.execute("BEGIN IMMEDIATE")
            db.executemany(_SET, list(self.facts.items()))
            db.executemany(_DEFINE, [(n, data, crc_of(data, "definition", n)) for n, data in self.definitions])
            db.executemany(_ADD, [(*row, crc_of(row[4], row[0], row[1], row[3])) for row in self.messages.values()])
            db.executemany(_BEAT, [(*row, crc_of(row[2], row[0], 0, "beat")) for row in self.beats.values()])
            db.execute("COMMIT")
        except (sqlite3.Error, OverflowError, MemoryError) as error:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            return error
        return None
