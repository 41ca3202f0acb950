"""A nan is left in the gradient of one weight, on rank 1, as after a step that was left out; nobody calls zero_grad.

The backward of batch 0 adds finite numbers to it.
"""

import torch
import torch.distributed as dist
from common import Net, average_gradients, finite, run


def main():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if dist.get_rank() == 1:
        model.head.weight.grad[0, 0] = float("nan")
    for batch in range(3):
        loss = model(torch.rand(4, 8)).mean()
        assert batch > 0 or finite(loss)
        loss.backward()
        assert batch > 0 or finite(model.body.up.weight.grad)
        average_gradients(model)
        optimizer.step()


run(main)
