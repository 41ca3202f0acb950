"""What is known of a run: a fold over its messages, in any order, with duplicates or gaps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..core.frames import Page
from ..core.judge import anomaly_of_page
from ..core.pages import Names, decode_page
from ..core.records import (
    Absorbed,
    Anomaly,
    Bandwidth,
    BatchInputs,
    Cost,
    Fault,
    GpuCounters,
    GpuHealth,
    Ignored,
    Inventory,
    NodeSignal,
    NotLookedInto,
    PreflightBegan,
    PreflightResult,
    PreflightStage,
    ScalerSkip,
    ScriptError,
    ScriptExit,
    Warned,
    Where,
    WorkerExit,
    Xid,
)
from ..core.wire.messages import (
    AgentBody,
    Beat,
    Bye,
    Definitions,
    EventMessage,
    Hello,
    Leaving,
    PageMessage,
    RankState,
    node_of,
)
from .diagnose.diagnose import diagnose
from .diagnose.local_diagnosis import LocalDiagnosis
from .shown_body import shown_body


@dataclass
class RankFacts:
    """One rank in one attempt."""

    rank: int
    attempt: int
    agent: str = ""
    anomalies: list[Anomaly] = field(default_factory=list)
    errors: list[ScriptError] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    begun: list[PreflightBegan] = field(default_factory=list)
    stages: list[PreflightStage] = field(default_factory=list)
    bandwidth: Bandwidth | None = None
    preflight: PreflightResult | None = None
    inventory: Inventory | None = None
    script_exit: ScriptExit | None = None
    exit: WorkerExit | None = None
    pages: dict[int, Page] = field(default_factory=dict)
    """By number; the fullest copy of each."""
    state: RankState | None = None
    pages_dropped: int = 0
    warned: list[Warned] = field(default_factory=list)
    scaler_skips: list[ScalerSkip] = field(default_factory=list)
    ignored: list[Ignored] = field(default_factory=list)
    absorbed: list[Absorbed] = field(default_factory=list)
    not_looked_into: list[NotLookedInto] = field(default_factory=list)
    batch_inputs: list[BatchInputs] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    diagnosis: LocalDiagnosis | None = None
    """Where its first non-finite value came from; None if it had none. Made once, when all messages are folded."""

    @property
    def hidden_rows(self) -> int:
        """Rows that a rule of the user's has hidden."""
        return max(self.state.ignored if self.state is not None else 0, len(self.ignored))

    @property
    def absorbed_rows(self) -> int:
        """Nan out of masks of -inf that the model has taken away again."""
        return max(self.state.absorbed if self.state is not None else 0, len(self.absorbed))

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that a GradScaler has skipped."""
        return max(self.state.scaler_skips if self.state is not None else 0, len(self.scaler_skips))

    @property
    def warned_rows(self) -> int:
        """Rows near overflow or in underflow."""
        return max(self.state.warned if self.state is not None else 0, len(self.warned))

    @property
    def batches_skipped(self) -> int:
        """Batches that were left out."""
        return self.state.batches_skipped if self.state is not None else 0

    @property
    def cost(self) -> Cost | None:
        """The measurement that saw the most."""
        return max(self.costs, key=lambda cost: (cost.watched_batches, cost.plain_batches), default=None)


@dataclass
class NodeFacts:
    """One node agent."""

    agent: str
    hello: Hello | None = None
    bye: Bye | None = None
    signal: NodeSignal | None = None
    lost: bool = False
    """It went silent before its Bye."""
    clock: tuple[int, int] | None = None
    """(by how much the collector's clock is ahead, round trip of the exchange that told), in nanoseconds."""
    gpu_events: list[Xid | GpuCounters | GpuHealth] = field(default_factory=list)


@dataclass
class RunFacts:
    """Everything. Keys of `ranks` are (attempt, rank)."""

    nodes: dict[str, NodeFacts] = field(default_factory=dict)
    ranks: dict[tuple[int, int], RankFacts] = field(default_factory=dict)
    undecodable_pages: int = 0

    @property
    def last_attempt(self) -> int:
        """The attempt that the job ended with; 0 if it never began."""
        return max((attempt for attempt, _ in self.ranks), default=0)

    @property
    def down_nodes(self) -> list[str]:
        """Nodes that the scheduler has lost, as it calls them."""
        return sorted(
            {name for node in self.nodes.values() if node.signal is not None for name in node.signal.down_nodes}
        )

    @property
    def check_only(self) -> bool:
        """There was no script: `gpuwatch check`."""
        return any(node.hello.check_only for node in self.nodes.values() if node.hello is not None)

    def of_attempt(self, attempt: int) -> list[RankFacts]:
        """Its ranks in order."""
        return [facts for (number, _), facts in sorted(self.ranks.items()) if number == attempt]

    def host(self, facts: RankFacts) -> str:
        """The host of a rank; "" if unknown."""
        node = self.nodes.get(facts.agent)
        return node.hello.host if node is not None and node.hello is not None else ""


def fold(messages: Iterable[tuple[str, int, AgentBody]], lost_agents: Iterable[str] = ()) -> RunFacts:
    """Put messages together. `lost_agents` went silent, as the collector saw it."""
    facts = RunFacts()
    names: dict[tuple[int, int], Names] = {}
    pages: list[tuple[str, PageMessage]] = []
    for name, _, received in messages:
        agent = node_of(name)
        body = received if isinstance(received, PageMessage | Definitions) else shown_body(received)
        node = facts.nodes.setdefault(agent, NodeFacts(agent))
        if isinstance(body, Hello):
            node.hello = body
        elif isinstance(body, Bye):
            node.bye = body
        elif isinstance(body, Definitions):
            names.setdefault((body.attempt, body.rank), Names()).add(body.entries)
        elif isinstance(body, PageMessage):
            pages.append((agent, body))
        elif isinstance(body, Leaving):
            continue
        elif isinstance(body, Beat):
            _take_beat(facts, node, body)
        else:
            _take_event(facts, agent, node, body)
    for agent, message in pages:
        _take_page(facts, agent, message, names)
    _take_preflights_of_peers(facts)
    for rank in facts.ranks.values():
        if not rank.anomalies:  # it ended before it could look at what came back from its device
            found = (anomaly_of_page(page) for _, page in sorted(rank.pages.items()))
            rank.anomalies = [anomaly for anomaly in found if anomaly is not None][:1]
    for agent in map(node_of, lost_agents):
        if agent in facts.nodes:
            facts.nodes[agent].lost = True
    for node in facts.nodes.values():
        node.gpu_events.sort(key=lambda event: event.time_ns)
    for rank in facts.ranks.values():
        rank.anomalies.sort(key=lambda anomaly: (anomaly.where.time_ns, anomaly.where.page, anomaly.frame))
        rank.errors.sort(key=lambda error: error.where.time_ns)
        rank.begun.sort(key=lambda began: began.where.time_ns)
        rank.stages.sort(key=lambda stage: stage.where.time_ns)
        rank.warned.sort(key=lambda warned: (_place(warned.where), warned.module, warned.role, warned.kind))
        rank.scaler_skips.sort(key=lambda skip: (skip.where.time_ns, *_place(skip.where), skip.in_a_row))
        rank.ignored.sort(key=lambda ignored: (_place(ignored.where), ignored.module, ignored.role))
        rank.batch_inputs.sort(key=lambda inputs: _place(inputs.where))
        rank.not_looked_into.sort(key=lambda hidden: (hidden.module, hidden.cls))
        rank.absorbed.sort(key=lambda absorbed: (_place(absorbed.where), absorbed.module, absorbed.role))
        rank.diagnosis = diagnose(rank.anomalies, rank.pages)
        rank.costs.sort(key=lambda cost: (cost.watched_batches, cost.plain_batches, cost.where.time_ns))
    return facts


def _place(where: Where) -> tuple[int, int, int]:
    return where.page, where.batch, where.seq


def _rank(facts: RunFacts, agent: str, attempt: int, rank: int) -> RankFacts:
    found = facts.ranks.setdefault((attempt, rank), RankFacts(rank, attempt))
    found.agent = agent
    return found


def _take_event(facts: RunFacts, agent: str, node: NodeFacts, message: EventMessage) -> None:
    event = message.event
    if isinstance(event, NodeSignal):
        node.signal = event
        return
    if isinstance(event, Xid | GpuCounters | GpuHealth):
        if event not in node.gpu_events:
            node.gpu_events.append(event)
        return
    rank = _rank(facts, agent, event.where.attempt, event.where.rank)
    lists: list[tuple[type, list]] = [  # type: ignore[type-arg]  # each list holds what its type says
        (Anomaly, rank.anomalies),
        (ScriptError, rank.errors),
        (Fault, rank.faults),
        (PreflightBegan, rank.begun),
        (PreflightStage, rank.stages),
        (Warned, rank.warned),
        (ScalerSkip, rank.scaler_skips),
        (Ignored, rank.ignored),
        (Absorbed, rank.absorbed),
        (NotLookedInto, rank.not_looked_into),
        (BatchInputs, rank.batch_inputs),
        (Cost, rank.costs),
    ]
    for kind, events in lists:
        if isinstance(event, kind):
            if event not in events:
                events.append(event)
            return
    if isinstance(event, PreflightResult):
        rank.preflight = event
    elif isinstance(event, Inventory):
        if rank.inventory is None or event.facts is not None:  # what runs without facts is told once more, with them
            rank.inventory = event
    elif isinstance(event, Bandwidth):
        rank.bandwidth = event
    elif isinstance(event, ScriptExit):
        rank.script_exit = event
    elif isinstance(event, WorkerExit):
        rank.exit = event


def _take_preflights_of_peers(facts: RunFacts) -> None:
    """A rank that was stopped before it could write has told the others."""
    tellers = [rank.preflight for _, rank in sorted(facts.ranks.items()) if rank.preflight is not None]
    for teller in tellers:
        for peer in teller.peers:
            rank = facts.ranks.get((teller.where.attempt, peer.rank))
            if rank is not None and rank.preflight is None:
                where = Where(peer.rank, teller.where.attempt)
                rank.preflight = PreflightResult(where, peer.outcome, peer.stage, peer.detail, teller.stops)


def _take_beat(facts: RunFacts, node: NodeFacts, beat: Beat) -> None:
    if beat.clock_offset_ns is not None and beat.clock_round_trip_ns is not None:
        clock = (beat.clock_offset_ns, beat.clock_round_trip_ns)
        if node.clock is None or clock[1] <= node.clock[1]:
            node.clock = clock
    for state in beat.ranks:
        rank = _rank(facts, node.agent, state.attempt, state.rank)
        if rank.state is None or _moved(state) >= _moved(rank.state):
            rank.state = state
    for number, dropped in beat.pages_dropped.items():
        for (_, rank_number), rank in facts.ranks.items():
            if rank_number == number:
                rank.pages_dropped = max(rank.pages_dropped, dropped)


def _moved(state: RankState) -> tuple[int, ...]:
    """Of two beats the later one, whichever came first: nothing in it runs backwards."""
    return (
        state.final,
        state.step,
        state.batch,
        state.seq,
        state.ignored,
        state.absorbed,
        state.scaler_skips,
        state.warned,
        state.batches_skipped,
    )


def _take_page(facts: RunFacts, agent: str, message: PageMessage, names: dict[tuple[int, int], Names]) -> None:
    try:
        page = decode_page(message, names.get((message.attempt, message.rank), Names()))
    except Exception:  # bytes from the network: whatever is wrong with them, the report must be written
        facts.undecodable_pages += 1
        return
    rank = _rank(facts, agent, message.attempt, message.rank)
    known = rank.pages.get(page.number)
    if known is None or _fullness(page) > _fullness(known):
        rank.pages[page.number] = page


def _fullness(page: Page) -> tuple[int, bool, int]:
    """Of two copies of a page the fuller one is kept, whichever came first."""
    arrived = sum(row.kind == "measured" for frame in page.frames for row in frame.rows)
    return len(page.frames), page.complete, arrived
