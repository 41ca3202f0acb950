"""A training whose learning rate is far too high: on all ranks alike, its weights run away within some steps."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.enter(x)).relu().square())


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(net.parameters(), lr=7.0)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(30):
        loss = nn.functional.mse_loss(net(torch.randn(8, 16)), torch.zeros(8, 4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
