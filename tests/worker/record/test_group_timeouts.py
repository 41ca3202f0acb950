"""The timeout of a process group, as torch has it."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
from gpuwatch.worker.record.group_timeouts import timeout_ms

GLOO = """
import datetime
import torch.distributed as dist
from gpuwatch.worker.record.group_timeouts import timeout_ms

seconds = lambda number: datetime.timedelta(seconds=number)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=seconds(20))
group = dist.new_group([0], timeout=seconds(7))
print(timeout_ms(dist.group.WORLD), timeout_ms(group))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_it_is_that_of_each_group():
    ended = subprocess.run([sys.executable, "-c", GLOO], capture_output=True, text=True)

    assert ended.stdout.split() == ["20000", "7000"], ended.stderr


def group(backend, seconds):
    options = SimpleNamespace(_timeout=timedelta(seconds=seconds), backend=backend)
    return SimpleNamespace(_device_types=["cuda"], _get_backend=lambda device: SimpleNamespace(options=options))


@pytest.mark.parametrize(
    ("backend", "environ", "expected_ms"),
    [
        ("nccl", {}, 600_000),
        ("nccl", {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "120"}, 120_000),
        ("nccl", {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1800"}, 600_000),
        ("nccl", {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "120", "TORCH_NCCL_ENABLE_MONITORING": "0"}, 600_000),
        ("nccl", {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "soon"}, 600_000),
        ("gloo", {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "120"}, 600_000),
        ("nccl", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, 600_000),
        ("nccl", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, 0),
        ("nccl", {"NCCL_ASYNC_ERROR_HANDLING": "0"}, 0),
        ("nccl", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"}, -600_000),
        ("nccl", {"TORCH_NCCL_BLOCKING_WAIT": "1"}, -600_000),
        ("nccl", {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "120"}, 120_000),
        ("gloo", {"TORCH_NCCL_BLOCKING_WAIT": "1"}, 600_000),
        ("nccl", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "120"}, 120_000),
        ("gloo", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, 600_000),
    ],
)
def test_the_heartbeat_of_nccls_watchdog_ends_a_rank_as_well(backend, environ, expected_ms):
    assert timeout_ms(group(backend, 600), environ) == expected_ms


def test_of_a_backend_without_options_it_is_not_known():
    assert timeout_ms(SimpleNamespace(_device_types=["cpu"], _get_backend=lambda device: object())) == 0
