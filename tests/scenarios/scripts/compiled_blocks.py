"""The blocks of a model compiled one by one: they share one graph, and one of them has a fault.

--fault forward: `blocks.2.body.up` overflows. --fault backward: the gradient of `blocks.2.length` at zero is nan.
--around: DDP, or FSDP2 around each block.
"""

import warnings

import torch
import torch.distributed as dist
from common import Body, Length, finite, run
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.length = Length()
        self.head = nn.Linear(1, 1)

    def forward(self, x):
        return self.head(self.length(self.body(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, parts):
        return sum(block(part) for block, part in zip(self.blocks, parts, strict=True))


def main(fault, around):
    warnings.filterwarnings("ignore", category=FutureWarning)
    model = Net()
    for block in model.blocks:
        block.compile(fullgraph=True)
    if around == "fsdp":
        for part in (*model.blocks, model):
            fully_shard(part)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for batch in range(5):
        parts = torch.rand(4, 4, 8)
        if batch == 3 and dist.get_rank() == 1:
            parts[2, 1] = 3e38 if fault == "forward" else 0
        loss = model(list(parts)).mean()
        assert counters["stats"]["unique_graphs"] == 1, "a graph for each block"
        assert finite(loss) == (batch < 3 or (batch == 3 and (fault == "backward" or dist.get_rank() == 0)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main, fault="forward", around="ddp")
