"""The traceback of a rank that has only lost another one is one line; that of a script's own is printed whole."""

from __future__ import annotations

import subprocess
import sys

import pytest
from gpuwatch.worker.folded_errors import folded

LOSES_A_PEER = """
import os, sys, torch, torch.distributed as dist
from gpuwatch.worker.folded_errors import folded

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
dist.all_reduce(torch.ones(1))
if rank == 1:
    os._exit(0)
try:
    dist.all_reduce(torch.ones(1))
except RuntimeError as error:
    print(folded(error, 0), flush=True)
    print("own way:", folded(error, 0, lambda *what: None), flush=True)
    try:
        raise ValueError("the checkpoint is lost") from error
    except ValueError as own:
        print("own error:", folded(own, 0), flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_it_is_one_line_unless_the_script_prints_errors_itself_or_has_raised_its_own(tmp_path):
    words = [sys.executable, "-c", LOSES_A_PEER]
    ranks = [
        subprocess.Popen([*words, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    printed, _ = ranks[0].communicate()
    ranks[1].communicate()
    line, own_way, own_error = printed.splitlines()

    assert line in [
        f"rank 0: connection {how} by peer (its traceback: gpuwatch report --rank 0) [GW106]"
        for how in ("closed", "reset")
    ]
    assert (own_way, own_error) == ("own way: ", "own error: ")


@pytest.mark.parametrize("message", ["gloo: Connection closed by peer", "the loss is nan"])
def test_what_the_script_itself_raises_is_never_folded(message):
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError(message)

    assert folded(raised.value, 0) == ""
