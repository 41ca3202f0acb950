"""The verdict over one process: the collector's own decision, made of what this process's recorder holds."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from ...core.records import Anomaly, Definition, Where, WorkerEvent, WorkerExit
from ...core.wire.messages import AgentBody, Beat, Bye, Definitions, EventMessage, Hello, PageMessage, RankState
from ..record.collectives import ranks

if TYPE_CHECKING:
    from ...collector.decide.verdict_model import Verdict


def verdict_of(
    state: RankState, definitions: Iterable[Definition], events: Iterable[WorkerEvent], pages: Iterable[PageMessage]
) -> Verdict:
    """What is known of this process so far. The other ranks of its process group, if it has one, are not known."""
    # the one place in a worker that asks the collector: a script without a launcher has nobody else to ask
    from ...collector.decide.verdict import decide
    from ...collector.facts.fold import fold

    messages = _messages(state, definitions, events, pages)
    return decide(fold(("process", number, body) for number, body in enumerate(messages)))


def _messages(
    state: RankState, definitions: Iterable[Definition], events: Iterable[WorkerEvent], pages: Iterable[PageMessage]
) -> Iterator[AgentBody]:
    happened = list(events)
    members = ranks() if any(isinstance(event, Anomaly) for event in happened) else 1
    yield Hello("process", socket.gethostname(), state.pid, members, 1, 1, [], {}, "")
    yield Definitions(state.rank, state.attempt, list(definitions))
    yield from map(EventMessage, happened)
    held = list(pages)
    yield from held
    last = held[-1].number if held else -1
    where = Where(state.rank, state.attempt, state.step, state.batch, page=last, seq=state.seq)
    yield EventMessage(WorkerExit(where, 0, "itself", "script"))
    yield Beat([_as_last(state)], {})
    yield Bye("ok")


def _as_last(state: RankState) -> RankState:
    """The state as if nothing came after it: a verdict is about what has been seen so far."""
    hooks = state.hooks if state.hooks == "detached" else "attached"
    return msgspec.structs.replace(state, final=True, left=True, hooks=hooks, world_size=0)


def rank_here() -> int | None:
    """This process's rank in torch.distributed; None outside of a process group."""
    import torch  # not when the name `watch` is imported

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return None
