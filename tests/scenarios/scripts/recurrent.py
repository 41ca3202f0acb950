"""DDP around an LSTM. Both its input and its state are finite and huge, and inf - inf is nan inside of it."""

import torch
import torch.distributed as dist
from common import finite, run
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, 1)
        nn.init.constant_(self.lstm.weight_ih_l0, 2.0)
        nn.init.constant_(self.lstm.weight_hh_l0, -2.0)

    def forward(self, x, state):
        found, state = self.lstm(x, state)
        return self.head(found[:, -1]), state


def main():
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    state = (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
    for batch in range(4):
        x = torch.rand(2, 3, 4)
        if batch == 2 and dist.get_rank() == 1:
            x.fill_(3e38)
            state[0].fill_(3e38)
        found, state = model(x, state)
        assert finite(found) == (batch < 2 or (batch == 2 and dist.get_rank() == 0))
        state = (state[0].detach(), state[1].detach())
        optimizer.zero_grad()
        found.mean().backward()
        optimizer.step()


run(main)
