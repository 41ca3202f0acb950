"""What a watched step asks of the device beside the step's own: exact counts, and no clock.

The host waits for nothing, nothing is copied from or to memory that the device cannot reach, and torch's own operations
are as many as without gpuwatch. A number here that falls is a gain: write the new one down.
"""

from __future__ import annotations

import gpuwatch
import pytest
import torch

transformers = pytest.importorskip("transformers")
STEPS = 8
WARM = 5
"""Steps until each kernel is compiled, and each parameter's row is known."""
CASES = {
    "forward": (("forward",), 35),
    "forward, weights": (("forward", "weights"), 38),
    "all": (("forward", "grads", "weights", "comms"), 93),
}
"""What is watched -> launches of a step of GPT-2 of two layers."""


def model(layers):
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=layers, use_cache=False, **sizes)).cuda()


def steps(net, counted):
    """What each step counts; the host waits between them."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    x = torch.arange(8, device="cuda")[None]

    def step():
        loss = net(input_ids=x, labels=x).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    found = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        found.append(counted(step))
    torch.cuda.synchronize()
    return found[WARM:]


@pytest.mark.parametrize("case", CASES)
def test_a_step_of_gpt2_launches_so_much_and_waits_for_nothing(counted, case):
    watched, launches = CASES[case]
    (plain,) = {tuple(sorted(step.items())) for step in steps(model(2), counted)}
    own = dict(plain)
    net = model(2)
    with gpuwatch.watch(net, watch=watched, on_overflow="continue") as watch:
        found = steps(net, counted)
    assert watch.anomalies == []
    for step in found:
        assert {name: step.get(name, 0) for name in ("operations", "host_waits", "pageable_copies")} == {
            name: own.get(name, 0) for name in ("operations", "host_waits", "pageable_copies")
        }
        assert step.get("host_allocations", 0) == step.get("device_allocations", 0) == 0
        assert step["launches"] == launches
