"""The report of a run, from the facts and the verdict and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from ...core.events.agent_events import RankLook
from ...core.events.node_events import GpuHealth, GpuXid
from ...core.events.own_limits import choice_text
from ...core.events.preflight_events import PreflightResult
from ...core.events.run_position import RunPosition
from ...core.frames import Page
from ...core.signal_errors import from_outside
from ..decide.decide import decide, gpu_of, uuid_of
from ..decide.diagnosis_order import DiagnosisOrder
from ..decide.preflight_verdict import preflight_report
from ..ends.ending_words import ending_text
from ..ends.hang_verdict import hang_verdict
from ..facts.diagnosis import LocalDiagnosis
from ..facts.rank_facts import RankFacts
from ..facts.run_facts import RunFacts
from ..facts.words import fields_of, scaler_of, waived_of, worst_first
from ..report import model
from ..report.model import RunInfo
from ..report.run_figures import StepReport, TelemetryReport
from ..report.sentence_parts import thread_text
from . import shown_frames
from .insights import find_insights
from .node_telemetry import telemetry_report
from .stragglers import step_report
from .timeline import forecasts_of, timeline_of


def _last_stack(rank: RankFacts) -> list[str]:
    """A rank's stack at its end, where it was stopped or aborted."""
    exit_ = rank.exit
    return [line.shown for line in exit_.main or exit_.stack if line.line] if exit_ is not None else []


def look_stack(look: RankLook) -> list[str]:
    """A rank's stack, innermost call first: `/home/me/train.py:41 in main: dist.all_reduce(loss)`.

    For one that did not answer itself: native calls first, and without any stack what the kernel says of it.
    """
    if look.stack:
        return [*(f"{line.short}, native" for line in look.native), *(line.shown for line in look.stack)]
    return [thread_text(thread) for thread in look.threads]


def _attempt_report(facts: RunFacts, attempt: int) -> model.AttemptReport:
    diagnoses = [rank.diagnosis for rank in facts.of_attempt(attempt) if rank.diagnosis is not None]
    if diagnoses:
        first = DiagnosisOrder(diagnoses).earliest()[0]
        return model.AttemptReport(attempt, f"rank {first.rank}: {first.text}, batch {first.batch}")
    hang = hang_verdict(facts, attempt)
    return model.AttemptReport(attempt, hang.statement if hang is not None else ending_text(facts, attempt), hang)


_MOST_PROCESSES = 64
"""Processes in a report that are no rank."""


def build_report(
    facts: RunFacts,
    *,
    run_id: str,
    started: str | None,
    ended: str | None,
    max_frames: int = 21,
    counters: dict[str, int] | None = None,
    earlier: list[model.EarlierLife] | None = None,
    rank: int | None = None,
    batch: int | None = None,
) -> model.RunReport:
    """Make the report of a run. `rank` selects a rank whose frames it must hold, and `batch` their batch."""
    verdict = decide(facts)
    attempt = verdict.attempt if verdict.attempt is not None else facts.last_attempt
    target = shown_frames.target_of(facts, verdict)
    all_ranks = facts.of_attempt(attempt)
    lone = [process for _, process in sorted(facts.processes.items())]
    shown = shown_frames.ranks_to_show(facts, all_ranks, verdict, target, rank)
    traces = shown_frames.traces_to_show(facts, all_ranks, shown, rank)
    held = {each.rank for each in shown}

    def shown_of(one: RankFacts) -> shown_frames.SelectedFrames:
        if one.rank not in held:
            return [], False
        return shown_frames.frames_of_batch(one, batch, target) if batch is not None else last_frames(one)

    def last_frames(one: RankFacts) -> shown_frames.SelectedFrames:
        return shown_frames.frames_to_show(one, verdict, target, max_frames)

    ranks = [_rank_report(facts, each, shown_of(each), *traces.get(each.rank, ([], 0))) for each in all_ranks]
    processes = [_rank_report(facts, each, last_frames(each), [], 0) for each in lone[:_MOST_PROCESSES]]
    named = facts.named(verdict.attempt, verdict.rank)
    opened, left_out = shown_frames.open_histories(facts, verdict, attempt)
    return model.RunReport(
        schema=model.SCHEMA,
        run=_run_info(facts, run_id, started, ended, len(ranks), earlier or []),
        verdict=msgspec.structs.replace(verdict, gpu=(uuid_of(named) or None) if named is not None else None),
        ranks=ranks,
        preflight=preflight_report(facts, attempt),
        nodes=_nodes(facts, attempt),
        timeline=timeline_of(facts),
        collector={**(counters or {}), "undecodable_pages": facts.undecodable_pages},
        attempts=[_attempt_report(facts, n) for n in sorted({n for n, _ in facts.ranks} - {attempt})],
        history=shown_frames.over_batches(opened, verdict, left_out),
        losses=shown_frames.losses_over_batches(opened, verdict, left_out),
        by_module=shown_frames.over_ranks(opened, verdict),
        forecasts=forecasts_of(all_ranks),
        insights=find_insights(facts, attempt, opened),
        steps=_or_why(lambda: step_report(facts, attempt, verdict.rank), StepReport([]), "where the time goes"),
        telemetry=_or_why(lambda: telemetry_report(facts, verdict), TelemetryReport(), "the nodes' figures"),
        processes=processes,
    )


R = TypeVar("R", StepReport, TelemetryReport)


def _or_why(make: Callable[[], R | None], empty: R, what: str) -> R | None:
    """The result of `make`; if it fails on data from the network, `empty` with the reason as its `trouble`."""
    try:
        return make()
    except Exception as error:
        if from_outside(error):
            raise
        trouble = f"{what} could not be determined: {type(error).__name__}: {error}"
        return msgspec.structs.replace(empty, trouble=trouble)


def _run_info(
    facts: RunFacts, run_id: str, started: str | None, ended: str | None, world: int, earlier: list[model.EarlierLife]
) -> RunInfo:
    hellos = facts.hellos
    versions: dict[str, str] = {}
    for hello in hellos:
        versions.update(hello.versions)
    replaced: dict[str, set[str]] = {}
    for rank in facts.ranks.values():
        if rank.inventory is not None:
            versions.update(rank.inventory.versions)
        for owner, names in rank.replaced.names.items() if rank.replaced is not None else ():
            replaced.setdefault(owner, set()).update(names)
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
        replaced={owner: sorted(names) for owner, names in sorted(replaced.items())},
        report_command=facts.report_command,
        starter=facts.starter,
    )


def _rank_report(
    facts: RunFacts, rank: RankFacts, shown: shown_frames.SelectedFrames, traces: list[Page], traces_left_out: int
) -> model.RankReport:
    frames, comparable = shown
    state, error = rank.state, rank.error
    where = rank.exit.where if rank.exit is not None else state
    return model.RankReport(
        rank=rank.rank,
        local_rank=state.local_rank if state is not None else None,
        host=facts.host(rank),
        device=rank.device,
        pid=state.pid if state is not None else None,
        state=_state(rank),
        exit=rank.code if rank.ended_before_stop is None else rank.ended_before_stop,
        step=where.step if where is not None else None,
        batch=where.batch if where is not None else None,
        preflight=_preflight(rank),
        first_anomaly=_anomaly(rank.diagnosis) if rank.diagnosis is not None else None,
        frames=frames,
        lost=model.LossReport(rank.pages_dropped, rank.counts.records_lost, rows=rank.counts.rows_gone),
        attempt=rank.attempt,
        traces=traces,
        error={"type": error.error, "message": error.message, "traceback": error.traceback, "module": error.module}
        if error is not None
        else None,
        faults=[f"{fault.part}: {fault.message}" for fault in rank.faults],
        warnings=[
            fields_of(warned, "batch", "step") for _, warned in worst_first([(rank.rank, w) for w in rank.warned])
        ],
        warned=rank.warned_rows,
        scaler=scaler_of(rank),
        scaler_skips=rank.skipped_steps,
        ignored=rank.hidden_rows,
        hidden=waived_of(rank),
        batches_skipped=rank.counts.batches_skipped,
        gpu=gpu_of(facts, rank),
        stack=look_stack(rank.looks[-1]) if rank.looks else _last_stack(rank),
        frames_comparable=comparable,
        pages=len(rank.pages),
        traces_left_out=traces_left_out,
        absorbed=rank.absorbed_rows,
        absorbed_first=[fields_of(absorbed, "batch") for absorbed in rank.absorbed],
        passed=[fields_of(passed, "step", "batch") for passed in rank.passed],
        # those besides the main one that Python has, as far as they were seen: `loader, at data.py:7 in load`
        threads=[thread_text(each) for look in rank.looks[-1:] if look.stack for each in look.threads if each.at],
        traces_thinned=rank.counts.traces_thinned,
        groups_not_shown=rank.counts.groups_not_shown,
        watch_choices=[{**fields_of(each, "batch", "step"), "text": choice_text(each)} for each in rank.watch_choices],
    )


def _anomaly(found: LocalDiagnosis) -> model.RankAnomaly:
    return model.RankAnomaly(
        batch=found.batch,
        step=found.step,
        frame=found.row.frame,
        module=found.module,
        cls=found.cls,
        phase=found.phase,
        role=found.own_role,
        value=found.row.value,
        dtype=found.row.dtype,
        origin=found.is_origin,
        between=found.between,
        seq=found.issued.seq,
        seen_in=found.shown_by,
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
    if rank.was_killed:
        return "killed"
    if exit_.code == 0:
        return "unwatched" if exit_.phase == "unwatched" else "finished"
    if rank.ended_before_stop is not None:
        return "finished" if rank.ended_before_stop == 0 else "failed"
    return {"torchrun": "stopped", "running": "running"}.get(exit_.by, "failed")


def _preflight(rank: RankFacts) -> dict[str, Any]:
    if rank.preflight is None and not rank.begun:
        return {"outcome": "off"}
    unfinished = PreflightResult(RunPosition(rank.rank), "unfinished", rank.unfinished_stage)
    result = rank.preflight or unfinished
    return {
        **{name: getattr(result, name) for name in ("outcome", "stage", "detail", "backend")},
        "stages": [fields_of(stage) for stage in rank.stages],
        "unfinished": rank.unfinished_stage or None,
        "bandwidth": [msgspec.to_builtins(row) for row in rank.bandwidth.rows] if rank.bandwidth is not None else [],
    }


def _nodes(facts: RunFacts, attempt: int) -> list[model.NodeReport]:
    reports = []
    for node in facts.nodes.values():
        state = "lost" if node.lost else node.bye.outcome if node.bye is not None else "unknown"
        reports.append(
            model.NodeReport(
                host=node.hello.host if node.hello is not None else "",
                nproc=node.hello.nproc if node.hello is not None else 0,
                state=state,
                ranks=[rank.rank for rank in facts.of_attempt(attempt) if rank.agent == node.agent],
                clock_offset_ns=node.clock[0] if node.clock is not None else None,
                clock_round_trip_ns=node.clock[1] if node.clock is not None else None,
                gpus=[event for event in node.gpu_events if isinstance(event, GpuHealth)],
                xids=[event for event in node.gpu_events if isinstance(event, GpuXid)],
                spool=node.spool,
            )
        )
    return sorted(reports, key=lambda node: node.ranks)
