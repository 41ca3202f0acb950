"""Which node may speak of which rank: the first that does, and no more ranks than it said hello with.

Who has the job's key is no stranger, and may still be wrong, or somebody else's: what one node says of another's ranks
is not believed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...core.wire.messages import AgentBody, ranks_of

_MAX_CLAIMS = 1 << 20
"""Of all nodes and attempts together."""


@dataclass
class Claims:
    """By (attempt, rank): the node that it is on."""

    _node_of_rank: dict[tuple[int, int], str] = field(default_factory=dict)
    _ranks_of_node: dict[tuple[int, str], int] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """How many ranks were spoken of."""
        return len({rank for _, rank in self._node_of_rank if rank >= 0})

    def may_say(self, node: str, num_ranks: int, body: AgentBody) -> bool:
        """Whether a node that said hello with so many ranks (0: with any number) may say this.

        Binds ranks that nobody has spoken of. A node that knows its number of ranks has no processes that are none.
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
