"""torch.compile with fullgraph=True and DDP around it: one graph, no recompile, and a fault inside of it.

--fault forward: `body.up` overflows. --fault backward: the gradient of `length` at zero is nan.
"""

import torch
import torch.distributed as dist
from common import Body, Length, finite, run
from torch import nn
from torch._dynamo.utils import counters


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.length = Length()
        self.head = nn.Linear(1, 1)

    def forward(self, x):
        return self.head(self.length(self.body(x)))


def main(fault):
    model = nn.parallel.DistributedDataParallel(torch.compile(Net(), fullgraph=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for batch in range(5):
        x = torch.rand(4, 8)
        if batch == 3 and dist.get_rank() == 1:
            x[1] = 3e38 if fault == "forward" else 0
        loss = model(x).mean()
        assert counters["stats"]["unique_graphs"] == 1, "recompiled, or broken into several graphs"
        assert finite(loss) == (batch < 3 or (batch == 3 and (fault == "backward" or dist.get_rank() == 0)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main, fault="forward")
