"""The run store: every message as it came, in one SQLite file, so that any later version can make the report again.

A disk that fills up must not cost the run its report: what cannot be written is kept in memory and counted.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from ..core.errors import GpuwatchError
from ..core.messages import AgentBody, AgentMessage, WireError, decode_agent

SCHEMA = 1

_TABLES = """
CREATE TABLE IF NOT EXISTS run (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS message (
    agent TEXT NOT NULL,
    n INTEGER NOT NULL,
    received_ns INTEGER NOT NULL,
    kind TEXT NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (agent, n)
) STRICT;
CREATE TABLE IF NOT EXISTS beat (agent TEXT PRIMARY KEY, received_ns INTEGER NOT NULL, body BLOB NOT NULL) STRICT;
"""

Stored = tuple[str, int, AgentBody]
"""agent, number, body"""


class RunStore:
    """The store of one run, open for writing or reading."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        self.unwritten = 0
        """Messages that are in memory only."""
        self._memory: list[Stored] = []
        if not create and not path.exists():
            raise GpuwatchError(f"expected a run store, found no file {path}")
        self._db = sqlite3.connect(path, isolation_level=None)
        try:
            if create:
                self._db.executescript(_TABLES)
                # The report is made from here even after a crash of the collector; a power cut may cost a second.
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=NORMAL")
                self.set("schema", str(SCHEMA))
            elif int(self.get("schema") or 0) > SCHEMA:
                raise GpuwatchError(
                    f"{path} was written by a later gpuwatch; update with: pip install -U gpuwatch-cluster"
                )
        except sqlite3.Error as error:
            self._db.close()
            raise GpuwatchError(f"expected a run store, found something else in {path}: {error}") from error

    def set(self, key: str, value: str) -> None:
        """Store a fact about the run."""
        try:
            self._db.execute("INSERT OR REPLACE INTO run VALUES (?, ?)", (key, value))
        except sqlite3.Error:
            self.unwritten += 1

    def get(self, key: str) -> str | None:
        """A fact about the run."""
        row = self._db.execute("SELECT value FROM run WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    def add(self, agent: str, message: AgentMessage, data: bytes) -> None:
        """Store a numbered message, once."""
        kind = str(message.body.__struct_config__.tag)
        try:
            self._db.execute(
                "INSERT OR IGNORE INTO message VALUES (?, ?, ?, ?, ?)", (agent, message.n, time.time_ns(), kind, data)
            )
        except (sqlite3.Error, OverflowError):
            self.unwritten += 1
            self._memory.append((agent, message.n, message.body))

    def beat(self, agent: str, data: bytes) -> None:
        """Keep the last beat of an agent."""
        try:
            self._db.execute("INSERT OR REPLACE INTO beat VALUES (?, ?, ?)", (agent, time.time_ns(), data))
        except sqlite3.Error:
            self.unwritten += 1

    def begin(self) -> None:
        """Begin a transaction over what is received in one go."""
        self._quietly("BEGIN")

    def commit(self) -> None:
        """Make it durable: only then is it acknowledged."""
        self._quietly("COMMIT")

    def _quietly(self, statement: str) -> None:
        try:
            self._db.execute(statement)
        except sqlite3.Error:
            self.unwritten += 1

    def messages(self) -> Iterator[Stored]:
        """Everything that was received, beats last. A message that cannot be read is left out."""
        for agent, n, data in self._db.execute("SELECT agent, n, body FROM message ORDER BY agent, n"):
            try:
                yield agent, n, decode_agent(data).body
            except WireError:
                continue
        yield from self._memory
        for agent, data in self._db.execute("SELECT agent, body FROM beat ORDER BY agent"):
            try:
                yield agent, 0, decode_agent(data).body
            except WireError:
                continue

    def close(self) -> None:
        """Close the file."""
        self._db.close()
