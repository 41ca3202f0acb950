"""What a watched step asks of the device beside the step's own: exact counts, and no clock.

The host waits for nothing, nothing is copied from or to memory that the device cannot reach, and torch's own operations
are as many as without gpuwatch. A number here that falls is a gain: write the new one down.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gpuwatch
import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from gpu_lines.stub import CASES, WARM, gpt2, step_of  # the line `stub` compares a GPU with these

MOST_STEPS = 40
ALIKE = 3


def steps(net, counted):
    """What each of the last steps counts, once they count alike: until then kernels are compiled, and memory is taken.
    The host waits between them."""
    step = step_of(net)
    found = []
    while len(found) < MOST_STEPS and (len(found) <= WARM or any(one != found[-1] for one in found[-ALIKE:])):
        torch.cuda.synchronize()
        found.append(counted(step))
    torch.cuda.synchronize()
    return found[-ALIKE:]


@pytest.mark.parametrize("case", CASES)
def test_a_step_of_gpt2_launches_so_much_and_waits_for_nothing(counted, case):
    watched, launches = CASES[case]
    (plain,) = {tuple(sorted(step.items())) for step in steps(gpt2(2), counted)}
    own = dict(plain)
    net = gpt2(2)
    with gpuwatch.watch(net, watch=watched, on_overflow="continue") as watch:
        found = steps(net, counted)
    assert watch.anomalies == []
    for step in found:
        assert {name: step.get(name, 0) for name in ("operations", "host_waits", "pageable_copies")} == {
            name: own.get(name, 0) for name in ("operations", "host_waits", "pageable_copies")
        }
        assert step.get("host_allocations", 0) == step.get("device_allocations", 0) == 0
        assert step["launches"] == launches
