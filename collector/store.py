"""The run store: every message as it came, in one SQLite file, so that any later version can make the report again.

Ranks of one role define the same modules: each definition is stored once, and a message of definitions as the numbers
of its entries. Each row has a checksum: damaged rows are skipped, and their numbers count as missing
(facts/heard_numbers.py).

A thread writes, so that nothing waits for the disk: `begin` hands over new messages, `written` reports when they are
durable, and only then are they acknowledged. A full disk costs the run nothing: unwritten messages stay in memory, and
the write is tried again, at last in another folder.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from ..core.codes import Code, coded
from ..core.errors import GpuwatchError
from ..core.events.definitions import Definition
from ..core.guest.own_files import expect_regular
from ..core.guest.threads import OneThread
from ..core.text import shown_name
from ..core.wire import messages as wire
from ..core.wire.messages import AgentBody, AgentMessage, NameDefinitions, WireError, decode_agent
from .store_tables import (
    NAMES,
    SCHEMA,
    SET_FACT,
    TABLES,
    Key,
    StoreBatch,
    StoredNames,
    body_of,
    expect_schema,
    expect_tables,
    has_checksums,
    no_store,
    read_definitions,
    read_rows,
)

MEMORY_BYTES = 256 << 20
"""Memory for messages that cannot be written; beyond it pages are dropped and counted, oldest first."""
ROOM_BYTES = 32 << 20
"""While this many bytes are unwritten and the disk is at work, no more pages are requested."""
_RETRY_S = 1.0


T = TypeVar("T")
Stored = tuple[str, int, AgentBody]
"""agent, number, body"""


class RunStore:
    """The store of one run, open for writing or reading."""

    def __init__(
        self,
        path: Path,
        *,
        create: bool = False,
        fallback: Path | None = None,
        say: Callable[[str], object] | None = None,
    ) -> None:
        """`fallback` is another folder, tried if `path` cannot be written; `say` gets a sentence about that.

        Raises GpuwatchError if there is no store to read, or the file is something else.
        """
        self.path = path
        self.dropped = 0
        """Pages that were neither written nor kept."""
        self._fallback = fallback
        self._say = say or (lambda sentence: None)
        self._new = StoreBatch()
        self._in_hand = StoreBatch()
        """The batch that the thread is writing."""
        self._thread = OneThread()
        self._result: Future[Exception | None] | None = None
        self._failed = False
        self._tried_at = 0.0
        self._numbers: dict[Definition, int] = {}
        """The number of each definition in the file or in the next commit."""
        self._next_number = 0
        self._older: list[sqlite3.Connection] = []
        """Stores that could not be written any more; they are still read."""
        if not create and not path.exists():
            raise GpuwatchError(Code.NO_STORE, f"expected a run store, found no file {path}")
        self._db = self._open_either() if create else self._open(path, False)
        self._reader = _reader(self._db, self.path) if create else self._db
        if create:
            known = read_definitions(self._db)
            self._numbers = {entry: number for number, entry in known.items()}
            self._next_number = max(known, default=-1) + 1

    def _open_either(self) -> sqlite3.Connection:
        """The file in the run's folder, or in the other one; in both, if a collector before this one had to move."""
        moved = self._fallback is not None and (self._fallback / self.path.name).exists()
        try:
            db = self._open(self.path, True)
        except GpuwatchError:
            if self._fallback is None:
                raise
            with suppress(GpuwatchError):  # its rows can be read on a full disk, too
                self._older.append(self._open(self.path, False))
        else:
            if not moved:
                return db
            self._older.append(db)
        assert self._fallback is not None
        return self._open_other(self._fallback)

    def _open_other(self, folder: Path) -> sqlite3.Connection:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        db = self._open(folder / self.path.name, True)
        text = f"the run's store {self.path} cannot be written; it continues in {folder}"
        self._say(coded(text, Code.STORE_UNWRITTEN))
        self.path = folder / self.path.name
        self._fallback = None
        return db

    @property
    def unwritten(self) -> int:
        """Messages that are in memory only."""
        return len(self._in_hand.messages) + len(self._new.messages) if self._failed else 0

    def _open(self, path: Path, create: bool) -> sqlite3.Connection:
        try:
            if not create:
                expect_regular(path)
            db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        except (sqlite3.Error, OSError) as error:
            raise no_store(path, error) from error
        try:
            if create:
                db.execute("PRAGMA journal_mode=WAL")
                db.executescript(TABLES)
                for table in ("message", "definition", "beat"):
                    if not has_checksums(db, table):  # a version before schema 3 has begun it
                        db.execute(f"ALTER TABLE {table} ADD COLUMN crc INTEGER")
                db.execute(SET_FACT, ("schema", str(SCHEMA)))
            else:
                expect_tables(path, db)
                row = db.execute("SELECT value FROM run WHERE key = 'schema'").fetchone()
                expect_schema(path, row[0] if row else "0")
        except (sqlite3.Error, UnicodeDecodeError) as error:
            db.close()
            raise no_store(path, shown_name(str(error))) from error  # SQLite cites the file's own bytes
        except BaseException:
            db.close()
            raise
        return db

    # -- writing ------------------------------------------------------------------------------------------------

    def set(self, key: str, value: str) -> None:
        """Store a fact about the run, with the next commit."""
        self._new.facts[key] = value

    def add(self, agent: str, message: AgentMessage, data: bytes) -> None:
        """Take a numbered message, once; the next `begin` or `commit` writes it."""
        key = (agent, message.n)
        if key in self._new.messages or key in self._in_hand.messages:
            return
        kind = str(message.body.__struct_config__.tag)
        if isinstance(message.body, NameDefinitions):
            kind, data = NAMES, self._by_number(message, message.body)
        self._new.messages[key] = (agent, message.n, time.time_ns(), kind, data)
        self._new.num_bytes += len(data)
        self._new.has_event |= isinstance(message.body, wire.EventMessage)
        self._keep_memory_bounded()

    def _by_number(self, message: AgentMessage, body: NameDefinitions) -> bytes:
        """The message with the numbers of its entries. The next commit writes new entries."""
        runs: list[tuple[int, int]] = []
        for entry in body.entries:
            number = self._numbers.setdefault(entry, self._next_number)
            if number == self._next_number:
                self._next_number += 1
                self._new.definitions.append((number, msgspec.msgpack.encode(entry)))
            if runs and number == sum(runs[-1]):
                runs[-1] = runs[-1][0], runs[-1][1] + 1
            else:
                runs.append((number, 1))
        return msgspec.msgpack.encode(StoredNames(body.rank, body.attempt, message.after, runs))

    def _keep_memory_bounded(self) -> None:
        if self._new.num_bytes > MEMORY_BYTES:
            self.dropped += self._new.drop_pages(MEMORY_BYTES // 2)

    def beat(self, agent: str, data: bytes) -> None:
        """Keep the last beat of an agent."""
        self._new.beats[agent] = (agent, time.time_ns(), data)

    @property
    def waiting(self) -> tuple[int, int]:
        """Messages that are not on the disk yet, and their bytes."""
        both = self._in_hand, self._new
        return sum(len(batch.messages) for batch in both), sum(batch.num_bytes for batch in both)

    @property
    def has_new(self) -> bool:
        """Whether data waits for `begin`."""
        return bool(self._new.messages or self._new.beats or self._new.facts)

    @property
    def has_room(self) -> bool:
        """Whether to request more pages. True while the disk fails: `MEMORY_BYTES` bounds memory then."""
        return self._failed or self._in_hand.num_bytes + self._new.num_bytes < ROOM_BYTES

    @property
    def is_writing(self) -> bool:
        """Whether the thread holds a batch that `written` has not reported."""
        return self._result is not None

    def begin(self) -> bool:
        """Hand new messages over to the thread; False if there are none, it is at work, or the disk has just failed.

        While the disk fails it is tried once a second, first here, then in the other folder.
        """
        now = time.monotonic()
        if self.is_writing or not self.has_new or (self._failed and now - self._tried_at < _RETRY_S):
            return False
        self._tried_at = now
        self._in_hand, self._new = self._new, StoreBatch()
        batch, db = self._in_hand, self._db
        self._result = self._thread.submit(lambda: batch.write(db))
        return True

    def written(self) -> bool | None:
        """Whether the batch of `begin` is durable: only if True may it be acknowledged. None: not known yet."""
        if self._result is None or not self._result.done():
            return None
        error, self._result = self._result.result(), None
        if error is None:
            self._in_hand = StoreBatch()
            if self._failed:
                self._say(f"the run's store can be written again: {self.path}")
            self._failed = False
            return True
        self._new, self._in_hand = self._in_hand.followed_by(self._new), StoreBatch()
        self._keep_memory_bounded()
        if self._move():
            self._failed, self._tried_at = False, 0.0
        elif not self._failed:
            self._failed = True
            text = f"the run's store {self.path} cannot be written ({error}); new messages are kept in memory"
            self._say(coded(text, Code.STORE_UNWRITTEN))
        return False

    def commit(self) -> bool:
        """Write all that is new and wait for it. True when everything is durable."""
        while self.is_writing or self.begin():
            assert self._result is not None
            wait([self._result])
            self.written()
        return not self.has_new

    def _move(self) -> bool:
        """Continue in the other folder, once. Rows are not copied: the first file is still read."""
        folder = self._fallback
        if folder is None:
            return False
        older = self._db
        try:
            self._db = self._open_other(folder)
        except (OSError, GpuwatchError):
            return False
        with suppress(sqlite3.Error):
            for key, value in older.execute("SELECT key, value FROM run").fetchall():
                self._new.facts.setdefault(key, value)
        if self._reader is not older:
            self._reader.close()
        self._reader = _reader(self._db, self.path)
        self._older.append(older)
        self._new.definitions = [(number, msgspec.msgpack.encode(entry)) for entry, number in self._numbers.items()]
        return True

    # -- reading ------------------------------------------------------------------------------------------------

    def get(self, key: str) -> str | None:
        """A fact about the run; None if it is missing or cannot be read."""
        for batch in (self._new, self._in_hand):
            if key in batch.facts:
                return batch.facts[key]
        for db in (self._reader, *self._older):
            with suppress(sqlite3.Error, UnicodeDecodeError):
                row = db.execute("SELECT value FROM run WHERE key = ?", (key,)).fetchone()
                if row and isinstance(row[0], str):
                    return row[0]
        return None

    def messages(self) -> Iterator[Stored]:
        """All received messages, by agent and number, beats last. Unreadable ones are skipped.

        A message of definitions of which some cannot be read has number 0: it is not whole.
        """
        seen: set[Key] = set()
        query = "SELECT agent, n, body, kind, crc FROM message ORDER BY agent, n"
        stores = (*self._older, self._reader)
        sources = [(read_definitions(db), read_rows(db, query)) for db in stores]
        unwritten = sorted({**self._in_hand.messages, **self._new.messages}.items())
        new = ((agent, n, data, kind) for (agent, n), (_, _, _, kind, data) in unwritten)
        sources.append(({number: entry for entry, number in self._numbers.items()}, new))
        for definitions, source in sources:
            for agent, n, data, kind in source:
                if (agent, n) not in seen:
                    seen.add((agent, n))
                    body, whole = body_of(data, kind, definitions)
                    if body is not None:
                        yield agent, n if whole else 0, body
        query = "SELECT agent, 0, body, 'beat', crc FROM beat"
        beats = {agent: data for db in stores for agent, _, data, _ in read_rows(db, query)}
        beats.update((agent, data) for agent, _, data in {**self._in_hand.beats, **self._new.beats}.values())
        for agent, data in sorted(beats.items()):
            with suppress(WireError):
                yield agent, 0, decode_agent(data).body

    def page(self, agent: str, n: int) -> wire.PageMessage | None:
        """One page again; None if it was dropped, or cannot be read."""
        return self._load(agent, n, "page", wire.PageMessage)

    def history(self, agent: str, n: int) -> wire.RankHistoryMessage | None:
        """One history again; None as above."""
        return self._load(agent, n, "history", wire.RankHistoryMessage)

    def _load(self, agent: str, n: int, kind: str, wanted: type[T]) -> T | None:
        new = self._new.messages.get((agent, n)) or self._in_hand.messages.get((agent, n))
        query = "SELECT agent, n, body, kind, crc FROM message WHERE agent = ? AND n = ? AND kind = ?"
        stored = (
            data for db in (self._reader, *self._older) for _, _, data, _ in read_rows(db, query, (agent, n, kind))
        )
        for data in stored if new is None else [new[4]]:
            with suppress(WireError):
                body = decode_agent(data).body
                if isinstance(body, wanted):
                    return body
        return None

    def close(self) -> None:
        """Write the rest if possible, and close the files."""
        with suppress(sqlite3.Error):
            self.commit()
        self._thread.close()
        for db in {self._reader, self._db, *self._older}:
            db.close()


def _reader(db: sqlite3.Connection, path: Path) -> sqlite3.Connection:
    """A connection that does not wait for the writer: with a write-ahead log it reads the committed rows.

    On a file system without such a log, both would lock each other out, so the writer's connection also reads.
    """
    with suppress(sqlite3.Error):
        if db.execute("PRAGMA journal_mode").fetchone() == ("wal",):
            return sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    return db
