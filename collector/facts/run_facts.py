"""What is known of a run and of its nodes (fold.py makes it from messages)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from ...core.events.node_events import AttemptNodes, GpuCounters, GpuHealth, GpuXid, NodeSignal
from ...core.identity import is_rank
from ...core.wire.messages import AgentHello, NodeBye, TelemetryMessage
from .kept_pages import KeptPage
from .rank_facts import RankFacts


@dataclass
class NodeFacts:
    """One node agent."""

    agent: str
    hello: AgentHello | None = None
    bye: NodeBye | None = None
    signal: NodeSignal | None = None
    lost: bool = False
    """It went silent before its Bye."""
    killed: bool = False
    """It was lost as its launch and its agent ended."""
    clock: tuple[int, int] | None = None
    """(by how much the collector's clock is ahead, round trip of the exchange that measured it), in nanoseconds."""
    gpu_events: list[GpuXid | GpuCounters | GpuHealth] = field(default_factory=list)
    hot: bytes = b""
    """Modules of its ranks that were closest to their limit, from its last beat."""
    gpus: bytes = b""
    """State of its GPUs, from its last beat."""
    figures: bytes = b""
    """State of its processors and memory, from its last beat."""
    telemetry: dict[int, TelemetryMessage] = field(default_factory=dict)
    """The agent's start time -> the newest message since then; a restarted agent adds an entry."""
    pages_dropped: dict[int, int] = field(default_factory=dict)
    """rank -> pages that its agent had no room for"""
    spool: str = ""
    """The file in the runs folder that its records were read from, as they had not reached the collector."""
    messages_lost: int = 0
    """The number of its messages that are missing, though later ones were received."""

    @property
    def host(self) -> str:
        """The node's name; "" if unknown."""
        return self.hello.host if self.hello is not None else ""

    @property
    def name(self) -> str:
        """Its host; the first letters of its agent's id if unknown."""
        return self.hello.host if self.hello is not None else self.agent[:8]

    @property
    def went_well(self) -> bool:
        """Whether it has said so with its goodbye."""
        return self.bye is not None and self.bye.outcome == "ok"


@dataclass
class RunFacts:
    """Everything. Keys of `ranks` are (attempt, rank)."""

    nodes: dict[str, NodeFacts] = field(default_factory=dict)
    ranks: dict[tuple[int, int], RankFacts] = field(default_factory=dict)
    processes: dict[tuple[int, int], RankFacts] = field(default_factory=dict)
    """Below `gpuwatch run`: processes that ran a module and are no rank. Keys as of ranks; see core/identity.py."""
    attempts: dict[int, AttemptNodes] = field(default_factory=dict)
    """By attempt: all its nodes, also those that were never heard. Of a job of several nodes."""
    undecodable_pages: int = 0
    unnamed_pages: int = 0
    """Pages that may hold an overflow, of whose names some were not received."""
    peers: dict[tuple[int, int, int], dict[int, KeptPage]] = field(default_factory=dict, compare=False, repr=False)
    """By attempt, rank and page: the pages of the other ranks that are of the same point, once they were looked for."""
    blamed_before: Mapping[str, int] = field(default_factory=dict, compare=False)
    """A scheduler's node -> how many earlier runs of the folder blame it, where any does."""
    report_command: str = field(default="gpuwatch report", compare=False)
    """What shows the report of this run, wherever it is typed."""
    has_ended: bool = field(default=True, compare=False)
    """The collector has recorded the run's end. Else it still runs, or its collector was killed."""

    @property
    def everyone(self) -> dict[tuple[int, int], RankFacts]:
        """The ranks, and the processes that are none."""
        return {**self.ranks, **self.processes} if self.processes else self.ranks

    def only(self, numbers: Collection[int] | None) -> RunFacts:
        """Some ranks in all attempts, and their nodes, to show them: a verdict is over all. None: everything."""
        if numbers is None:
            return self
        ranks = {key: rank for key, rank in self.ranks.items() if rank.rank in numbers}
        agents = {rank.agent for rank in ranks.values()}
        nodes = {agent: node for agent, node in self.nodes.items() if agent in agents}
        return replace(self, nodes=nodes, ranks=ranks, processes={})

    def one(self, attempt: int, number: int) -> RankFacts:
        """A rank, or a process that is none. Raises KeyError."""
        return (self.ranks if is_rank(number) else self.processes)[attempt, number]

    def named(self, attempt: int | None, number: int | None) -> RankFacts | None:
        """The rank that a verdict names; None if it names none, or that was never heard."""
        return self.ranks.get((attempt, number)) if attempt is not None and number is not None else None

    def lone(self, attempt: int) -> list[RankFacts]:
        """The processes that are no rank, which have no attempts: they belong to the last one."""
        return [facts for _, facts in sorted(self.processes.items())] if attempt == self.last_attempt else []

    def never_ranks(self) -> dict[tuple[int, int], RankFacts]:
        """`processes` without those that became a rank after they had been taken for none: they joined a group late."""
        ranks = {(rank.agent, rank.state.pid) for rank in self.ranks.values() if rank.state is not None}
        return {
            key: each
            for key, each in self.processes.items()
            if each.state is None or (each.agent, each.state.pid) not in ranks
        }

    @property
    def last_attempt(self) -> int:
        """The attempt that the job ended with; 0 if it never began."""
        return max((attempt for attempt, _ in self.ranks), default=0)

    @property
    def failed(self) -> bool:
        """A node has said so. A silent one is no failure: its agent may have been stopped, or the link to it cut."""
        return any(node.bye is not None and not node.went_well for node in self.nodes.values())

    @property
    def failed_by_itself(self) -> bool:
        """It failed, and no launch was ended by a signal."""
        return self.failed and all(node.signal is None for node in self.nodes.values())

    @property
    def down_nodes(self) -> list[str]:
        """Nodes that the scheduler has lost, as it calls them."""
        return sorted(
            {name for node in self.nodes.values() if node.signal is not None for name in node.signal.down_nodes}
        )

    @property
    def hellos(self) -> list[AgentHello]:
        """The hellos of the nodes that were heard."""
        return [node.hello for node in self.nodes.values() if node.hello is not None]

    @property
    def check_only(self) -> bool:
        """There was no script: `gpuwatch check`."""
        return any(hello.check_only for hello in self.hellos)

    @property
    def announced_ranks(self) -> int:
        """The number of ranks, as nodes and ranks know it: a node may not be heard, or not know it beforehand."""
        said = sum(hello.nproc for hello in self.hellos)
        return max(said, *(rank.counts.world_size for rank in self.ranks.values()), 0)

    @property
    def starter(self) -> str:
        """Who has started the ranks, for a sentence: `torchrun`."""
        return next((hello.starter for hello in self.hellos), "torchrun")

    def of_attempt(self, attempt: int) -> list[RankFacts]:
        """Its ranks in order."""
        return [facts for (number, _), facts in sorted(self.ranks.items()) if number == attempt]

    def host(self, facts: RankFacts) -> str:
        """The host of a rank; "" if unknown."""
        return self.nodes[facts.agent].host if facts.agent in self.nodes else ""
