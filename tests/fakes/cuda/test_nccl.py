"""NCCL: the real ProcessGroupNCCL over the stand-in has the numbers of gloo, and the faults that are asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"

FAULTY = """
import os, torch, torch.distributed as dist
from datetime import timedelta
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", timeout=timedelta(seconds=8))
x = torch.arange(10.0, device="cuda")
try:
    dist.all_reduce(x)
    torch.cuda.synchronize()
    print(f"rank {rank}: {x.tolist()}\\n", end="", flush=True)
except RuntimeError as error:
    print(f"rank {rank}: {str(error).splitlines()[0]}\\n", end="", flush=True)
os._exit(0)
"""

TWO_STREAMS = """
import os, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
numbers = [torch.full((3,), 1.0, device="cuda"), torch.full((3,), 10.0, device="cuda")]
torch.cuda.synchronize()
for place, number in enumerate(numbers):
    with torch.cuda.stream(torch.cuda.Stream()):
        if place == rank:
            torch.cuda._sleep(200_000_000)
        dist.all_reduce(number)
torch.cuda.synchronize()
print(f"rank {rank}: {[number[0].item() for number in numbers]}\\n", end="", flush=True)
dist.destroy_process_group()
"""


def torchrun(script, *options, **environment):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options, script]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=250)
    return done.returncode, sorted(line for line in done.stdout.splitlines() if line.startswith("rank ")), done.stderr


def test_collectives_have_the_numbers_of_gloo():
    code, lines, errors = torchrun(str(SCRIPTS / "collectives.py"))
    assert code == 0, errors
    assert lines == ["rank 0: all equal", "rank 1: all equal"]


WRONG = [float(2 * number) for number in range(10)]
RIGHT = list(WRONG)
WRONG[7] += 1


@pytest.mark.parametrize(
    ("fault", "lines"),
    [
        ("", [f"rank 0: {RIGHT}", f"rank 1: {RIGHT}"]),
        ("1:bad-sum", [f"rank 0: {RIGHT}", f"rank 1: {WRONG}"]),
    ],
)
def test_a_fault_shows_where_it_is_asked_for(tmp_path, fault, lines):
    script = tmp_path / "script.py"
    script.write_text(FAULTY)
    code, found, errors = torchrun(str(script), STAND_IN_NCCL_FAULT=fault)
    assert (code, found) == (0, lines), errors


def test_a_communicator_keeps_the_order_of_the_host_on_two_streams(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TWO_STREAMS)
    code, found, errors = torchrun(str(script))
    assert (code, found) == (0, [f"rank {rank}: [2.0, 20.0]" for rank in (0, 1)]), errors
