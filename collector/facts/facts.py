"""The facts of a run (fold.py makes them from messages)."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...core.events.across_ranks import PassedTensor, ReplicaHashes
from ...core.events.agent_events import (
    LimitForecast,
    RankLook,
    SlowRankLooks,
    StepTimes,
    StoppedGradient,
    UnmovedParts,
    UnmovedWeights,
    WorkerExit,
    ZeroedGradients,
)
from ...core.events.alarm_evidence import BatchInputs, BatchSource, ForwardCaptured, SecondRun
from ...core.events.alarms import AbsorbedValue, Anomaly, IgnoredAlarm, RangeWarning, ScalerSkip
from ...core.events.node_events import AttemptNodes, GpuCounters, GpuHealth, GpuXid, NodeSignal
from ...core.events.own_limits import (
    CompiledUnseen,
    LooseParameters,
    NotLookedInto,
    OwnFault,
    ReplacedFunctions,
    UnmeasuredTensor,
    UnreadStates,
    WatchChoice,
    costs_frames,
)
from ...core.events.preflight_events import (
    BandwidthRows,
    PreflightBegan,
    PreflightResult,
    PreflightStage,
    RankInventoryEvent,
)
from ...core.events.script_events import LeftGroup, MeshCoordinates, ScriptError, ScriptExit
from ...core.identity import is_rank
from ...core.wire.beat import RankState
from ...core.wire.messages import AgentHello, NodeBye, TelemetryMessage, node_of
from .diagnosis import LocalDiagnosis
from .kept_pages import KeptHistory, KeptPage

# The pages of one rank, found by their number, their optimizer step or their batch, however many there are.


class RankPages(dict[int, KeptPage]):
    """Number -> page. `of_step` and `of_batch` give the pages in the order in which they came."""

    def __init__(self) -> None:
        super().__init__()
        self.suspicious: dict[int, KeptPage] = {}
        """Those that may hold an alarm, by number: few, if any."""
        self.any_backward = False
        """A backward of the rank was seen."""
        self._of_step: dict[int, list[KeptPage]] = {}
        self._of_batch: dict[int, list[KeptPage]] = {}

    def __setitem__(self, number: int, page: KeptPage) -> None:
        """Keep a page in place of the copy that is there."""
        known = self.pop(number, None)
        if known is not None:
            for pages in (self._of_step[known.step], self._of_batch[known.batch]):
                pages[:] = [found for found in pages if found is not known]
            self.suspicious.pop(number, None)
        super().__setitem__(number, page)
        self._of_step.setdefault(page.step, []).append(page)
        self._of_batch.setdefault(page.batch, []).append(page)
        self.any_backward |= page.has_backward
        if page.may_hold_alarm:
            self.suspicious[number] = page

    def of_step(self, step: int) -> Sequence[KeptPage]:
        """The pages of this optimizer step."""
        return self._of_step.get(step, ())

    def of_batch(self, batch: int) -> Sequence[KeptPage]:
        """The pages of this batch."""
        return self._of_batch.get(batch, ())


_NOTHING = RankState(rank=-1, local_rank=-1, attempt=0, pid=-1, phase="", step=0, batch=-1, seq=-1)


@dataclass
class RankFacts:
    """One rank in one attempt."""

    rank: int
    attempt: int
    agent: str = ""
    anomalies: list[Anomaly] = field(default_factory=list)
    errors: list[ScriptError] = field(default_factory=list)
    second_run: SecondRun | None = None
    """What a second run of the forward of its alarm has found."""
    captured: ForwardCaptured | None = None
    faults: list[OwnFault] = field(default_factory=list)
    begun: list[PreflightBegan] = field(default_factory=list)
    stages: list[PreflightStage] = field(default_factory=list)
    bandwidth: BandwidthRows | None = None
    preflight: PreflightResult | None = None
    inventory: RankInventoryEvent | None = None
    replaced: ReplacedFunctions | None = None
    script_exit: ScriptExit | None = None
    left_group: LeftGroup | None = None
    """The last time that it did."""
    meshes: list[MeshCoordinates] = field(default_factory=list)
    exit: WorkerExit | None = None
    pages: RankPages = field(default_factory=RankPages)
    """By number; the fullest copy of each."""
    histories: dict[int, KeptHistory] = field(default_factory=dict, compare=False, repr=False)
    """By root."""
    state: RankState | None = None
    pages_dropped: int = 0
    warned: list[RangeWarning] = field(default_factory=list)
    scaler_skips: list[ScalerSkip] = field(default_factory=list)
    ignored: list[IgnoredAlarm] = field(default_factory=list)
    absorbed: list[AbsorbedValue] = field(default_factory=list)
    passed: list[PassedTensor] = field(default_factory=list)
    """Non-finite tensors that went into collectives and messages, or came out of them; the earliest first."""
    not_looked_into: list[NotLookedInto] = field(default_factory=list)
    compiled_unseen: list[CompiledUnseen] = field(default_factory=list)
    watch_choices: list[WatchChoice] = field(default_factory=list)
    unmeasured: UnmeasuredTensor | None = None
    loose_parameters: list[LooseParameters] = field(default_factory=list)
    unread_states: list[UnreadStates] = field(default_factory=list)
    hashes: list[ReplicaHashes] = field(default_factory=list)
    batch_inputs: list[BatchInputs] = field(default_factory=list)
    batch_sources: list[BatchSource] = field(default_factory=list)
    looks: list[RankLook] = field(default_factory=list)
    """Its position each time that all ranks were asked."""
    step_times: StepTimes | None = None
    slow_looks: SlowRankLooks | None = None
    """Where it was in its own time, if the others wait for it."""
    forecasts: list[LimitForecast] = field(default_factory=list)
    """While it ran: modules that were about to pass their limit."""
    zeroed_gradients: list[ZeroedGradients] = field(default_factory=list)
    unmoved_weights: list[UnmovedWeights] = field(default_factory=list)
    stopped_gradients: list[StoppedGradient] = field(default_factory=list)
    unmoved_parts: list[UnmovedParts] = field(default_factory=list)
    diagnosis: LocalDiagnosis | None = None
    """Where its first non-finite value came from; None if it had none."""

    @property
    def coordinates(self) -> dict[str, int]:
        """Its place by dimension of the DeviceMeshes; without names that two meshes have for different places."""
        found: dict[str, set[int]] = {}
        for mesh in self.meshes:
            for name, at in mesh.coordinates.items():
                found.setdefault(name, set()).add(at)
        return {name: places.pop() for name, places in found.items() if len(places) == 1}

    @property
    def counts(self) -> RankState:
        """Its state; where that was not heard, one in which nothing has happened."""
        return self.state if self.state is not None else _NOTHING

    @property
    def hidden_rows(self) -> int:
        """Rows that a rule of the user's has hidden."""
        return max(self.counts.ignored, len(self.ignored))

    @property
    def absorbed_rows(self) -> int:
        """Bad values that led nowhere, such as nan out of masks of -inf that the model has taken away again."""
        return max(self.counts.absorbed, len(self.absorbed))

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that a GradScaler has skipped."""
        return max(self.counts.scaler_skips, len(self.scaler_skips))

    @property
    def warned_rows(self) -> int:
        """Rows near overflow or in underflow."""
        return max(self.counts.warned, len(self.warned))

    @property
    def batches(self) -> int:
        """Forwards of its models, as far as is known."""
        ended_in = self.exit.where.batch if self.exit is not None else -1
        return (ended_in if ended_in >= 0 else self.counts.batch) + 1

    @property
    def device(self) -> str | None:
        """The device that it ran on, if it said so."""
        return self.inventory.device if self.inventory is not None else None

    @property
    def faults_that_cost_frames(self) -> list[OwnFault]:
        """The faults after which frames may be missing."""
        return [fault for fault in self.faults if costs_frames(fault.part)]

    @property
    def lost_faults(self) -> int:
        """How many more faults that cost frames it has counted than were heard: its log had no room for them."""
        return max(0, self.counts.faults - len(self.faults_that_cost_frames))

    @property
    def unfinished_stage(self) -> str:
        """The stage of the preflight that it has begun and not ended; "" if there is none."""
        ended = {event.stage for event in self.stages}
        return next((event.stage for event in reversed(self.begun) if event.stage not in ended), "")

    # -- how it ended -------------------------------------------------------------------------------------------

    @property
    def error(self) -> ScriptError | None:
        """The first exception that left its script."""
        return self.errors[0] if self.errors else None

    @property
    def code(self) -> int | None:
        """The exit code of its process; None if that has not ended, or it is unknown."""
        return self.exit.code if self.exit is not None else None

    @property
    def own_code(self) -> int | None:
        """The same of a process that its launcher has not stopped; else None."""
        return self.exit.code if self.exit is not None and self.exit.by == "itself" else None

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended its process that its launcher did not send."""
        return (self.own_code or 0) < 0

    @property
    def was_aborted(self) -> bool:
        """Whether it ended its own process by SIGABRT, as a library does."""
        return self.own_code == -signal.SIGABRT

    @property
    def was_aborted_at_exit(self) -> bool:
        """Whether torch aborted the process after its script had ended well: a thread of gloo, say, that had lost its
        peers (pytorch/pytorch#179291)."""
        return self.was_aborted and self.script_exit is not None and self.script_exit.code == 0

    @property
    def left_silently(self) -> bool:
        """Whether its process ended with code 0 in the middle of its work, as `os._exit(0)` does it."""
        at_work = self.exit is not None and self.exit.phase in ("forward", "backward", "optimizer")
        return at_work and self.own_code == 0 and self.script_exit is None and not self.errors

    @property
    def told_its_end(self) -> bool:
        """Whether its script has ended, or it has left its group and called nothing after that.

        Ray kills its workers once they have left their group.
        """
        left, end = self.left_group, self.exit
        if self.script_exit is not None:
            return True
        if left is None or end is None or end.phase != "script":
            return False
        return (left.where.step, left.where.batch) == (end.where.step, end.where.batch)

    @property
    def hid_a_peer_failure(self) -> bool:
        """Whether it left with an exit code of its own after a collective had raised in it, and its script caught
        that."""
        if self.exit is None or self.errors:
            return False
        left_badly = (self.script_exit is not None and self.script_exit.code != 0) or (self.own_code or 0) > 0
        return left_badly and any(group.phase == "failed" for group in self.exit.groups)

    @property
    def was_not_watched(self) -> bool:
        """Whether it has run, and had no recorder or no hooks."""
        if self.state is not None:
            return self.state.hooks == "failed"
        return self.exit is not None and self.exit.phase in ("starting", "unwatched")

    @property
    def ran_another_program(self) -> bool:
        """Whether it is a program that `--no-python` has started."""
        return self.exit is not None and self.exit.phase == "unwatched"


@dataclass
class NodeFacts:
    """One node agent."""

    agent: str
    hello: AgentHello | None = None
    bye: NodeBye | None = None
    signal: NodeSignal | None = None
    lost: bool = False
    """It went silent before its Bye."""
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


class HeardNumbers:
    """Which of the numbered messages were never heard. An agent counts them from 1, without a gap.

    They come in any order, with duplicates.
    """

    def __init__(self) -> None:
        self._whole: dict[str, int] = {}
        """By agent: everything up to this number was heard."""
        self._beyond: dict[str, set[int]] = {}
        """Numbers behind a gap."""

    def add(self, agent: str, n: int) -> None:
        """A message of an agent was heard; 0 is not numbered."""
        whole = self._whole.get(agent, 0)
        if n != whole + 1:
            if n > whole:
                self._beyond.setdefault(agent, set()).add(n)
            return
        beyond = self._beyond.get(agent)
        whole = n
        while beyond and whole + 1 in beyond:
            whole += 1
            beyond.discard(whole)
        self._whole[agent] = whole

    def lost(self) -> dict[str, int]:
        """node -> messages that were sent before others that were heard, and are not there."""
        found: dict[str, int] = {}
        for agent, beyond in self._beyond.items():
            if beyond:
                gap = max(beyond) - self._whole.get(agent, 0) - len(beyond)
                found[node_of(agent)] = found.get(node_of(agent), 0) + gap
        return found
