from __future__ import annotations

import os

import pytest
from gpuwatch.core.errors import UsageError
from gpuwatch.launcher.expect import expect_place
from gpuwatch.launcher.fill_in import expect_address, fill_in_from_job
from gpuwatch.launcher.options import get_parser
from gpuwatch.launcher.plan import make_plan


def test_a_name_with_an_address_is_good():
    expect_address("localhost", 0.0)
    expect_address("::1", 0.0)


def test_a_head_without_an_address_is_one_sentence():
    with pytest.raises(UsageError) as caught:
        expect_address("no host", 0.0)
    assert "'no host'" in str(caught.value)
    assert "--rdzv-endpoint HOST:PORT" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--nnodes 2 --node-rank 2 --master-addr localhost", "--node-rank: expected 0 to 1 with --nnodes 2, found 2"),
        ("--rdzv-backend etcd --rdzv-endpoint localhost:2379", "expected the package python-etcd"),
    ],
)
def test_a_node_that_has_no_place_is_one_sentence(line, words, monkeypatch):
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    args = get_parser().parse_args([*line.split(), "train.py"])
    with pytest.raises(UsageError, match=words):
        expect_place(args, make_plan(args, lambda host: True))


@pytest.mark.parametrize(
    ("node_rank", "said"), [("0", "gpuwatch: SLURM job 4711: 2 nodes meet at localhost:20422\n"), ("1", "")]
)
def test_the_head_says_where_the_nodes_meet(node_rank, said, monkeypatch, capsys):
    for name in [name for name in os.environ if name.startswith(("SLURM", "PET_"))]:
        monkeypatch.delenv(name)
    environ = {"JOB_ID": "4711", "STEP_ID": "0", "NNODES": "2", "NODELIST": "localhost,other", "NODEID": node_rank}
    for name, value in environ.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    job = fill_in_from_job(get_parser().parse_args(["train.py"]), get_parser, ["train.py"])
    assert job is not None
    assert job.hosts == ("localhost", "other")
    assert capsys.readouterr().err == said
