"""Two epochs of DDP training with an evaluation after each, without gradients; perhaps with a fault in the second."""

import torch
import torch.distributed as dist
from common import Body, finite, run
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.dropout = nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.norm(self.dropout(self.body(x))))


def main(fault):
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    for epoch in range(2):
        model.train()
        for _ in range(3):
            loss = model(torch.rand(4, 8)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        x = torch.rand(4, 8)
        if fault == "eval" and epoch == 1 and dist.get_rank() == 1:
            x.fill_(3e38)  # batch 7: four of each epoch
        with torch.inference_mode():
            metric = model(x).mean()
        dist.barrier()
        assert finite(metric) == (fault == "none" or epoch == 0 or dist.get_rank() == 0)
    assert all(finite(parameter) for parameter in model.parameters())


run(main, fault="none")
