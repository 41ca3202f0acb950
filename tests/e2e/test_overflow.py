"""The question that gpuwatch exists for: which rank and module was first."""

import json
import signal
from dataclasses import replace

import pytest
from gpuwatch.core.codes import RANK_OVERFLOW

from ..needs import RELEASE

pytestmark = pytest.mark.sample(2, of="an overflow")  # of those without a mark of their own

slow = pytest.mark.slow
PLAIN = ("--preflight", "off")


@pytest.fixture(
    params=[
        pytest.param({}, id="host"),
        pytest.param({"GPUWATCH_LATE_DEVICE": "7"}, id="late", marks=[slow, pytest.mark.sample(1, of="a late device")]),
    ]
)
def bench(bench, request):
    """The numbers are there at once, as in host memory; or they come later, as from a device."""
    bench.extra = request.param
    return bench


@pytest.mark.parametrize(
    ("nproc", "rank", "batch"),
    [(2, 1, 3), pytest.param(2, 0, 0, marks=pytest.mark.soak), pytest.param(4, 2, 1, marks=slow)],
)
def test_the_rank_the_module_and_the_batch_are_named(bench, nproc, rank, batch):
    run = bench.launch("ddp_overflow.py", nproc=nproc, args=("--rank", str(rank), "--batch", str(batch)))

    assert run.code == 4
    verdict = run.verdict
    assert {key: verdict[key] for key in ("kind", "rank", "module", "class", "phase", "role", "value", "batch")} == {
        "kind": "overflow",
        "rank": rank,
        "module": "block.widen",
        "class": "Linear",
        "phase": "forward",
        "role": "output",
        "value": "+inf",
        "batch": batch,
    }
    operation = verdict["operation"]
    # a late number may arrive after the optimizer's step; torch 2.5 cannot run compiled code eagerly, which DDP may be
    if operation is not None or not (bench.extra or RELEASE < (2, 6)):
        assert operation["op"] == "aten.mm.default"
        assert operation["file"] == bench.script("ddp_overflow.py")
        assert "self.widen(" in operation["code"]
        assert operation["output"]["value"] == "+inf"
    assert verdict["dtype"] == "float32"
    assert verdict["certainty"] == "established"
    assert verdict["between"] is None
    assert verdict["concurrent"] == []
    assert {entry["rank"] for entry in verdict["cascade"]} == set(range(nproc)) - {rank}
    # as on a device, another rank may meet what came of it before: torchrun then ends the rank that was first
    assert run.report["ranks"][rank]["exit"] in (RANK_OVERFLOW, -signal.SIGTERM)
    assert verdict["statement"] in run.stderr.replace("\n", " ")
    ranks = run.report["ranks"]
    assert [entry["rank"] for entry in ranks] == list(range(nproc))
    for entry in ranks:
        frames = {frame["module"]: frame for frame in entry["frames"]}
        assert {frame["batch"] for frame in entry["frames"]} <= {batch}
        if entry["rank"] != rank and entry["exit"] == -signal.SIGTERM and "block.widen" not in frames:
            continue  # it was slow: torchrun stopped it before it came to this module
        output = next(row for row in frames["block.widen"]["rows"] if row["role"] == "output")
        assert output["posinf"] is (entry["rank"] == rank)
        weight = next(row for row in frames["block.widen"]["rows"] if row["role"] == "weight")
        assert weight["abs_max"] == pytest.approx(2.0, abs=0.1)


@slow
def test_a_model_that_takes_keywords_and_returns_a_dict(bench):
    run = bench.launch("kwargs_dict.py", *PLAIN)

    assert run.code == 4
    verdict = run.verdict
    assert (verdict["rank"], verdict["module"], verdict["role"], verdict["batch"]) == (1, "decoder.out", "output", 2)
    frame = next(f for f in run.report["ranks"][1]["frames"] if f["module"] == "decoder.out")
    assert [row["role"] for row in frame["rows"]] == ["weight", "input[0]", "output"]


@slow
def test_frames_of_nested_keywords_and_outputs_are_opened(bench):
    run = bench.launch("kwargs_dict.py", *PLAIN, "--on-overflow", "continue", "--trace-batches", "1")

    assert run.code == 4
    text = (run.cwd / "gpuwatch-runs" / "latest" / "report.txt").read_text()
    assert text.count("traced: all frames") == 2
    (trace,) = run.report["ranks"][0]["traces"]
    assert trace["batch"] == 1
    roles = {row["role"]: row for frame in trace["frames"] for row in frame["rows"] if frame["module"] == "decoder"}
    assert list(roles) == ["kwargs.hidden", "kwargs.mask", "output.logits", "output.extra[0]", "output.extra[1].mask"]
    assert roles["kwargs.mask"]["neginf"] is True
    assert run.report["ranks"][0]["first_anomaly"] is None


@slow
def test_two_models_in_one_script_are_told_apart(bench):
    run = bench.launch("two_models.py", *PLAIN)

    assert run.code == 4
    verdict = run.verdict
    assert (verdict["rank"], verdict["root"], verdict["module"], verdict["batch"]) == (0, "Discriminator", "fc", 5)


@slow
def test_training_goes_on_after_an_overflow_when_asked_to(bench):
    run = bench.launch("ddp_overflow.py", *PLAIN, "--on-overflow", "continue", args=("--rank", "1", "--batch", "2"))

    assert run.code == 4
    assert "batch 5 loss" in run.stdout
    assert (run.verdict["rank"], run.verdict["batch"], run.verdict["module"]) == (1, 2, "block.widen")
    assert run.report["ranks"][1]["state"] == "finished"
    replaced = {owner.rpartition(".")[2]: set(names) for owner, names in run.report["run"]["replaced"].items()}
    assert {"allreduce", "broadcast"} <= replaced["ProcessGroup"]
    assert "step" in replaced["GradScaler"]


@slow
def test_the_report_can_be_read_and_made_again(bench):
    run = bench.launch("ddp_overflow.py", *PLAIN, args=("--rank", "1", "--batch", "1"))
    written = run.report

    shown = bench.gpuwatch("report")
    assert shown.code == 0
    assert written["verdict"]["statement"] in shown.stdout.replace("\n", " ")
    assert "abs min  abs max  metadata" in shown.stdout
    other = bench.gpuwatch("report", "--rank", "0")
    assert "Rank 0, batch 1: last" in other.stdout
    again = bench.gpuwatch("report", written["run"]["id"], "--again", "--format", "json")
    assert json.loads(again.stdout) == written
    assert bench.gpuwatch("report", "--rank", "7").code == 2
    missing = bench.gpuwatch("report", "yesterday")
    assert missing.code == 2
    assert written["run"]["id"] in missing.stderr
    (bench.cwd / "elsewhere").mkdir()
    last = replace(bench, cwd=bench.cwd / "elsewhere").gpuwatch("report")
    assert f"report: run {written['run']['id']}," in last.stdout
    assert "of your last launch" in last.stderr


@slow
def test_at_most_as_many_frames_as_asked_for(bench):
    run = bench.launch("ddp_overflow.py", *PLAIN, "--max-frames", "1", args=("--rank", "1", "--batch", "1"))

    other, named = run.report["ranks"]
    assert [frame["module"] for frame in named["frames"]] == ["block.widen"]
    assert len(other["frames"]) <= 1, "torchrun may have stopped it before its first module of the batch had ended"


@slow
def test_the_job_ends_cleanly_after_the_batch_asked_for(bench):
    run = bench.launch("ddp_overflow.py", *PLAIN, "--abort-after-batch", "2", args=("--rank", "1", "--batch", "4"))

    assert run.code == 0
    assert run.verdict["kind"] == "clean"
    assert [rank["batch"] for rank in run.report["ranks"]] == [2, 2]


@pytest.mark.slow
def test_a_script_that_catches_the_error_and_goes_on_is_told_so(bench):
    run = bench.launch("swallows.py", "--preflight", "off", nproc=1)

    verdict = run.verdict
    assert "OverflowDetected" in run.stdout
    assert (run.code, verdict["kind"], verdict["batch"]) == (4, "overflow", 3)
    went_on = "the script caught OverflowDetected, which was to end it, and went on to batch 11"
    # where numbers come late, a step with nan is over by then: each later batch raises again
    untrained = " without an optimizer step" if "skipped 11" in run.stdout else ""
    assert went_on + untrained in verdict["evidence"]
    assert any("let OverflowDetected pass" in step for step in verdict["next"])
