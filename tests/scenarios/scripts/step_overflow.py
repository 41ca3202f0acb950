"""DDP. The learning rate of one parameter group is absurd in one step: the gradients are finite, the weight after
the step is not. On one rank (a schedule that went wrong there), or on all.
"""

import torch
import torch.distributed as dist
from common import Body, finite, run
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(8, 1, bias=False)

    def forward(self, x):
        return self.head(self.body(x))


def main(where):
    net = Net()
    model = nn.parallel.DistributedDataParallel(net)
    groups = [{"params": net.body.parameters()}, {"params": net.head.parameters(), "lr": 1e-4}]
    optimizer = torch.optim.SGD(groups, lr=1e-4)
    for batch in range(4):
        if batch == 2 and (where == "all" or dist.get_rank() == 1):
            optimizer.param_groups[1]["lr"] = 3e38
        loss = model(torch.rand(4, 8) + 1).sum()  # the head's gradient is 4 rows of at least 2
        optimizer.zero_grad()
        loss.backward()
        assert batch > 2 or all(finite(parameter.grad) for parameter in model.parameters())
        optimizer.step()
        assert batch > 2 or finite(net.head.weight) == (batch < 2 or (where == "one" and dist.get_rank() == 0))
        assert batch > 2 or finite(net.body.up.weight)


run(main, where="one")
