"""DDP. Something makes a weight inf on one rank after the backward and before the optimizer's step.

--optimizer names one of torch.optim, or `own`: an optimizer that nobody knows the rule of. --foreach 1: torch's own
implementation for many tensors at once.
"""

import torch
import torch.distributed as dist
from common import Net, finite, run
from torch import nn


class Own(torch.optim.Optimizer):
    """The sign of the gradient, times the learning rate."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


def main(optimizer, foreach):
    net = Net()
    model = nn.parallel.DistributedDataParallel(net)
    if optimizer == "own":
        stepping = Own(model.parameters(), lr=1e-4)
    else:
        more = {} if foreach < 0 else {"foreach": bool(foreach)}
        stepping = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-4, **more)
    for batch in range(4):
        loss = model(torch.rand(4, 8) + 1).mean()
        stepping.zero_grad()
        loss.backward()
        if batch == 2 and dist.get_rank() == 1:
            net.body.up.weight.data[3, 3] = float("inf")
        stepping.step()
        assert batch > 2 or finite(net.body.up.weight) == (batch < 2 or dist.get_rank() == 0)


run(main, optimizer="SGD", foreach=-1)
