"""The node agent's eyes on its ranks: reads their recorders, says what is new. No socket, no process."""

from __future__ import annotations

from pathlib import Path

from ..core.messages import AgentBody, Definitions, EventMessage, PageMessage, RankState, Want
from ..core.recorder.layout import Field, file_name
from ..core.recorder.reader import NotReady, RecorderReader
from ..core.records import Anomaly, Definition, RootDef, Where, WorkerEvent, WorkerExit, split_label

PAGE_WAIT_S = 5.0
"""How long an unfinished page may still grow before it is sent as it is."""


class RankWatch:
    """One rank of one attempt."""

    def __init__(self, folder: Path, rank: int, local_rank: int, attempt: int, pid: int, traced: list[int]) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.attempt = attempt
        self.pid = pid
        self.ended = False
        self._path = folder / file_name(rank, attempt)
        self._reader: RecorderReader | None = None
        self._wanted: dict[tuple[str, int, int], float] = {}
        """(root class, ordinal, batch) -> deadline"""
        self._traced = list(traced)
        self._sent: set[tuple[int, bool, int]] = set()

    def poll(self, now: float) -> list[AgentBody]:
        """What this rank has recorded since the last call."""
        reader = self._open()
        if reader is None:
            return []
        messages: list[AgentBody] = []
        definitions, events = reader.new_entries()
        messages += self._definitions(definitions)
        messages += [EventMessage(event) for event in events]
        for event in events:
            self._react(event, now)
        messages += self._due_pages(reader, now)
        return messages

    def want(self, want: Want, now: float) -> None:
        """The collector asks for a batch."""
        if want.attempt == self.attempt:
            self._wanted.setdefault((want.root_cls, want.root_ordinal, want.batch), now + PAGE_WAIT_S)

    def end(self, code: int | None, by: str, now: float) -> list[AgentBody]:
        """The process has ended: read the rest, and send its last page and where it was."""
        messages = self.poll(now)
        self.ended = True
        reader = self._reader
        if reader is None:
            return [*messages, EventMessage(WorkerExit(Where(self.rank, self.attempt), code, by, "starting"))]
        messages += self._due_pages(reader, now)
        last = reader.last_page()
        if last is not None:
            messages += self._page(last)
        state = reader.state()
        root = reader.roots.get(reader[Field.ROOT])
        where = Where(
            rank=self.rank,
            attempt=self.attempt,
            step=state.step,
            batch=state.batch,
            root=root.label if root is not None else "",
            page=reader[Field.PAGE],
            seq=state.seq,
        )
        return [*messages, EventMessage(WorkerExit(where, code, by, state.phase, state.module, state.cls))]

    def state(self) -> RankState | None:
        """Where the rank is, for a beat."""
        return self._reader.state() if self._reader is not None else None

    def close(self) -> None:
        """Let go of the recorder."""
        if self._reader is not None:
            self._reader.close()

    def _open(self) -> RecorderReader | None:
        if self._reader is None:
            try:
                self._reader = RecorderReader(self._path)
            except (OSError, NotReady):
                return None
        return self._reader

    def _definitions(self, entries: list[Definition]) -> list[AgentBody]:
        return [Definitions(self.rank, self.attempt, entries)] if entries else []

    def _react(self, event: WorkerEvent, now: float) -> None:
        if isinstance(event, Anomaly):
            self._wanted.setdefault((*split_label(event.where.root), event.where.batch), now + PAGE_WAIT_S)

    def _due_pages(self, reader: RecorderReader, now: float) -> list[AgentBody]:
        messages: list[AgentBody] = []
        if self._traced:
            messages += self._traced_pages(reader)
        for (cls, ordinal, batch), deadline in list(self._wanted.items()):
            page = reader.find_page(cls, ordinal, batch)
            if page is not None and (page.complete or self.ended or now >= deadline):
                messages += self._page(page)
                del self._wanted[cls, ordinal, batch]
            elif page is None and (self.ended or now >= deadline):
                del self._wanted[cls, ordinal, batch]
        return messages

    def _traced_pages(self, reader: RecorderReader) -> list[AgentBody]:
        messages: list[AgentBody] = []
        roots: list[RootDef] = list(reader.roots.values())
        for batch in list(self._traced):
            pages = [reader.find_page(root.cls, root.ordinal, batch) for root in roots]
            for page in pages:
                if page is not None and page.complete:
                    messages += self._page(page)
        return messages

    def _page(self, page: PageMessage) -> list[AgentBody]:
        """A page is sent once; once more if it has grown since."""
        size = sum(len(segment.frames) for segment in page.segments)
        key = (page.number, page.complete, size)
        if key in self._sent:
            return []
        self._sent.add(key)
        return [page]
