"""Of a requeued job: each life has its run, and the last one's report lists those before it."""

from __future__ import annotations

import pytest
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.finish import build, open_store, report_from_store, write_report
from gpuwatch.collector.report.model import EarlierLife
from gpuwatch.collector.report.text_report import render_text
from gpuwatch.collector.report.verdict import Verdict
from gpuwatch.collector.run_files import RunPaths, earlier_lives, new_run
from gpuwatch.collector.written_report import read_report
from gpuwatch.core.codes import Certainty, VerdictKind
from msgspec.structs import replace

FIRST, SECOND, THIRD = (
    "20261121-091533-slurm-17",
    "20261121-092000-slurm-17-restart-1",
    "20261121-093000-slurm-17-restart-2",
)


def finished(runs_dir, name, kind, statement) -> RunPaths:
    paths = new_run(runs_dir, name)
    report = build_report(fold([]), run_id=name, started=None, ended=None)
    assert (
        write_report(paths, replace(report, verdict=Verdict(VerdictKind(kind), statement, Certainty.ESTABLISHED)))
        is None
    )
    return paths


def test_the_last_lifes_report_lists_the_lives_before_it(tmp_path):
    finished(tmp_path, FIRST, "lost", "Node gpu-2 went silent.")
    new_run(tmp_path, SECOND)  # the power was cut
    finished(tmp_path, "20261121-092500-slurm-171", "crash", "Another job.")
    paths = new_run(tmp_path, THIRD)
    store = open_store(paths, 21)
    report = build(store, paths.run_id)
    store.close()

    left = f"It left no report; to make one: gpuwatch report --again {tmp_path / SECOND}"
    assert report.run.earlier == [EarlierLife(FIRST, "lost", "Node gpu-2 went silent."), EarlierLife(SECOND, "", left)]
    text = render_text(report, width=300)
    assert f"Other attempts and earlier lives\n  - {FIRST}, lost: Node gpu-2 went silent.\n  - {SECOND}: {left}" in text
    assert write_report(paths, report) is None
    assert read_report(paths).run.earlier == report_from_store(paths).run.earlier == report.run.earlier


@pytest.mark.parametrize("name", [FIRST, "", "pretrain"])
def test_a_run_that_was_not_requeued_lists_nothing(tmp_path, name):
    finished(tmp_path, "20261121-080000-slurm-17-restart-1", "crash", "Of an older cluster.")
    assert earlier_lives(new_run(tmp_path, name)) == []


def test_a_report_that_cannot_be_read_is_none(tmp_path):
    new_run(tmp_path, FIRST).report_json.write_bytes(b"{\x00")
    (life,) = earlier_lives(new_run(tmp_path, SECOND))
    assert (life.run, life.kind) == (FIRST, "")


def test_a_name_that_is_taken_gets_a_number(tmp_path):
    assert [new_run(tmp_path, "pretrain").run_id for _ in range(3)] == ["pretrain", "pretrain-2", "pretrain-3"]
    assert (tmp_path / "latest").resolve().name == "pretrain-3"


@pytest.mark.parametrize(
    ("kind", "signal", "code"), [("clean", None, 0), ("overflow", None, 4), ("interrupted", "SIGUSR2", 140)]
)
def test_the_exit_code_is_a_file_for_scripts(tmp_path, kind, signal, code):
    paths = new_run(tmp_path)
    report = build_report(fold([]), run_id="x", started=None, ended=None)
    write_report(
        paths, replace(report, verdict=Verdict(VerdictKind(kind), "So.", Certainty.ESTABLISHED, signal=signal))
    )
    assert paths.exit_code.read_text() == f"{code}\n"
