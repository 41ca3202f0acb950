"""What is known of one rank (fold.py makes it from messages)."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

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
from ...core.events.alarms import AbsorbedValue, Anomaly, IgnoredAlarm, MaskReturned, RangeWarning, ScalerSkip
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
from ...core.events.script_events import (
    ExitCall,
    GroupTeardown,
    LeftGroup,
    MeshCoordinates,
    OverflowRaised,
    ScriptError,
    ScriptExit,
)
from ...core.wire.beat import RankState
from .diagnosis import LocalDiagnosis
from .kept_pages import KeptHistory
from .page_index import RankPages

_NOTHING = RankState(rank=-1, local_rank=-1, attempt=0, pid=-1, phase="", step=0, batch=-1, seq=-1)

_FAULTS = frozenset(
    -fault for fault in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS)
)


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
    overflow_raised: OverflowRaised | None = None
    script_exit: ScriptExit | None = None
    exit_call: ExitCall | None = None
    """The last one. A rank that has raised since did not end by it."""
    left_group: LeftGroup | None = None
    """The last time that it did."""
    teardown: GroupTeardown | None = None
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
    masks: list[MaskReturned] = field(default_factory=list)
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
    def runs_on(self) -> bool:
        """Whether its process had not ended when its launch was killed."""
        return self.exit is not None and self.exit.runs_on

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended its process that its launcher did not send."""
        return (self.own_code or 0) < 0

    @property
    def was_aborted(self) -> bool:
        """Whether it ended its own process by SIGABRT, as a library does."""
        return self.own_code == -signal.SIGABRT

    @property
    def was_faulted(self) -> bool:
        """Whether a signal ended it that a process gets for what it does itself, other than an abort."""
        return self.own_code in _FAULTS

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
    def caught_overflow(self) -> bool:
        """Whether its script ended well after OverflowDetected was raised in it: it was caught there."""
        ended_well = self.script_exit is not None and self.script_exit.code == 0
        return self.overflow_raised is not None and ended_well and not self.errors

    @property
    def went_on_after_overflow(self) -> bool:
        """Whether that script has called a model again. One that saved something, and ended, has not."""
        raised = self.overflow_raised
        return self.caught_overflow and raised is not None and self.batches - 1 > raised.where.batch

    @property
    def only_evaluated_after_overflow(self) -> bool:
        """Whether no optimizer has stepped since, of a script whose steps were seen before."""
        raised, ended = self.overflow_raised, self.exit.where if self.exit is not None else self.counts
        return raised is not None and 0 < raised.where.step == ended.step

    @property
    def ended_before_stop(self) -> int | None:
        """The exit code of a script that had ended by itself when its launcher stopped the process; else None."""
        script, stopped = self.script_exit, self.exit is not None and self.exit.by == "torchrun"
        if script is None or not stopped or script.handler or self.errors or self._was_told_to_end(script):
            return None
        return script.code

    def _was_told_to_end(self, script: ScriptExit) -> bool:
        """Whether a signal of its launcher's had reached a handler of the script before that ended."""
        heard = self.exit.heard if self.exit is not None else []
        return any(0 < each.parent_ns <= script.where.time_ns for each in heard)

    @property
    def exited_badly(self) -> bool:
        """Whether its script called sys.exit with an error code, and no signal of its launcher's had told it to."""
        script = self.script_exit
        if script is None or script.code == 0 or script.handler:
            return False
        return not self._was_told_to_end(script)

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
