"""What NCCL is told, with a stand-in for the calls that need a GPU. Real gloo groups: test_group.py."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from gpuwatch.worker.preflight.group_collectives import join

GPU = torch.device("cuda", 1)


@pytest.fixture
def nccl(monkeypatch):
    """What `init_process_group` was called with."""
    told = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: told.append(device))
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: told.append(kwargs))
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    return told


@pytest.mark.parametrize("of_the_user", [None, "1"])
def test_nothing_polls_and_no_watchdog_ends_the_process(nccl, monkeypatch, of_the_user):
    """torch's blocking wait looks once a millisecond, which is longer than what is measured."""
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    if of_the_user:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", of_the_user)

    join(dist.HashStore(), GPU, "nccl", [0], 0, 20.0, lambda step: None)

    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    (group,) = (told for told in nccl if isinstance(told, dict))
    assert group["device_id"] == GPU
    assert group["timeout"].total_seconds() > 100, "who waits gives up first"
    assert nccl.count(GPU) == 2, "in each thread"
