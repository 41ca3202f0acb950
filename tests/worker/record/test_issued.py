"""The number of operations that were issued: C reads it, and Python counts when it has changed."""

from __future__ import annotations

import sys

import pytest
import torch
from gpuwatch.worker.record.collectives import count_issued, issued
from torch import distributed as dist


@pytest.mark.skipif(issued is count_issued, reason="gpuwatch was installed without a C compiler")
def test_it_is_read_without_python_until_something_is_issued(alone_in_a_group):
    called = []

    def read():
        called.clear()
        sys.setprofile(lambda frame, event, _: event == "call" and called.append(frame.f_code.co_name))
        try:
            return issued()
        finally:
            sys.setprofile(None)

    first = issued()
    assert (read(), called) == (first, [])
    dist.all_reduce(torch.ones(2))
    assert read() == first + 1 == count_issued()
    assert "count_issued" in called
    assert (read(), called) == (first + 1, [])
    dist.new_group([0])
    assert read() == count_issued()
