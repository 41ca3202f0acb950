"""DDP around attention whose softmax is a module and meets rows that are masked whole, as transformers' CpmAnt does.

--fault none: `masked_fill` takes the nan away again, in each batch. --fault kept: it does not from batch 2 on, on
rank 1. --fault behind: it does, and a weight behind the attention overflows on rank 1. --fault log: the scores are
made nan out of finite numbers, and the same `masked_fill` takes that away.
"""

import torch
import torch.distributed as dist
from common import diagonal, finite, run
from torch import nn


class Log(nn.Module):
    """The logarithm of what may be negative."""

    def forward(self, scores):
        return scores.log()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = diagonal(8, 1.0)
        self.log = Log()
        self.softmax = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(0.0)
        self.out = diagonal(8, 1.0)

    def forward(self, x, open_, kept, log):
        query = self.query(x)
        score = query @ query.transpose(1, 2)
        if log:
            score = score + torch.where(open_, 1.0, -1e3)
            score = torch.where(open_, self.log(score), 0.0)
        else:
            score = self.softmax(score.masked_fill(~open_, float("-inf")))
        if not kept:
            score = score.masked_fill(~open_, 0.0)
        return self.out(self.dropout(score) @ query)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = diagonal(8, 1.0)
        self.attend = Attention()
        self.up = diagonal(8, 1.0)
        self.head = nn.Linear(8, 1)

    def forward(self, x, open_, kept=False, log=False):
        x = self.enter(x)
        return self.head(self.up(x + self.attend(x, open_, kept, log)))


def main(fault):
    net = Net()
    model = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for batch in range(3):
        here = batch >= 2 and dist.get_rank() == 1
        open_ = torch.ones(3, 4, 4, dtype=torch.bool).tril()
        open_[1, :2] = False  # left padding
        if fault == "behind" and here:
            net.up.weight.data.fill_(3e38)
        loss = model(torch.rand(3, 4, 8) + 0.1, open_, fault == "kept" and here, fault == "log" and here).mean()
        assert finite(loss) == (fault in ("none", "log") or not here)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main, fault="none")
