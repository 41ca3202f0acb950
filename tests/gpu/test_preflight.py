"""The preflight on real GPUs, each part in a process that has not used CUDA before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
BAD_PROBE = str(Path(__file__).parents[1] / "e2e" / "scripts" / "bad_probe")

LOCAL = """
import json, os
from gpuwatch.core.settings import WorkerSettings
from gpuwatch.core.identity import RankIdentity
from gpuwatch.worker.preflight.steps import StageDeadlines
from gpuwatch.worker.preflight.parts import RankTests

fork, forks = os.fork, []
os.fork = lambda: (forks.append(0), fork())[1]
rank = RankIdentity(0, 0, 1, 1, "localhost", 1, True)
parts = RankTests(rank, WorkerSettings(""), StageDeadlines(120.0), "gpuwatch/0", "")
reports = [parts.inventory(), parts.health(), parts.allocation([""]), parts.compute()]
parts.child.close()
kinds, device, uuid = [report.kind for report in reports], parts.facts.device, parts.facts.uuid
print(json.dumps({"kinds": kinds, "device": device, "uuid": uuid, "forks": len(forks)}))
"""

NCCL = """
import json
import torch, torch.distributed as dist
from gpuwatch.worker.preflight.bandwidth import all_reduce_row
from gpuwatch.worker.preflight.group_collectives import join

device = torch.device("cuda", 0)
group = join(dist.HashStore(), device, "nccl", [0], 0, 100.0, lambda step: None)
total = torch.full((1 << 20,), 3.0, device=device)
group.run("all_reduce", total)
gathered = [torch.empty_like(total)]
group.run("all_gather", gathered, total)
group.run("broadcast", gathered[0], src=0)
group.run("barrier", device_ids=[0])
row = all_reduce_row(group, 1 << 20)
print(json.dumps({"sum": total[0].item(), "gathered": gathered[0][-1].item(), "us": row.time_us}), flush=True)
import os
os._exit(0)
"""


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check(tmp_path, *options, **environment):
    command = [sys.executable, "-m", "gpuwatch.cli.main", "check", "--standalone", "--nproc-per-node", "2", *options]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True, timeout=110
    )
    report = json.loads((tmp_path / "gpuwatch-runs" / "latest" / "report.json").read_text())
    return done, report


def test_the_local_stages_share_one_process_and_pass():
    found = run(LOCAL)
    assert found["kinds"] == ["ok"] * 4
    assert found["device"] == "cuda:0"
    assert found["uuid"].startswith(("GPU-", "MIG-"))
    assert found["forks"] == 1


def test_nccls_collectives_end_and_are_right():
    found = run(NCCL)
    assert (found["sum"], found["gathered"]) == (3.0, 3.0)
    assert found["us"] > 0


@two_gpus
def test_two_gpus_pass_every_stage(tmp_path):
    done, report = check(tmp_path, "--alloc", "256MiB", "--bandwidth-size", "16MiB")
    assert done.returncode == 0, done.stderr
    assert [rank["preflight"]["backend"] for rank in report["ranks"]] == ["nccl", "nccl"]


@two_gpus
def test_a_rank_that_hangs_in_a_collective_of_nccl_is_named(tmp_path):
    environment = {"BAD_PROBE": "hangs", "PYTHONPATH": os.pathsep.join([BAD_PROBE, os.environ.get("PYTHONPATH", "")])}
    done, report = check(tmp_path, "--alloc", "64MiB", "--preflight-timeout", "15", **environment)
    assert done.returncode == 3, done.stderr
    assert (report["verdict"]["rank"], report["verdict"]["stage"]) == (1, "node group")
