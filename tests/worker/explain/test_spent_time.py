"""The time that a rank's look for an operation took."""

from __future__ import annotations

import time

import pytest
from gpuwatch.worker.explain.spent_time import SpentTime


def test_it_adds_up_what_ran_within_it_and_counts_what_is_running(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    spent = SpentTime()
    with spent:
        now[0] += 2
        assert spent.seconds == 2
    now[0] += 50
    with pytest.raises(ValueError), spent:
        now[0] += 3
        raise ValueError
    now[0] += 50
    assert spent.seconds == 5
