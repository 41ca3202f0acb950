"""What gpuwatch sees of `torch.compile(mode="reduce-overhead")`: torch's trees of CUDA graphs, replayed.

Inductor's code calls torch's operations here, where it would launch Triton kernels on a GPU.
"""

from __future__ import annotations

from contextlib import nullcontext

import gpuwatch
import pytest
import torch
from gpuwatch.core.events.own_limits import NotLookedInto, OwnFault
from torch import nn

STEPS, REPLAYED, BAD = 11, 2, 10
"""The first two steps warm up and capture."""

pytestmark = [
    pytest.mark.skipif(
        not hasattr(torch._inductor.config, "fallback_by_default"), reason="this Inductor has Triton kernels alone"
    ),
    pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),  # of which torch takes the pool
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def whole(net):
    return torch.compile(net, mode="reduce-overhead")


def blocks(net):
    for block in net[:2]:
        block.compile(mode="reduce-overhead")
    return net


def eager(net):
    return net


def train(compiled, counted, is_watched):
    """(losses and weights before the overflow, what a replayed step asks of the device, the watch)"""
    torch.compiler.reset()
    torch.manual_seed(0)
    net = nn.Sequential(Block(), Block(), nn.Linear(8, 1)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    losses, weights, asked = [], [], []

    def step():
        torch.compiler.cudagraph_mark_step_begin()
        losses.append(call(x).pow(2).mean())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()

    with gpuwatch.watch(net, on_overflow="continue") if is_watched else nullcontext() as watch:
        call = compiled(net)
        for number in range(STEPS):
            x = torch.rand(4, 8).cuda()
            if number == BAD:
                weights = [weight.detach().cpu() for weight in net.parameters()]
                with torch.no_grad():
                    net[1].up.weight.fill_(2e38)
            asked.append(counted(step))
            losses[-1] = losses[-1].detach().cpu()
        torch.cuda.synchronize()
        if is_watched:  # its numbers are read
            call(x)
            torch.cuda.synchronize()
    return [*losses[:BAD], *weights], asked[BAD - 1], watch


def gradients(watch, batch):
    (page,) = [page for page in watch.pages() if page.batch == batch]
    backward = [frame for frame in page.frames if frame.phase == "backward"]
    return {(frame.module, row.role): row.abs_max for frame in backward for row in frame.rows}


@pytest.mark.parametrize("compiled", [whole, blocks])
def test_a_training_in_trees_of_graphs_is_seen_and_has_the_same_bits(counted, compiled):
    expected, own, _ = train(compiled, counted, is_watched=False)
    found, asked, watch = train(compiled, counted, is_watched=True)
    _, _, in_eager = train(eager, counted, is_watched=True)

    assert own["graph_launches"] >= 2
    for name in ("graph_launches", "operations", "host_waits", "pageable_copies", "device_allocations"):
        assert asked.get(name, 0) == own.get(name, 0), name
    assert len(found) == BAD + 10
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    first = watch.anomalies[0]
    assert (first.module, first.value, first.phase, first.where.batch) == ("1.up", "+inf", "forward", BAD)
    assert [event for event in watch.events if isinstance(event, OwnFault | NotLookedInto)] == []
    for batch in range(REPLAYED, BAD):
        assert gradients(watch, batch) == pytest.approx(gradients(in_eager, batch))
        assert min(gradients(watch, batch).values()) > 0
