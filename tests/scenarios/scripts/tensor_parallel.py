"""Tensor parallel: `mlp.up` is split by columns, `mlp.down` by rows, which ends with an all-reduce of the parts.

--fault up: rank 1's shard of `up` is huge, its output is inf, and `down` carries that to rank 0.
--fault weight: rank 1's shard of `down` has a nan. --fault partial: it is huge; the part that overflows is inside
`down`, before its all-reduce, so that both ranks see the same inf leave it.
"""

import torch
import torch.distributed as dist
from common import finite, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)
        nn.init.constant_(self.up.weight, 0.5)
        nn.init.constant_(self.down.weight, 0.5)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.mlp = Mlp()
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.mlp(self.embed(x)))


def main(fault):
    model = Net()
    nn.init.constant_(model.embed.weight, 1.0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for batch in range(4):
        if batch == 2 and dist.get_rank() == 1:
            with torch.no_grad():
                shard = (model.mlp.up if fault == "up" else model.mlp.down).weight.to_local()
                shard.fill_(float("nan") if fault == "weight" else 1e38)
        torch.manual_seed(batch)  # tensor parallel ranks have the same batch
        loss = model(torch.rand(4, 8) + 1).mean()
        assert finite(loss) == (batch < 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main, fault="up")
