"""The counters are exact."""

from __future__ import annotations

import torch


def test_each_call_is_counted_once(counted):
    x = torch.ones(100, device="cuda")
    pinned = torch.zeros(100, pin_memory=True)
    event = torch.cuda.Event()
    event.record()
    torch.cuda.synchronize()

    def work():
        y = x + 1  # an operation
        y.mul_(2)  # another
        pinned.copy_(y, non_blocking=True)  # a copy
        event.record()
        event.query()
        event.synchronize()

    expected = {"operations": 2, "copies": 1, "records": 1, "queries": 1, "host_waits": 1}
    assert counted(work) == expected
    assert counted(work) == expected  # and torch's allocator asks for nothing new
    assert pinned[0] == 4


def test_views_and_allocations_launch_nothing(counted):
    x = torch.ones(100, 10, device="cuda")
    assert counted(lambda: (x.t(), x[3:], x.view(10, 100), x.detach(), torch.empty_like(x))) == {}
    assert counted(lambda: x.item() if x.numel() == 1 else x[0, 0].item())["host_waits"] == 1
