"""The report of a job with many ranks: what a reader needs, and the rest on request."""

from __future__ import annotations

import msgspec
import pytest
from click.testing import CliRunner
from gpuwatch.cli.main import cli
from gpuwatch.collector.assemble import shown_frames as ranks_to_show
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.finish import open_store, report_from_store, write_report
from gpuwatch.collector.report.model import RunReport, to_json
from gpuwatch.collector.report.text_report import render_text
from gpuwatch.collector.run_files import RunPaths
from gpuwatch.core.wire.messages import AgentMessage, encode

RANKS = 40
BAD = 17


def batch_of(make, rank, out=1.0, *, page=0, seq=1, stage=""):
    batch = make.Batch(rank, batch=page, page=page, seq=seq)
    x, h, y = batch.tensor(), batch.tensor(), batch.tensor(out)
    batch.call(f"{stage}fc", "Linear", given=[x], returned=[h], weights={"weight": batch.tensor(0.5)})
    batch.call(f"{stage}head", "Linear", given=[h], returned=[y], weights={"weight": batch.tensor(0.25)})
    batch.call("", "Net", given=[x], returned=[y])
    return batch


def job(make, *, batches=1, trace=(), stage=lambda rank: ""):
    """Rank 17 overflows in the last batch."""
    bodies = [make.hello(nproc=RANKS, trace_batches=list(trace))]
    for rank in range(RANKS):
        for page in range(batches):
            bad = rank == BAD and page == batches - 1
            bodies += batch_of(make, rank, make.INF if bad else 1.0, page=page, stage=stage(rank)).messages()
        bodies.append(make.ended(rank, 1 if rank == BAD else -15, "itself" if rank == BAD else "torchrun"))
    return [("a0", n, body) for n, body in enumerate(bodies, 1)]


def report_of(messages, **more) -> RunReport:
    return build_report(fold(messages), run_id="x", started=None, ended=None, **more)


def test_the_named_rank_and_a_healthy_one_of_its_role_have_frames(make):
    report = report_of(job(make, stage=lambda rank: "" if rank % 2 else "stage2."))
    assert report.verdict.rank == BAD
    assert {rank.rank for rank in report.ranks if rank.frames} == {BAD, 1}
    assert all(rank.pages == 1 for rank in report.ranks)
    text = render_text(report)
    assert "38 more ranks in the run's store: gpuwatch report --rank N" in text


def test_a_rank_that_is_asked_for_has_frames(make):
    report = report_of(job(make), rank=33)
    assert [frame.module for frame in next(r for r in report.ranks if r.rank == 33).frames] == ["fc", "head"]
    assert report.verdict == report_of(job(make)).verdict


def test_many_ranks_that_overflowed_alike_are_not_all_shown(make):
    bodies = [make.hello(nproc=RANKS)]
    bodies += [body for rank in range(RANKS) for body in batch_of(make, rank, make.INF).messages()]
    report = report_of([("a0", n, body) for n, body in enumerate(bodies, 1)])
    assert 8 <= len([rank for rank in report.ranks if rank.frames]) <= 10
    assert all(rank.first_anomaly is not None for rank in report.ranks)
    assert report.verdict.statement.startswith("All 40 ranks overflowed alike")


def test_ranks_are_named_by_their_ranges(make):
    (line,) = [line for line in report_of(job(make)).verdict.evidence if "every frame received" in line]
    assert line.startswith("ranks 0-16, 18-39: ")


def test_traced_batches_are_held_as_far_as_there_is_room(make, monkeypatch):
    monkeypatch.setattr(ranks_to_show, "MOST_ROWS", 20)
    messages = job(make, batches=4, trace=[0, 1, 2])
    report = report_of(messages)
    held = {rank.rank: len(rank.traces) for rank in report.ranks if rank.traces}
    left = {rank.rank: rank.traces_left_out for rank in report.ranks}
    assert held == {BAD: 2}, "a batch has 8 rows"
    assert (left[BAD], left[0], left[39]) == (1, 3, 3)
    asked = next(rank for rank in report_of(messages, rank=39).ranks if rank.rank == 39)
    assert (len(asked.traces), asked.traces_left_out) == (3, 0)
    assert "1 traced batches of rank 17 are only in the run's store" in render_text(report)


def test_the_table_of_a_large_job_shows_the_ranks_that_differ(make, monkeypatch):
    monkeypatch.setattr("gpuwatch.collector.report.text_report._MAX_TABLE_ROWS", 8)
    text = " ".join(render_text(report_of(job(make))).split())
    assert "2 of 40 ranks (39 stopped by torchrun, 1 ended with code 1); all are in report.json" in text


@pytest.fixture
def run(make, tmp_path) -> RunPaths:
    """The folder of a run with its store and its report."""
    folder = tmp_path / "runs" / "20261122-000000-aaaa"
    folder.mkdir(parents=True)
    paths = RunPaths(folder)
    store = open_store(paths, 21)
    for agent, n, body in job(make):
        message = AgentMessage(n, body, n - 1)
        store.add(agent, message, encode(message))
    store.close()
    assert write_report(paths, report_from_store(paths)) is None
    return paths


def test_the_command_reads_the_frames_of_any_rank_from_the_store(run):
    def shown(*options: str) -> str:
        done = CliRunner().invoke(cli, ["report", str(run.folder), *options])
        assert done.exit_code == 0, done.output
        return done.output

    assert "Rank 17, batch 0: last forward frame of 2; more: --rank 17" in shown()
    assert "Rank 17, batch 0: last 2" in shown("--all")
    assert "Rank 33, batch 0: last 2" in shown("--rank", "33")
    report = msgspec.json.decode(shown("--rank", "33", "--format", "json"), type=RunReport)
    assert next(rank for rank in report.ranks if rank.rank == 33).frames
    run.store.unlink()
    assert "VERDICT  overflow" in shown("--rank", "33"), "without the store, what the report holds"


def test_the_command_shows_the_frames_of_another_batch(make, tmp_path):
    paths = RunPaths(tmp_path)
    store = open_store(paths, 1)
    for agent, n, body in job(make, batches=2):
        message = AgentMessage(n, body, n - 1)
        store.add(agent, message, encode(message))
    store.close()
    assert write_report(paths, report_from_store(paths)) is None

    def shown(*options: str):
        return CliRunner().invoke(cli, ["report", str(tmp_path), *options])

    assert "Rank 17, batch 1: last forward frame" in shown().output
    assert "Rank 17, batch 0: last 3 forward frames" in shown("--batch", "0").output
    assert "Rank 33, batch 0: last 3 forward frames" in shown("--batch", "0", "--rank", "33").output
    wrong = shown("--batch", "7")
    assert type(wrong.exception).__name__ == "UsageError"
    assert "--batch: expected a batch that is in the store, found 7" in str(wrong.exception)


@pytest.mark.slow
def test_a_thousand_ranks_fit(make):
    """Each with its frames in the store: under 5 MB."""
    messages = []
    for node in range(128):
        bodies = [make.hello(f"a{node}", f"host-{node}", nproc=8, nodes=128)]
        for rank in range(8 * node, 8 * node + 8):
            bodies += batch_of(make, rank, make.INF if rank == 77 else 1.0).messages()
            bodies += make.finished(rank)
        messages += [(f"a{node}", n, body) for n, body in enumerate(bodies, 1)]
    report = report_of(messages)
    assert report.verdict.rank == 77
    assert len(to_json(report)) < 5_000_000
