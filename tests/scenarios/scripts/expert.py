"""An expert that each rank trains on its own: only rank 1's tokens reach it. Then what rank 1 hands it is too large.

Its weights are 0.25 on all ranks, and 0.26 on rank 1 after the step before: no bit flip, and not what overflows.
"""

import torch
import torch.distributed as dist
from common import average_gradients, diagonal, finite, run
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = diagonal(8, 1.0)
        self.expert = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 1)
        nn.init.constant_(self.expert.weight, 0.25)

    def forward(self, x, tokens):
        h = self.embed(x)
        return self.head(h * 0.0 + self.expert(h * tokens))


def main():
    model = Net()
    shared = [*model.embed.parameters(), *model.head.parameters()]
    optimizer = torch.optim.SGD([{"params": shared, "lr": 1e-9}, {"params": model.expert.parameters()}], lr=0.01)
    for batch in range(4):
        mine = dist.get_rank() == 1
        tokens = float(mine and batch > 0)
        x = torch.full((4, 8), 3e38 if mine and batch == 2 else 1.0)
        loss = model(x, tokens).mean()
        assert batch > 2 or finite(loss) == (not mine or batch < 2)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model.embed, model.head)
        optimizer.step()
        largest = float(model.expert.weight.detach().abs().max())
        assert batch != 1 or (0.25 < largest < 0.27 if mine else largest == 0.25)


run(main)
