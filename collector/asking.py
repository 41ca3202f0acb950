"""Which node may report which rank, and asking all ranks for their positions. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ..core.events.agent_events import RankLook, RankStall, WorkerExit
from ..core.events.script_events import ScriptError
from ..core.recorder.stalls import ANSWER_S
from ..core.settings import OnHang
from ..core.wire.messages import AgentBody, ranks_of
from .ends.hang_finding import HangAction, before_limit, ending_of, find_hang
from .ends.hang_model import HangFinding, has_left
from .ends.silent_nodes import with_silent_nodes

# The first node to report a rank owns it for that attempt. A node owns no more ranks than its hello announced.
#
# A node with the job's key may still be faulty or compromised, so reports about another node's ranks are dropped.

_MAX_CLAIMS = 1 << 20
"""Limit on claimed ranks, over all nodes and attempts."""


@dataclass
class RankOwnership:
    """By (attempt, rank): the node that it is on."""

    _node_of_rank: dict[tuple[int, int], str] = field(default_factory=dict)
    _ranks_of_node: dict[tuple[int, str], int] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """The number of ranks that nodes have reported."""
        return len({rank for _, rank in self._node_of_rank if rank >= 0})

    @property
    def last_attempt(self) -> int:
        """The last attempt that any rank is known of."""
        return max((attempt for attempt, _ in self._node_of_rank), default=0)

    def ranks_of(self, node: str) -> list[int]:
        """The ranks of a node in the last attempt that any is known of."""
        last = self.last_attempt
        return sorted(rank for (attempt, rank), of in self._node_of_rank.items() if (attempt, of) == (last, node))

    def may_say(self, node: str, num_ranks: int, body: AgentBody) -> bool:
        """Whether a node whose hello announced `num_ranks` ranks (0: any number) may send this.

        Binds ranks that no node has reported. A node that announced a number has no processes besides ranks.
        """
        spoken_of = ranks_of(body)
        if any(self._node_of_rank.get(rank, node) != node for rank in spoken_of):
            return False
        for attempt, rank in dict.fromkeys(spoken_of):
            if (attempt, rank) in self._node_of_rank:
                continue
            known = self._ranks_of_node.get((attempt, node), 0)
            if (
                attempt < 0
                or (rank < 0 and num_ranks)
                or 0 < num_ranks <= known
                or len(self._node_of_rank) >= _MAX_CLAIMS
            ):
                return False
            self._ranks_of_node[attempt, node] = known + 1
            self._node_of_rank[attempt, rank] = node
        return True


# When a rank stalls, all ranks are asked for their positions; the answers decide whether the job hangs.

AGAIN_S = 60.0
"""A stall that is reported within this time of a hang belongs to it."""
_STILL_SHARE = 0.5
"""A hang requires that every rank has made no progress for this share of the limit that the stalled rank passed."""
_OWN_SHARE = 0.9
"""A hang also requires this share of each rank's own limit, which is longer before the first batch and while the rank
compiles or saves."""


@dataclass
class AskedAll:
    """Rounds in which all ranks are asked for their positions, one at a time, numbered from 1."""

    number: int = 0
    _asked_at: float = 0.0
    _again_at: float = 0.0
    _open: bool = False
    attempt: int = 0
    """That of the last round."""
    _limit_s: float = 0.0
    _timeout_s: float = 0.0
    """Of the process group that ends the job soon; 0 where a rank has passed its own limit."""
    _mismatch_s: float = 0.0
    """As of RankStall: the round was begun before any limit was passed."""
    _looks: dict[int, RankLook] = field(default_factory=dict)
    _ended: dict[tuple[int, int], WorkerExit] = field(default_factory=dict)
    _lost_a_peer: set[tuple[int, int]] = field(default_factory=set)
    """(attempt, rank): its script has raised for no reason of its own."""
    last: tuple[int, HangFinding] | None = None
    """The last finding, with its attempt."""

    def on_message(self, event: RankStall | RankLook | WorkerExit | ScriptError, now: float) -> int | None:
        """Take an event. Returns the number of a round if it begins one; None for most events."""
        if isinstance(event, WorkerExit):
            if not event.runs_on:
                self._ended[event.where.attempt, event.where.rank] = event
        elif isinstance(event, ScriptError):
            if event.peer_failure:
                self._lost_a_peer.add((event.where.attempt, event.where.rank))
        elif isinstance(event, RankLook):
            self.number = max(self.number, event.number)  # of a collector that was started again since
            if self._open and (event.number, event.where.attempt) == (self.number, self.attempt):
                self._looks[event.where.rank] = event
        elif not self._open and now >= self._again_at:
            self.number += 1
            self._asked_at, self._open, self._looks = now, True, {}
            self.attempt, self._limit_s = event.where.attempt, event.limit_s
            self._timeout_s, self._mismatch_s = event.timeout_s, event.mismatch_s
            return self.number
        return None

    @property
    def is_open(self) -> bool:
        """A round waits for answers."""
        return self._open

    def have_left(self, attempt: int, ranks: Collection[int]) -> bool:
        """Whether all of these have ended with exit code 0."""
        ends = [self._ended.get((attempt, rank)) for rank in ranks]
        return all(end is not None and end.code == 0 for end in ends)

    def forget(self) -> None:
        """Drop the open round: it was concluded, or begins again when a rank stalls again."""
        self._open, self._looks = False, {}

    def conclude(
        self, world_size: int, now: float, on_hang: OnHang, silent: Mapping[str, list[int]]
    ) -> tuple[HangFinding, HangAction] | None:
        """The finding of a round and the action that follows, once. `silent`: host -> its ranks, of silent nodes.

        None while ranks may still answer, and if there is no hang.
        """
        if not self._open:
            return None
        ended = {rank: exit_ for (attempt, rank), exit_ in self._ended.items() if attempt == self.attempt}
        if len(self._looks.keys() | ended.keys()) < world_size and now - self._asked_at < ANSWER_S:
            return None
        self._open = False
        looks = list(self._looks.values())
        moved = {look.where.rank for look in looks if not has_left(look) and look.still_s < self._rest_s(look)}
        if any((self.attempt, rank) not in self._lost_a_peer for rank in moved):
            return None
        found = find_hang(looks, ended, world_size)
        if found is None or (self._timeout_s and not found.may_end):
            return None
        if self._mismatch_s and found.cause != "mismatch":
            return None
        stopped = {look.where.rank for look in looks if look.state == "T"}
        if moved and not (found.ranks and stopped.issuperset(found.ranks)):  # only Linux still says who does not move
            return None
        found = with_silent_nodes(found, silent, looks, len(ended), world_size)
        self.last = self.attempt, found
        if self._mismatch_s:  # the limit, which may follow at once, begins a round of its own
            return found, before_limit(ending_of(found, looks, on_hang, self._limit_s), self._limit_s)
        self._again_at = now + AGAIN_S
        return found, ending_of(found, looks, on_hang, self._limit_s, self._timeout_s)

    def _rest_s(self, look: RankLook) -> float:
        if self._mismatch_s:
            return _STILL_SHARE * self._mismatch_s
        own_s = 0.0 if self._timeout_s else look.limit_s
        return max(_STILL_SHARE * self._limit_s, _OWN_SHARE * own_s)
