"""DDP in float16. A weight's gradient, 300 * 300 over two rows, is too large; the activations' gradients are not."""

import torch
import torch.distributed as dist
from common import diagonal, finite, run
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = diagonal(8, 0.01, torch.float16)
        self.head = diagonal(8, 1.0, torch.float16)

    def forward(self, x):
        return self.head(self.fc(x))


def main():
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for batch in range(4):
        x = torch.rand(2, 8).half()
        if batch == 2 and dist.get_rank() == 1:
            x.fill_(300)
        loss = model(x).float().sum() * 300
        assert finite(loss) == (batch <= 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main)
