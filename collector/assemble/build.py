"""The report of a run, from the facts and the verdict and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ...core.events import GpuHealth, GpuXid, PreflightResult
from ...core.frames import Frame, Page
from ...core.lone_process import pid_of_number
from ...core.recorder.page_tables import whole
from ...core.verdicts import VerdictKind
from ..decide.decide import decide, gpu_of
from ..decide.ending_verdict import ending_text
from ..decide.hang_verdict import hang_verdict
from ..decide.preflight_verdict import preflight_report
from ..decide.replicas import page_at_same_point, page_of, peers_of, run_the_same_model
from ..decide.words import (
    absorbed_of,
    cost_of,
    found_text,
    passed_of,
    scaler_of,
    seen_in,
    unfinished_stage,
    waived_of,
    warnings_of,
)
from ..facts.diagnosis import earliest
from ..facts.facts import RankFacts, RunFacts
from ..facts.kept_pages import KeptPage
from ..report.model import (
    SCHEMA,
    AttemptReport,
    EarlierLife,
    LossReport,
    NodeReport,
    RankAnomaly,
    RankReport,
    RunInfo,
    RunReport,
    Verdict,
)
from ..report.stack_groups import thread_text
from .forecasts import forecasts_of
from .insights import find_insights
from .node_telemetry import telemetry_report
from .rank_history import histories, open_histories
from .stragglers import step_report
from .timeline import timeline_of

if TYPE_CHECKING:
    from ..facts.facts import RankFacts


# The stacks of a rank, as lines of its part of report.json.


def stack_of(rank: RankFacts) -> list[str]:
    """The rank's last stack, innermost call first: `/home/me/train.py:41 in main: dist.all_reduce(loss)`.

    Of one that did not answer itself: native calls first, and where nothing could be had, what the kernel says of it.
    """
    if not rank.looks:
        return []
    look = rank.looks[-1]
    if look.stack:
        return [*(f"{line.short}, native" for line in look.native), *(line.shown for line in look.stack)]
    return [thread_text(thread) for thread in look.threads]


def threads_of(rank: RankFacts) -> list[str]:
    """Threads of it besides the main one that Python has, as far as they were seen: `loader, at data.py:7 in load`."""
    threads = rank.looks[-1].threads if rank.looks and rank.looks[-1].stack else []
    return [thread_text(thread) for thread in threads if thread.at]


# The other attempts of a job that torchrun restarted, and its earlier lives under the scheduler: a line for each.


def other_attempts(facts: RunFacts, attempt: int) -> list[AttemptReport]:
    """How every attempt but this one ended, in their order."""
    numbers = sorted({number for number, _ in facts.ranks} - {attempt})
    return [_report(facts, number) for number in numbers]


def _report(facts: RunFacts, attempt: int) -> AttemptReport:
    hang = hang_verdict(facts, attempt)
    if hang is not None and not any(rank.diagnosis is not None for rank in facts.of_attempt(attempt)):
        return AttemptReport(attempt, hang.statement, hang)
    return AttemptReport(attempt, _statement(facts, attempt))


def _statement(facts: RunFacts, attempt: int) -> str:
    diagnoses = [rank.diagnosis for rank in facts.of_attempt(attempt) if rank.diagnosis is not None]
    if diagnoses:
        first = earliest(diagnoses)[0]
        return f"rank {first.rank}: {found_text(first)}, batch {first.batch}"
    return ending_text(facts, attempt)


# Which frames of a rank a report shows: the last ones up to the verdict's place, which is the same on every rank.


class ReportTarget(NamedTuple):
    """What the shown frames of all ranks are compared with."""

    rank: RankFacts
    page: KeptPage
    frame: Frame | None
    """The frame that the verdict is about; None if it is about none."""


class SelectedFrames(NamedTuple):
    """The frames of a rank that are shown."""

    frames: list[Frame]
    comparable: bool
    """They are of the same point as the target's."""


def target_of(facts: RunFacts, verdict: Verdict) -> ReportTarget | None:
    """The frame that an overflow's verdict is about; for another verdict, the last page of the rank that it names.

    Without a rank in the verdict, the first rank is taken that has such a page.
    """
    attempt = verdict.attempt if verdict.attempt is not None else facts.last_attempt
    ranks = [rank for rank in facts.of_attempt(attempt) if verdict.rank is None or rank.rank == verdict.rank]
    if verdict.pid is not None:
        ranks = [rank for rank in facts.processes.values() if pid_of_number(rank.rank) == verdict.pid]
    for rank in ranks if verdict.kind == VerdictKind.OVERFLOW else ():
        found = rank.diagnosis
        if found is None or (found.root, found.batch) != (verdict.root, verdict.batch):
            continue
        page = page_of(facts, found)
        if page is None:
            return None
        return ReportTarget(rank, page, next((f for f in page.frames if f.index == found.frame), None))
    if verdict.kind == VerdictKind.OVERFLOW:
        return None
    return next((ReportTarget(rank, rank.pages[max(rank.pages)], None) for rank in ranks if rank.pages), None)


def frames_to_show(rank: RankFacts, verdict: Verdict, target: ReportTarget | None, max_frames: int) -> SelectedFrames:
    """The last frames up to the target's, on every rank, so that they stand side by side.

    A rank without a page of the same point shows the last frames that it has.
    """
    page: KeptPage | None = None
    if target is not None:
        page = target.page if rank is target.rank else page_at_same_point(target.rank, target.page, rank)
    comparable = page is not None
    if page is None and verdict.kind == VerdictKind.OVERFLOW:
        place = (verdict.root, verdict.batch, verdict.step)
        page = next((p for p in rank.pages.values() if (p.root, p.batch, p.step) == place), None)
    if page is None and rank.pages:
        page = rank.pages[max(rank.pages)]
    if page is None:
        return SelectedFrames([], False)
    frames = sorted(page.frames, key=lambda frame: frame.index)
    end = len(frames)
    if verdict.kind == VerdictKind.OVERFLOW:
        last = _last(rank, page, verdict, target if comparable else None)
        end = next((n + 1 for n, frame in enumerate(frames) if frame.index == last), end)
    return SelectedFrames([whole(frame) for frame in frames[max(0, end - max_frames) : end]], comparable)


def frames_of_batch(rank: RankFacts, batch: int, target: ReportTarget | None) -> SelectedFrames:
    """All frames of a batch that was asked for, if it was received: of the target's root, where there are several."""
    pages = rank.pages.of_batch(batch)
    same = [page for page in pages if target is not None and page.root == target.page.root]
    page = max(same or pages, key=lambda page: page.number, default=None)
    if page is None:
        return SelectedFrames([], False)
    return SelectedFrames([whole(frame) for frame in sorted(page.frames, key=lambda frame: frame.index)], True)


def _last(rank: RankFacts, page: KeptPage, verdict: Verdict, target: ReportTarget | None) -> int | None:
    """Index of the frame to end with: of the rank's own diagnosis, else the target's counterpart.

    What a rank only received from others, as a gradient after an all-reduce, is no place of its own to end with.
    """
    own = rank.diagnosis
    if own is not None and own.source in ("received", "reduced") and target is not None and rank is not target.rank:
        own = None
    if own is not None and (own.batch, own.root) == (page.batch, page.root):
        shown = rank.anomalies[0].frame if own.turned is not None and own.from_page else own.frame
        return max(shown, own.frame)
    if target is not None and target.frame is not None:
        wanted = target.frame
        alike = [frame for frame in page.frames if (frame.module, frame.phase) == (wanted.module, wanted.phase)]
        roles = {row.role for row in wanted.rows}
        same = [frame for frame in alike if roles & {row.role for row in frame.rows}] or alike
        if same:
            return min(same, key=lambda frame: (abs(frame.index - wanted.index), frame.index)).index
    return next((frame.index for frame in page.frames if frame.module == verdict.module), None)


# Of which ranks a report holds frames and traced batches: of a small job all, of a large one what a reader needs.
#
# The others' are in the store: `gpuwatch report --rank N` reads them there.

SMALL_JOB = 32
"""Ranks of a job whose report holds frames of all ranks."""
_MOST_OF_A_KIND = 8
MOST_ROWS = 10_000
"""Of the traced batches in a report, about 4 MB of JSON."""
MOST_ROWS_OF_ONE = 200_000
"""Of a rank that was asked for."""


def ranks_to_show(
    facts: RunFacts, ranks: list[RankFacts], verdict: Verdict, target: ReportTarget | None, asked: int | None
) -> list[RankFacts]:
    """The rank that was asked for, the verdict's, those beside it, those that differ, and a healthy one like it."""
    if len(ranks) <= SMALL_JOB:
        return ranks
    concurrent = {other.rank for other in verdict.concurrent}
    cascade = {other.rank for other in verdict.cascade}
    found = [rank for rank in ranks if rank.rank == asked]
    found += [target.rank] if target is not None else []
    found += [rank for rank in ranks if rank.rank == verdict.rank]
    found += [rank for rank in ranks if rank.rank in concurrent][:_MOST_OF_A_KIND]
    found += [rank for rank in ranks if rank.diagnosis is not None and rank.rank not in concurrent][:_MOST_OF_A_KIND]
    found += [rank for rank in ranks if rank.errors and rank.rank not in cascade][:_MOST_OF_A_KIND]
    healthy = _healthy(facts, target)
    found += [healthy] if healthy is not None else []
    return list({rank.rank: rank for rank in found}.values())


def _healthy(facts: RunFacts, target: ReportTarget | None) -> RankFacts | None:
    if target is None:
        return None
    for number, page in sorted(peers_of(facts, target.page).items()):
        rank = facts.ranks[target.rank.attempt, number]
        if rank.diagnosis is None and run_the_same_model(target.page, page):
            return rank
    return None


def traces_to_show(
    facts: RunFacts, ranks: list[RankFacts], shown: list[RankFacts], asked: int | None
) -> dict[int, tuple[list[Page], int]]:
    """By rank: its traced batches, as many as there is room for, and how many are left out."""
    wanted = {batch for node in facts.nodes.values() if node.hello is not None for batch in node.hello.trace_batches}
    if not wanted:
        return {}
    found: dict[int, tuple[list[Page], int]] = {}
    room = MOST_ROWS
    held = {rank.rank for rank in shown}
    for rank in [*shown, *(rank for rank in ranks if rank.rank not in held)]:
        kept = [page for _, page in sorted(rank.pages.items()) if page.batch in wanted]
        left = MOST_ROWS_OF_ONE if rank.rank == asked else room if rank.rank in held else 0
        pages: list[Page] = []
        for page in kept:
            if page.num_rows > left and not (left == MOST_ROWS and not pages):
                break
            pages.append(page.whole())
            left -= page.num_rows
        if rank.rank != asked:
            room = min(room, max(0, left))
        found[rank.rank] = pages, len(kept) - len(pages)
    return found


_MOST_PROCESSES = 64
"""Of processes that are no rank, so many are in a report."""


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
) -> RunReport:
    """Make the report of a run. `rank` is one whose frames it is to hold in any case, `batch` what they are of."""
    verdict = decide(facts)
    attempt = verdict.attempt if verdict.attempt is not None else facts.last_attempt
    target = target_of(facts, verdict)
    all_ranks = facts.of_attempt(attempt)
    lone = [process for _, process in sorted(facts.processes.items())]
    shown = ranks_to_show(facts, all_ranks, verdict, target, rank)
    traces = traces_to_show(facts, all_ranks, shown, rank)
    held = {each.rank for each in shown}
    ranks = [
        _rank_report(
            facts,
            each,
            SelectedFrames([], False)
            if each.rank not in held
            else frames_of_batch(each, batch, target)
            if batch is not None
            else frames_to_show(each, verdict, target, max_frames),
            *traces.get(each.rank, ([], 0)),
        )
        for each in all_ranks
    ]
    processes = [
        _rank_report(facts, each, frames_to_show(each, verdict, target, max_frames), [], 0)
        for each in lone[:_MOST_PROCESSES]
    ]
    opened = open_histories(facts, verdict, attempt)
    history, by_module = histories(opened, verdict)
    return RunReport(
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
        processes=processes,
    )


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
    facts: RunFacts, rank: RankFacts, shown: SelectedFrames, traces: list[Page], traces_left_out: int
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
        first_anomaly=RankAnomaly(
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
        lost=LossReport(
            pages=rank.pages_dropped,
            messages=state.records_lost if state is not None else 0,
            rows=state.rows_lost if state is not None else 0,
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
        passed=passed_of(rank),
        threads=threads_of(rank),
        traces_thinned=state.traces_thinned if state is not None else 0,
        groups_not_shown=state.groups_not_shown if state is not None else 0,
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
                xids=[event for event in node.gpu_events if isinstance(event, GpuXid)],
            )
        )
    return sorted(reports, key=lambda node: node.ranks)
