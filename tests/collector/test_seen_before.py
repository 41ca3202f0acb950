"""A run says which earlier runs of its folder ended at the same place, or named the same GPU or node."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
from contextlib import closing

import pytest
from click.testing import CliRunner
from gpuwatch.cli.main import cli
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.facts.fold import FactFold, fold
from gpuwatch.collector.finish import make_report, open_store, report_from_store
from gpuwatch.collector.report.verdict import Verdict
from gpuwatch.collector.run_files import (
    RunOutcome,
    RunPaths,
    earlier_outcomes,
    fingerprint_of,
    new_run,
    read_outcome,
    seen_before,
)
from gpuwatch.core.codes import Certainty, VerdictKind
from gpuwatch.core.events.alarm_evidence import BadOperation, OperandNumbers
from gpuwatch.core.events.script_events import ScriptError
from gpuwatch.core.text import command_for
from gpuwatch.core.wire.messages import AgentMessage, EventMessage, encode
from gpuwatch.launcher.scheduler_job import SchedulerFacts
from gpuwatch.launcher.slurm_variables import SLURM
from msgspec.structs import replace

pytestmark = pytest.mark.quick_here(3)

MISS = RunOutcome("now", None, 4, VerdictKind.OVERFLOW, "established", "It overflowed.", 3, "gpu-2", fingerprint="aa")


def other(run: str, **changes) -> RunOutcome:
    fields = {"ended": "2026-11-24T09:00:00Z", "exit_code": 4, "kind": VerdictKind.OVERFLOW, "certainty": "supported"}
    return RunOutcome(run, statement="", **{**fields, "fingerprint": "bb", **changes})


def overflow(make, module: str = "fc2", batch: int = 3) -> list:
    made = make.Batch(0, batch=batch)
    x = made.tensor()
    made.call(module, "Linear", given=[x], returned=[made.tensor(make.INF)])
    return [make.hello(nproc=1), *made.messages(), make.ended(0, 1, batch=batch)]


def clean(make) -> list:
    made = make.Batch(0)
    made.call("fc1", "Linear", given=[made.tensor()], returned=[made.tensor()])
    return [make.hello(nproc=1), *made.messages(), *make.finished(0), make.NodeBye("ok")]


def run(runs_dir, name: str, bodies: list) -> RunPaths:
    paths = new_run(runs_dir, name)
    with closing(open_store(paths, 21)) as store:
        folded = FactFold(store.page, store.history)
        for n, body in enumerate(bodies, 1):
            message = AgentMessage(n, body, n - 1)
            store.add("a0", message, encode(message))
            folded.add("a0", n, body)
        store.commit()
        make_report(paths, store, folded)
    return paths


def test_what_a_process_has_frozen_stays_frozen(tmp_path, make):
    """The tests' own objects are: conftest.py."""
    before = gc.get_freeze_count()
    assert before
    run(tmp_path, "a run", [make.hello()])

    assert gc.get_freeze_count() > before / 2  # some may have been freed meanwhile


def bad_node(make) -> list:
    """Of a job in SLURM whose preflight blames gpu-2."""
    finding = make.found("compute", subject="rank", ranks=[1], hosts=["host"])
    job = SchedulerFacts(SLURM, job_id="17", node="gpu-2", hosts=("gpu-1", "gpu-2")).on_the_wire
    return [make.hello(host="host", nproc=2, job=job), *(make.concluded(rank, [finding]) for rank in range(2))]


def test_the_reason_for_a_drain_counts_the_earlier_runs_that_blame_the_node(make, tmp_path):
    reasons = [
        re.findall("reason='(.*?)'", " ".join(run(tmp_path, name, bad_node(make)).report_text.read_text().split()))
        for name in ("monday", "tuesday", "friday")
    ]
    known = "gpuwatch: preflight compute, job 17"
    assert reasons == [[known], [f"{known}, blamed by 1 earlier run"], [f"{known}, blamed by 2 earlier runs"]]
    assert [read_outcome(RunPaths(tmp_path / name)).bad_nodes for name in ("monday", "friday")] == [["gpu-2"]] * 2


def command(*arguments) -> str:
    done = CliRunner().invoke(cli, list(map(str, arguments)), env={**os.environ, "COLUMNS": "200"})
    if done.exception is not None:
        raise done.exception
    return done.output


def test_a_third_run_names_the_two_before_it_and_a_clean_one_names_none(make, tmp_path):
    first = run(tmp_path, "monday", overflow(make))
    assert "Seen before" not in first.report_text.read_text()
    run(tmp_path, "tuesday", overflow(make, batch=8))
    run(tmp_path, "wednesday", overflow(make, "fc9"))
    assert "Seen before" not in run(tmp_path, "thursday", clean(make)).report_text.read_text()
    last = run(tmp_path, "friday", overflow(make, batch=700))

    text = last.report_text.read_text()
    line = "For the third time at the same place, as in run tuesday, run monday."
    said = f"Seen before - {line} All of them: {command_for(last.folder, does='runs --like')}"
    assert said.replace(" ", "") in "".join(text.split())  # a path longer than a line is folded
    assert line in " ".join(last.report_html.read_text().split())
    assert report_from_store(last).seen_before == json.loads(last.report_json.read_bytes())["seen_before"] != []

    listed = command("runs", "--runs-dir", tmp_path, "--like", "friday").splitlines()
    assert [entry.split()[0] for entry in listed] == ["monday", "tuesday", "friday"]
    with pytest.raises(Exception, match="--like: expected a run that ended with a fault, found thursday"):
        command("runs", "--runs-dir", tmp_path, "--like", "thursday")


def crash(make, line: str, message: str = "boom") -> list:
    traceback = f'Traceback (most recent call last):\n  File "/home/me/train.py", line 7, in main\n    {line}\n'
    error = ScriptError(make.where(0), "RuntimeError", message, traceback + f"RuntimeError: {message}\n")
    return [make.hello(nproc=1), EventMessage(error), make.ended(0, 1), make.NodeBye("failed")]


def test_exceptions_of_one_type_from_different_lines_are_not_alike(make, tmp_path):
    run(tmp_path, "monday", crash(make, "load()"))
    assert "Seen before" not in run(tmp_path, "tuesday", crash(make, "save()")).report_text.read_text()
    assert "as in run tuesday." in run(tmp_path, "friday", crash(make, "save()")).report_text.read_text()


def test_an_exception_of_a_data_loaders_process_says_its_own(make, tmp_path):
    inner = "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File"
    text = run(tmp_path, "monday", crash(make, "for x in loader:", f"{inner}\nKeyError: 'no label'")).report_text
    assert "DataLoader worker process 0: KeyError: 'no label'." in " ".join(text.read_text().split())


def test_the_small_file_says_how_a_run_ended(make, tmp_path):
    found = json.loads(run(tmp_path, "monday", overflow(make)).verdict_json.read_bytes())
    assert (found["run"], found["kind"], found["exit_code"]) == ("monday", "overflow", 4)
    assert (found["rank"], found["module"], found["phase"]) == (0, "fc2", "forward")
    assert len(found["fingerprint"]) == 8


def test_damaged_files_and_links_do_not_count(make, tmp_path):
    paths = run(tmp_path, "monday", overflow(make))
    shutil.copytree(paths.folder, tmp_path / "tuesday")
    (tmp_path / "tuesday" / "verdict.json").write_bytes(b'{"run": 1')
    (tmp_path / "link").symlink_to(paths.folder)
    assert [found.run for found in earlier_outcomes(RunPaths(tmp_path / "friday"))] == ["monday"]
    assert read_outcome(RunPaths(tmp_path / "nowhere")) is None


def test_numbers_of_ranks_and_names_of_nodes_make_no_other_fault():
    report = build_report(fold([]), run_id="r", started=None, ended=None)

    def fingerprint(statement: str, **fields) -> str:
        verdict = Verdict(VerdictKind.LOST, statement, Certainty.ESTABLISHED, **fields)
        return fingerprint_of(replace(report, verdict=verdict))

    first = fingerprint("Rank 3 on anna was lost: signal 9.", host="anna")
    assert first == fingerprint("Rank 14 on berta was lost: signal 9.", host="berta") != ""
    assert first != fingerprint("Rank 3 on anna went silent.", host="anna")
    module = {"module": "fc1", "phase": "forward", "root": "Net"}
    assert fingerprint("a", **module) == fingerprint("b", **module) != fingerprint("a", **{**module, "root": "Other"})


def test_an_overflow_without_a_module_is_known_by_its_script_and_its_operation_or_line():
    report = build_report(fold([]), run_id="r", started=None, ended=None)

    def fingerprint(script: str, statement: str, op: str | None = None) -> str:
        made = BadOperation(op, "", "", 0, "", [], OperandNumbers("float32", [1], None, "nan"), "") if op else None
        verdict = Verdict(
            VerdictKind.OVERFLOW, statement, Certainty.SUPPORTED, root="Net", phase="loss", operation=made
        )
        given = replace(report.run, command=["gpuwatch", "launch", f"/home/me/{script}", "7"])
        return fingerprint_of(replace(report, run=given, verdict=verdict))

    in_line = "nan in the loss, after the forward of batch 7; `loss`, assigned at nll.py:28, was nan."
    assert fingerprint("nll.py", in_line) == fingerprint("nll.py", in_line.replace("batch 7", "batch 12")) != ""
    assert fingerprint("nll.py", in_line) != fingerprint("nll.py", in_line.replace("`loss`", "`other`"))
    nowhere = "Rank 0 met nan in batch 7, which was skipped: its origin is unknown."
    assert fingerprint("nll.py", nowhere) == "", "the model alone is no place"
    log = "aten.log.default"
    assert fingerprint("nll.py", "nan in the loss.", log) == fingerprint("nll.py", "nan in the loss.", log) != ""
    assert fingerprint("nll.py", "nan in the loss.", log) != fingerprint("other.py", "nan in the loss.", log)
    assert fingerprint("nll.py", "nan in the loss.", log) != fingerprint(
        "nll.py", "nan in the loss.", "aten.div.Tensor"
    )


def test_an_exception_is_known_by_its_type(make, tmp_path):
    def fingerprint(name: str, error: str, message: str, rank: int) -> str:
        bodies = [make.hello(nproc=2), make.raised(rank, error, message), make.ended(rank, 1), make.NodeBye("failed")]
        return fingerprint_of(report_from_store(run(tmp_path, name, bodies)))

    first = fingerprint("a", "ValueError", "the first", 0)
    assert first == fingerprint("b", "ValueError", "another one", 1) != ""
    assert first != fingerprint("c", "KeyError", "the first", 0)


def test_a_gpu_is_counted_wherever_it_failed_and_a_node_only_among_several():
    on_gpu = {"gpu": "GPU-1", "host": "gpu-2"}
    lines = seen_before(replace(MISS, gpu="GPU-1"), [other("b", **on_gpu), other("a", **on_gpu), other("c")], "")
    assert lines == ["For the third time on GPU-1 of gpu-2, as in run b (2026-11-24), run a (2026-11-24)"]
    assert seen_before(MISS, [other("b", host="gpu-2")], "") == []
    assert seen_before(replace(MISS, nodes=2), [other("b", host="gpu-2", nodes=4)], "") == [
        "For the second time on gpu-2, as in run b (2026-11-24)"
    ]
    healthy = other("b", **on_gpu, fingerprint="")
    assert seen_before(replace(MISS, gpu="GPU-1"), [healthy], "") == []


def test_many_runs_are_counted():
    lines = seen_before(
        MISS, [other(f"r{n}", fingerprint="aa", ended=None) for n in range(9)], "gpuwatch runs --like now"
    )
    start = "For the 10th time at the same place, as in run r0, run r1, run r2 and 6 more."
    assert lines == [f"{start} All of them: gpuwatch runs --like now"]
