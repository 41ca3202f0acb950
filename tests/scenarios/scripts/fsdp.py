"""FSDP2: each block and the model are sharded with fully_shard; the input of one rank makes the fault.

--fault forward: `blocks.0.up` overflows. --fault backward: the gradient of `blocks.1.root` at 0 is inf. --fault
shard: one rank's part of a weight is nan. --fault step: one rank's step overflows. --fault
boundary: so it is, and `root` is the first module of `blocks.1`, so that the gradient goes straight to `blocks.0`.
"""

import torch
import torch.distributed as dist
from common import diagonal, finite, run
from torch import nn
from torch.distributed.fsdp import fully_shard


class Root(nn.Module):
    def forward(self, x):
        return x.sqrt()


class Block(nn.Module):
    def __init__(self, root_first):
        super().__init__()
        self.root_first = root_first
        self.up = diagonal(8, 2.0)
        self.root = Root()

    def forward(self, x):
        return self.up(self.root(x)) if self.root_first else self.root(self.up(x))


class Net(nn.Module):
    def __init__(self, root_first):
        super().__init__()
        self.embed = diagonal(8, 1.0)
        self.blocks = nn.ModuleList([Block(False), Block(root_first)])
        self.head = diagonal(8, 1.0)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main(fault):
    model = Net(root_first=fault == "boundary")
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for batch in range(4):
        x = torch.rand(4, 8) + 1
        if batch == 2 and dist.get_rank() == 1:
            x[1] = 3e38 if fault == "forward" else 0
            if fault == "shard":
                x[1] = 1.0
                model.head.weight.data.to_local()[0, 0] = float("nan")
            if fault == "step":
                optimizer.param_groups[0]["lr"] = 3e38
                x[1] = 1.0
        loss = model(x).mean() * (1000 if fault == "step" and batch == 2 else 1)
        assert fault == "step" or finite(loss) == (
            batch < 2 or (batch == 2 and fault != "shard" and (fault != "forward" or dist.get_rank() == 0))
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main, fault="forward")
