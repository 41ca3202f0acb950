"""Ranks that do not run on the same are told before the training starts. The differences are real, in real ranks."""

import socket

import pytest

pytestmark = pytest.mark.slow

HOST = socket.gethostname()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("NCCL_ALGO=Ring", f"NCCL_ALGO differs: Ring on rank 1 (node {HOST}), not set on rank 0 (node {HOST})"),
        ("another torch", f"torch differs: 2.12.1 on rank 1 (node {HOST}), "),
        ("one GPU", f"ranks 0, 1 (node {HOST}) share one GPU, GPU-11111111-2222-3333-4444-555555555555"),
    ],
)
def test_a_difference_that_would_hang_the_job_stops_it(bench, way, words):
    run = bench.launch("clean.py", ODD_RANK=way, PYTHONPATH=bench.script("odd_rank"))

    assert run.code == 3
    assert (run.verdict["kind"], run.verdict["stage"]) == ("preflight", "consistency")
    assert words in run.verdict["statement"]
    assert run.verdict["next"]
    assert "rank 0 step" not in run.stdout
    assert words in " ".join(run.stderr.split())


def test_a_difference_that_may_be_meant_is_told_and_stops_nothing(bench):
    way = "TORCH_NCCL_BLOCKING_WAIT=1,NCCL_DEBUG_FILE=/tmp/mine"  # the second is each rank's own affair
    run = bench.launch("clean.py", ODD_RANK=way, PYTHONPATH=bench.script("odd_rank"))

    assert run.code == 0
    assert run.verdict["kind"] == "clean"
    assert "rank 0 step 9" in run.stdout
    told = [
        (one["grade"], one["sentence"]) for one in run.report["preflight"]["findings"] if "differs" in one["sentence"]
    ]
    ((grade, sentence),) = told
    assert grade == "warn"
    assert sentence.startswith(f"TORCH_NCCL_BLOCKING_WAIT differs: 1 on rank 1 (node {HOST}), not set on rank 0")


def test_nodes_with_different_scripts(bench, port):
    where = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "a job")
    nodes = []
    for folder in ("here", "there"):
        script = bench.cwd / folder / "train.py"
        script.parent.mkdir()
        script.write_text(f"print('the script of {folder}')\n")
        nodes.append(bench.start("gpuwatch.cli.main", "launch", "--nproc-per-node", "1", *where, str(script)))
    runs = [bench.finish(node) for node in nodes]

    assert [run.code for run in runs] == [3, 3]
    verdict = runs[0].verdict
    assert (verdict["kind"], verdict["stage"]) == ("preflight", "consistency")
    assert "the script file differs: sha256 " in verdict["statement"]
    assert "the script of" not in runs[0].stdout + runs[1].stdout
