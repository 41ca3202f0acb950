"""Reinforcement learning: a policy under DDP, and a frozen reference that its probabilities are divided by.

reference   `up` of the reference overflows on rank 1: it has no gradient, and the policy's loss is bad of it
ratio       no module does: the script's exp of the difference is inf on rank 1, and its gradient too
policy      `body.up` of the policy overflows on rank 1 while it generates, under no_grad
"""

import torch
import torch.distributed as dist
from common import Body, finite, run
from torch import nn


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.body(x))


class Reference(Policy):
    pass


def main(fault):
    rank = dist.get_rank()
    reference = Reference().requires_grad_(False).eval()
    net = Policy()
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for batch in range(4):
        guilty = batch == 2 and rank == 1
        x = torch.rand(4, 8) + 1
        with torch.no_grad():
            action = net(torch.full((4, 8), 3e38) if guilty and fault == "policy" else x).argmax(-1, keepdim=True)
            frozen = reference(torch.full((4, 8), 3e38) if guilty and fault == "reference" else x)
        found = model(x).gather(-1, action)
        ratio = ((found - frozen.gather(-1, action)) * (1e4 if guilty and fault == "ratio" else 1.0) + 0.1).abs().exp()
        loss = (ratio * 0.5 + found.square()).mean()
        assert batch > 2 or fault == "policy" or finite(loss) != guilty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main, fault="reference")
