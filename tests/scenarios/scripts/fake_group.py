"""Every rank adds up what all ranks' `body` returned. One more process group counts no collectives: backend `fake`.

torchtitan gives that backend to each dimension of its mesh that has one rank only. `body.up` of rank 1 overflows in
batch 2, and the sum hands the inf to every rank.
"""

import torch
import torch.distributed as dist
from common import Body, finite, run
from torch import nn
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # it registers the backend


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        total = self.body(x).detach()
        dist.all_reduce(total)
        return self.head(total)


def main():
    fake = dist.new_group(backend="fake")
    assert dist.get_backend(fake) == "fake"
    model = Net()
    for batch in range(4):
        x = torch.rand(4, 8)
        if batch == 2 and dist.get_rank() == 1:
            x[1, 3] = 3e38
        assert finite(model(x)) == (batch != 2)


run(main)
