"""report.json, schema 1: fields may be added, none change meaning. Made from the facts and the verdict, nothing else.

Numbers that are non-finite are null in JSON; `nan`, `posinf` and `neginf` beside them say what they were.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...core.frames import Frame, Page
from ...core.gpu_health.difference import GpuSincePreflight
from ...core.records import GpuHealth, PreflightResult, Xid
from ..decide.gpu_evidence import gpu_of
from ..decide.insights.find import find_insights
from ..decide.insights.growth import ModuleForecast, forecasts_of
from ..decide.insights.insight import Insight
from ..decide.notices import absorbed_of, cost_of, scaler_of, waived_of, warnings_of
from ..decide.preflight_table import PreflightReport, preflight_report
from ..decide.step_report import StepReport, step_report
from ..decide.telemetry.telemetry_report import TelemetryReport, telemetry_report
from ..decide.verdict import decide
from ..decide.verdict_model import SeenIn, Verdict
from ..decide.words import seen_in, unfinished_stage
from ..facts.facts import RankFacts, RunFacts
from .attempts import AttemptReport, EarlierLife, other_attempts
from .frame_selection import Shown, frames_of_batch, frames_to_show, target_of
from .history import ModuleHistory, ModulesByRanks, histories, open_histories
from .ranks_to_show import ranks_to_show, traces_to_show
from .stacks import stack_of, threads_of
from .timeline import TimelineEntry, timeline_of

SCHEMA = 1


class RunInfo(msgspec.Struct, frozen=True):
    """The job. Times are ISO 8601 in UTC, from the collector's clock."""

    id: str
    command: list[str]
    world_size: int
    nnodes: int
    started: str | None
    ended: str | None
    versions: dict[str, str]
    attempts: int = 1
    cwd: str = ""
    check_only: bool = False
    """`gpuwatch check`: there was a preflight and no script."""
    earlier: list[EarlierLife] = []
    """Of a scheduler's job that was requeued: how its earlier lives ended."""


class FirstAnomaly(msgspec.Struct, frozen=True):
    """The first non-finite value of a rank."""

    batch: int
    step: int
    frame: int
    module: str
    cls: str = msgspec.field(name="class")
    phase: str
    role: str | None
    """null if the value was first seen in a row of another module: `seen_in`"""
    value: str
    dtype: str
    origin: bool
    between: tuple[str, str | None] | None = None
    seq: int = -1
    seen_in: SeenIn | None = None


class Lost(msgspec.Struct, frozen=True):
    """How much was recorded and did not arrive."""

    pages: int = 0
    messages: int = 0
    frames: int = 0
    rows: int = 0

    @property
    def total(self) -> int:
        """All of it together."""
        return self.pages + self.messages + self.frames + self.rows


class RankReport(msgspec.Struct, frozen=True):
    """One rank, as it was in the attempt that the verdict is about."""

    rank: int
    local_rank: int | None
    host: str
    device: str | None
    pid: int | None
    state: str
    exit: int | None
    step: int | None
    batch: int | None
    preflight: dict[str, Any]
    first_anomaly: FirstAnomaly | None
    frames: list[Frame]
    lost: Lost
    attempt: int = 0
    traces: list[Page] = []
    error: dict[str, Any] | None = None
    faults: list[str] = []
    warnings: list[dict[str, Any]] = []
    """Values near overflow or in underflow, the worst first; `warned` counts every such row."""
    warned: int = 0
    scaler: dict[str, Any] | None = None
    """The steps that a GradScaler skipped. They are expected and raise no alarm."""
    scaler_skips: int = 0
    ignored: int = 0
    """Rows that `--ignore` has waived; `hidden` has the first of each rule and place."""
    hidden: list[dict[str, Any]] = []
    cost: dict[str, Any] | None = None
    """Medians of the time from one batch to the next, watched and skipped, where that was measured."""
    batches_skipped: int = 0
    """Batches that `--every` skipped."""
    gpu: GpuSincePreflight | None = None
    """Error counters and XIDs of its GPU since the preflight, where there is one."""
    stack: list[str] = []
    """Where its main thread stood when all ranks were asked because one had stalled, innermost call first."""
    frames_comparable: bool = False
    """Whether `frames` are of the same step and collectives as those of the verdict's rank."""
    pages: int = 0
    """Batches of it that are in the store. `frames` is empty for most ranks of a large job; for those of one rank:
    `gpuwatch report --rank N`."""
    traces_left_out: int = 0
    """Traced batches that are in the store alone."""
    absorbed: int = 0
    """Nan out of masks of -inf that the model took away again; `absorbed_first` has the first of each place."""
    absorbed_first: list[dict[str, Any]] = []
    threads: list[str] = []
    """Where other threads of it stood, if it did not answer itself and py-spy is installed on its node."""


class NodeReport(msgspec.Struct, frozen=True):
    """One node."""

    host: str
    nproc: int
    state: str
    ranks: list[int]
    clock_offset_ns: int | None = None
    """By how much the collector's clock is ahead of the node's, uncertain by half the round trip."""
    clock_round_trip_ns: int | None = None
    gpus: list[GpuHealth] = []
    """Whether NVML watched its GPUs, and why not. The first is from before the training."""
    xids: list[Xid] = []
    """XIDs of all its GPUs, including those that no rank used."""


class Report(msgspec.Struct, frozen=True):
    """The one combined report of all ranks."""

    schema: int
    run: RunInfo
    verdict: Verdict
    ranks: list[RankReport]
    preflight: PreflightReport
    nodes: list[NodeReport]
    timeline: list[TimelineEntry]
    collector: dict[str, int] = {}
    attempts: list[AttemptReport] = []
    """Of a job that torchrun restarted: how the attempts ended that the verdict is not about."""
    history: ModuleHistory | None = None
    """How it came to an overflow: the verdict's module over the batches."""
    by_module: ModulesByRanks | None = None
    """The modules of all ranks in the batch of an overflow."""
    forecasts: list[ModuleForecast] = []
    """Modules that were about to pass their dtype's limit, as it was told while the job ran."""
    insights: list[Insight] = []
    """What values near trouble come to, the most harmful first."""
    steps: StepReport | None = None
    """Where the ranks' time goes, and a rank that the others wait for."""
    telemetry: TelemetryReport | None = None
    """How the nodes did around the event."""


def build_report(
    facts: RunFacts,
    *,
    run_id: str,
    started: str | None,
    ended: str | None,
    max_frames: int = 21,
    counters: dict[str, int] | None = None,
    earlier: list[EarlierLife] | None = None,
    rank: int | None = None,
    batch: int | None = None,
) -> Report:
    """Make the report of a run. `rank` is one whose frames it is to hold in any case, `batch` what they are of."""
    verdict = decide(facts)
    attempt = verdict.attempt if verdict.attempt is not None else facts.last_attempt
    target = target_of(facts, verdict)
    all_ranks = facts.of_attempt(attempt)
    shown = ranks_to_show(facts, all_ranks, verdict, target, rank)
    traces = traces_to_show(facts, all_ranks, shown, rank)
    held = {each.rank for each in shown}
    ranks = [
        _rank_report(
            facts,
            each,
            Shown([], False)
            if each.rank not in held
            else frames_of_batch(each, batch, target)
            if batch is not None
            else frames_to_show(each, verdict, target, max_frames),
            *traces.get(each.rank, ([], 0)),
        )
        for each in all_ranks
    ]
    opened = open_histories(facts, verdict, attempt)
    history, by_module = histories(opened, verdict)
    return Report(
        schema=SCHEMA,
        run=_run_info(facts, run_id, started, ended, len(ranks), earlier or []),
        verdict=verdict,
        ranks=ranks,
        preflight=preflight_report(facts, attempt),
        nodes=_nodes(facts, attempt),
        timeline=timeline_of(facts),
        collector={**(counters or {}), "undecodable_pages": facts.undecodable_pages},
        attempts=other_attempts(facts, attempt),
        history=history,
        by_module=by_module,
        forecasts=forecasts_of(all_ranks),
        insights=find_insights(facts, attempt, opened[0]),
        steps=step_report(facts, attempt),
        telemetry=telemetry_report(facts, verdict),
    )


def to_json(report: Report) -> bytes:
    """Indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1)


def _run_info(
    facts: RunFacts, run_id: str, started: str | None, ended: str | None, world: int, earlier: list[EarlierLife]
) -> RunInfo:
    hellos = [node.hello for node in facts.nodes.values() if node.hello is not None]
    versions: dict[str, str] = {}
    for hello in hellos:
        versions.update(hello.versions)
    for rank in facts.ranks.values():
        if rank.inventory is not None:
            versions.update(rank.inventory.versions)
    return RunInfo(
        id=run_id,
        command=hellos[0].command if hellos else [],
        world_size=world,
        nnodes=len(hellos),
        started=started,
        ended=ended,
        versions={key: versions.get(key, "") for key in ("gpuwatch", "torch", "cuda", "nccl", "python")},
        attempts=facts.last_attempt + 1,
        cwd=hellos[0].cwd if hellos else "",
        check_only=facts.check_only,
        earlier=earlier,
    )


def _rank_report(
    facts: RunFacts, rank: RankFacts, shown: Shown, traces: list[Page], traces_left_out: int
) -> RankReport:
    diagnosis = rank.diagnosis
    state, exit_ = rank.state, rank.exit
    where = exit_.where if exit_ is not None else None
    error = rank.errors[0] if rank.errors else None
    return RankReport(
        rank=rank.rank,
        local_rank=state.local_rank if state is not None else None,
        host=facts.host(rank),
        device=rank.inventory.device if rank.inventory is not None else None,
        pid=state.pid if state is not None else None,
        state=_state(rank),
        exit=exit_.code if exit_ is not None else None,
        step=where.step if where is not None else state.step if state is not None else None,
        batch=where.batch if where is not None else state.batch if state is not None else None,
        preflight=_preflight(rank),
        first_anomaly=FirstAnomaly(
            diagnosis.batch,
            diagnosis.step,
            diagnosis.frame,
            diagnosis.module,
            diagnosis.cls,
            diagnosis.phase,
            diagnosis.own_role,
            diagnosis.value,
            diagnosis.dtype,
            diagnosis.is_origin,
            diagnosis.between,
            diagnosis.seq,
            seen_in(diagnosis),
        )
        if diagnosis is not None
        else None,
        frames=shown.frames,
        lost=Lost(
            rank.pages_dropped,
            state.records_lost if state is not None else 0,
            state.frames_lost if state is not None else 0,
            state.rows_lost if state is not None else 0,
        ),
        attempt=rank.attempt,
        traces=traces,
        error={"type": error.error, "message": error.message, "traceback": error.traceback, "module": error.module}
        if error is not None
        else None,
        faults=[f"{fault.part}: {fault.message}" for fault in rank.faults],
        warnings=warnings_of(rank),
        warned=rank.warned_rows,
        scaler=scaler_of(rank),
        scaler_skips=rank.skipped_steps,
        ignored=rank.hidden_rows,
        hidden=waived_of(rank),
        cost=cost_of(rank),
        batches_skipped=rank.batches_skipped,
        gpu=gpu_of(facts, rank),
        stack=stack_of(rank),
        frames_comparable=shown.comparable,
        pages=len(rank.pages),
        traces_left_out=traces_left_out,
        absorbed=rank.absorbed_rows,
        absorbed_first=absorbed_of(rank),
        threads=threads_of(rank),
    )


def _state(rank: RankFacts) -> str:
    exit_ = rank.exit
    if exit_ is None:
        return rank.state.phase if rank.state is not None else "unknown"
    if rank.preflight is not None and rank.preflight.stops:
        return "preflight failed"
    if rank.anomalies and rank.anomalies[0].aborts and rank.errors:
        return "aborted"
    if rank.errors:
        return "raised"
    if exit_.by == "itself" and exit_.code is not None and exit_.code < 0:
        return "killed"
    if exit_.code == 0:
        return "unwatched" if exit_.phase == "unwatched" else "finished"
    return "stopped" if exit_.by == "torchrun" else "failed"


def _preflight(rank: RankFacts) -> dict[str, Any]:
    result: PreflightResult | None = rank.preflight
    if result is None and not rank.begun:
        return {"outcome": "off"}
    return {
        "outcome": result.outcome if result is not None else "unfinished",
        "stage": result.stage if result is not None else unfinished_stage(rank),
        "detail": result.detail if result is not None else "",
        "backend": result.backend if result is not None else "",
        "stages": [{"stage": s.stage, "seconds": s.seconds, "detail": s.detail, "grade": s.grade} for s in rank.stages],
        "unfinished": unfinished_stage(rank) or None,
        "bandwidth": [msgspec.to_builtins(row) for row in rank.bandwidth.rows] if rank.bandwidth is not None else [],
    }


def _nodes(facts: RunFacts, attempt: int) -> list[NodeReport]:
    reports = []
    for node in facts.nodes.values():
        state = "lost" if node.lost else node.bye.outcome if node.bye is not None else "unknown"
        reports.append(
            NodeReport(
                host=node.hello.host if node.hello is not None else "",
                nproc=node.hello.nproc if node.hello is not None else 0,
                state=state,
                ranks=[rank.rank for rank in facts.of_attempt(attempt) if rank.agent == node.agent],
                clock_offset_ns=node.clock[0] if node.clock is not None else None,
                clock_round_trip_ns=node.clock[1] if node.clock is not None else None,
                gpus=[event for event in node.gpu_events if isinstance(event, GpuHealth)],
                xids=[event for event in node.gpu_events if isinstance(event, Xid)],
            )
        )
    return sorted(reports, key=lambda node: node.ranks)
