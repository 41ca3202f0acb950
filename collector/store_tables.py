"""The tables of a run store: what is written into them in one transaction, and their rows as they are read.

A row has a checksum of its body and its key. Damaged rows are skipped.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ..core.codes import Code
from ..core.errors import GpuwatchError
from ..core.events.definitions import Definition
from ..core.wire.messages import AgentBody, NameDefinitions, WireError, decode_agent

SCHEMA = 3
"""2: definitions are stored once; 3: rows have checksums. Stores of schemas 1 and 2 are read all the same."""
_MOST_DAMAGED = 1024
"""Definitions that may be missing in the middle of a message; beyond this, the rest of the message is dropped, too."""
TABLES = """
CREATE TABLE IF NOT EXISTS run (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS message (
    agent TEXT NOT NULL,
    n INTEGER NOT NULL,
    received_ns INTEGER NOT NULL,
    kind TEXT NOT NULL,
    body BLOB NOT NULL,
    crc INTEGER,
    PRIMARY KEY (agent, n)
) STRICT;
CREATE TABLE IF NOT EXISTS definition (id INTEGER PRIMARY KEY, body BLOB NOT NULL, crc INTEGER) STRICT;
CREATE TABLE IF NOT EXISTS beat (
    agent TEXT PRIMARY KEY, received_ns INTEGER NOT NULL, body BLOB NOT NULL, crc INTEGER
) STRICT;
"""
NAMES = "names"
"""The kind of a message of definitions that is stored by their numbers."""
_ADD = "INSERT OR IGNORE INTO message (agent, n, received_ns, kind, body, crc) VALUES (?, ?, ?, ?, ?, ?)"
_BEAT = "INSERT OR REPLACE INTO beat (agent, received_ns, body, crc) VALUES (?, ?, ?, ?)"
_DEFINE = "INSERT OR IGNORE INTO definition (id, body, crc) VALUES (?, ?, ?)"
SET_FACT = "INSERT OR REPLACE INTO run VALUES (?, ?)"
Row = tuple[str, int, int, str, bytes]
"""agent, number, received (ns), kind, body"""
Key = tuple[str, int]
"""agent, number"""


class StoredNames(msgspec.Struct, frozen=True, array_like=True):
    """A message of definitions. `runs` are (number of the first entry, how many)."""

    rank: int
    attempt: int
    after: int
    runs: list[tuple[int, int]]


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


def no_store(path: Path, why: object) -> GpuwatchError:
    """The error for a file that is no run store."""
    return GpuwatchError(Code.UNREADABLE, f"expected a run store, found something else in {path}: {why}")


def has_checksums(db: sqlite3.Connection, table: str) -> bool:
    """Whether its rows have them: those of schemas 1 and 2 have none."""
    return any(column[1] == "crc" for column in db.execute(f"PRAGMA table_info({table})"))


def body_of(data: bytes, kind: str, definitions: dict[int, Definition]) -> tuple[AgentBody | None, bool]:
    """(message as it was sent, whether it is whole); the message is None if it cannot be read."""
    try:
        if kind != NAMES:
            return decode_agent(data).body, True
        names = msgspec.msgpack.decode(data, type=StoredNames)
    except (WireError, msgspec.DecodeError, UnicodeDecodeError):
        return None, False
    entries: list[Definition] = []
    for first, count in names.runs:
        if len(entries) > len(definitions):  # damaged
            break
        numbers = range(first, first + min(count, len(definitions) + _MOST_DAMAGED))
        entries += [definitions[number] for number in numbers if number in definitions]
    return NameDefinitions(names.rank, names.attempt, entries), len(entries) == sum(count for _, count in names.runs)


def read_definitions(db: sqlite3.Connection) -> dict[int, Definition]:
    """number -> definition, for the readable ones; {} for a store of schema 1."""
    found: dict[int, Definition] = {}
    with suppress(sqlite3.Error):
        crc = "crc" if has_checksums(db, "definition") else "NULL"
        for number, body, checksum in db.execute(f"SELECT id, body, {crc} FROM definition"):
            with suppress(msgspec.DecodeError, UnicodeDecodeError, TypeError):
                if checksum is None or checksum == crc_of(body, "definition", number):
                    found[number] = msgspec.msgpack.decode(body, type=Definition)
    return found


def read_rows(
    db: sqlite3.Connection, query: str, of: tuple[str | int, ...] = ()
) -> Iterator[tuple[str, int, bytes, str]]:
    """The readable rows of a table: none may follow a damaged page of the file.

    The last column of `query` is the checksum. Rows with a wrong checksum are skipped.
    """
    try:
        if not has_checksums(db, "beat" if "beat" in query else "message"):
            query = query.replace(", crc", ", NULL")
        for agent, n, data, kind, crc in db.execute(query, of):
            sound = isinstance(agent, str) and isinstance(n, int) and isinstance(data, bytes)
            if sound and (crc is None or crc == crc_of(data, agent, n, kind)):
                yield agent, n, data, str(kind)
    except (sqlite3.Error, UnicodeDecodeError):
        return


def expect_tables(path: Path, db: sqlite3.Connection) -> None:
    """Refuse views, triggers and computed columns: they may be queries without an end."""
    kinds = db.execute("SELECT type, sql FROM sqlite_master").fetchall()
    tables = ("run", "message", "definition", "beat")
    computed = any(column[6] for table in tables for column in db.execute(f"PRAGMA table_xinfo({table})"))
    if computed or any(kind not in ("table", "index") or "VIRTUAL" in str(sql).upper() for kind, sql in kinds):
        raise GpuwatchError(
            Code.UNREADABLE, f"expected a run store, found a database in {path} that has more than tables of rows"
        )


def expect_schema(path: Path, schema: object) -> None:
    """Refuse what is no number, and the schema of a later gpuwatch."""
    if not isinstance(schema, str) or not schema.isascii() or not schema.isdigit():
        raise no_store(path, f"its schema is {str(schema)[:40]!r}")
    if int(schema[:9]) > SCHEMA:
        raise GpuwatchError(Code.VERSIONS_APART, f"{path} was written by a later gpuwatch; read it with that one")
