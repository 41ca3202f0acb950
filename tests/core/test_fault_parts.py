"""Which errors of gpuwatch itself may have cost a frame: one table has every part that can fail."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gpuwatch.core.events.own_limits import FAULT_PARTS, costs_frames

ROOT = Path(__file__).resolve().parents[2]
TOLD = re.compile(r'(?:_fault|_failed|_asked|OwnFault)\((?:[^"\n]*, )?"([^"\n]+)"')


def test_every_part_that_fails_is_in_the_table():
    told = {
        part
        for room in ("worker", "launcher")
        for path in (ROOT / room).rglob("*.py")
        for part in TOLD.findall(path.read_text())
    }
    assert len(told) > 20
    assert told - FAULT_PARTS.keys() == set()


@pytest.mark.parametrize(("part", "costs"), [("forward hook", True), ("stacks", False), ("of another version", True)])
def test_what_costs_frames(part, costs):
    assert costs_frames(part) is costs
