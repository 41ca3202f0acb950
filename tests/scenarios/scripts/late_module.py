"""A module is added to the model in the middle of the training, and overflows later, on one rank."""

import torch
import torch.distributed as dist
from common import average_gradients, diagonal, finite, run
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = diagonal(8, 1.0)
        self.adapters = nn.ModuleDict()
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        x = self.body(x)
        for adapter in self.adapters.values():
            x = adapter(x)
        return self.head(x)


def main():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for batch in range(6):
        if batch == 2:
            model.adapters["late"] = diagonal(8, 3.0)
            optimizer.add_param_group({"params": list(model.adapters.parameters())})
        x = torch.rand(4, 8)
        if batch == 4 and dist.get_rank() == 1:
            x.fill_(2e38)
        loss = model(x).mean()
        assert finite(loss) == (batch < 4 or (batch == 4 and dist.get_rank() == 0))
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()


run(main)
