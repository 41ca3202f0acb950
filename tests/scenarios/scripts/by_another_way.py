"""A tensor goes from one module to another by an attribute, or a list: rank 1's `encoder` makes it inf in batch 2.

What `encoder` returns is finite, and so is what `taker` is handed. --gradients 0: without a backward.
"""

import torch
import torch.distributed as dist
from common import average_gradients, diagonal, finite, run
from torch import nn


class Encoder(nn.Module):
    def __init__(self, way, kept):
        super().__init__()
        self.fc = diagonal(8, 1.0)
        self.way, self.kept = way, kept
        self.factor = 1.0

    def forward(self, x):
        y = self.fc(x)
        left = y * self.factor
        if self.way == "attribute":
            self.left = left
        else:
            self.kept().append(left)
        return y


class Taker(nn.Module):
    def __init__(self, take):
        super().__init__()
        self.take = take

    def forward(self, x):
        return x + self.take()


class Net(nn.Module):
    def __init__(self, way):
        super().__init__()
        kept = []
        self.encoder = Encoder(way, lambda: kept)
        self.taker = Taker(kept.pop if way == "list" else lambda: self.encoder.left)
        self.head = diagonal(8, 1.0)

    def forward(self, x):
        return self.head(self.taker(self.encoder(x)))


def main(way, gradients):
    model = Net(way)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for batch in range(4):
        model.encoder.factor = 3e38 if batch >= 2 and dist.get_rank() == 1 else 1.0
        with torch.set_grad_enabled(gradients > 0):
            loss = model(torch.rand(4, 8) + 2).mean()
        assert batch > 2 or finite(loss) == (batch < 2 or dist.get_rank() == 0)
        optimizer.zero_grad()
        if gradients:
            loss.backward()
        average_gradients(model)
        optimizer.step()


run(main, way="attribute", gradients=1)
