"""What the run store writes in one transaction: messages, definitions, beats and facts."""

from __future__ import annotations

import sqlite3
import zlib
from contextlib import suppress
from dataclasses import dataclass, field

_ADD = "INSERT OR IGNORE INTO message (agent, n, received_ns, kind, body, crc) VALUES (?, ?, ?, ?, ?, ?)"
_BEAT = "INSERT OR REPLACE INTO beat (agent, received_ns, body, crc) VALUES (?, ?, ?, ?)"
_DEFINE = "INSERT OR IGNORE INTO definition (id, body, crc) VALUES (?, ?, ?)"
SET_FACT = "INSERT OR REPLACE INTO run VALUES (?, ?)"
Row = tuple[str, int, int, str, bytes]
"""agent, number, received (ns), kind, body"""
Key = tuple[str, int]
"""agent, number"""


def crc_of(data: bytes, *of: str | int) -> int:
    """The checksum of a row: of its body and its key."""
    return zlib.crc32(data, zlib.crc32(" ".join(map(str, of)).encode()))


@dataclass
class StoreBatch:
    """One transaction."""

    messages: dict[Key, Row] = field(default_factory=dict)
    definitions: list[tuple[int, bytes]] = field(default_factory=list)
    beats: dict[str, tuple[str, int, bytes]] = field(default_factory=dict)
    """agent -> agent, received (ns), body"""
    facts: dict[str, str] = field(default_factory=dict)
    has_event: bool = False
    num_bytes: int = 0
    """The size of the messages' bodies."""

    def drop_pages(self, most: int) -> int:
        """Forget pages and histories, oldest first, until at most `most` bytes are left. Returns their number."""
        dropped = 0
        for key, (_, _, _, kind, body) in list(self.messages.items()):
            if self.num_bytes <= most:
                break
            if kind in ("page", "history"):
                del self.messages[key]
                self.num_bytes -= len(body)
                dropped += 1
        return dropped

    def followed_by(self, newer: StoreBatch) -> StoreBatch:
        """Merge both."""
        return StoreBatch(
            {**self.messages, **newer.messages},
            [*self.definitions, *newer.definitions],
            {**self.beats, **newer.beats},
            {**self.facts, **newer.facts},
            self.has_event or newer.has_event,
            self.num_bytes + newer.num_bytes,
        )

    def write(self, db: sqlite3.Connection) -> Exception | None:
        """Write all, or nothing and return the error. An event is on the disk itself before this returns."""
        try:
            db.execute(f"PRAGMA synchronous={'FULL' if self.has_event else 'NORMAL'}")
            db.execute("BEGIN IMMEDIATE")
            db.executemany(SET_FACT, list(self.facts.items()))
            db.executemany(_DEFINE, [(n, data, crc_of(data, "definition", n)) for n, data in self.definitions])
            db.executemany(_ADD, [(*row, crc_of(row[4], row[0], row[1], row[3])) for row in self.messages.values()])
            db.executemany(_BEAT, [(*row, crc_of(row[2], row[0], 0, "beat")) for row in self.beats.values()])
            db.execute("COMMIT")
        except (sqlite3.Error, OverflowError, MemoryError) as error:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            return error
        return None
