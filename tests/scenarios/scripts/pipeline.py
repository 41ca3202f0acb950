"""Pipeline parallel in two stages with two micro-batches.

--fault forward: `up` of stage 0 overflows, and stage 1 is handed the inf. --fault backward: in stage 1 the gradient
of `length` at zero is nan, and stage 0 is handed that. --fault none: the stages are given no shapes; torch finds
them out by a forward and a backward over uninitialised memory, which is no fault.
"""

import torch
import torch.distributed as dist
from common import Length, diagonal, finite, run
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = diagonal(8, 1.0)
        self.up = diagonal(8, 2.0)

    def forward(self, x):
        return self.up(self.enter(x))


class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = diagonal(8, 1.0)
        self.length = Length()
        self.head = nn.Linear(1, 1)

    def forward(self, x):
        return self.head(self.length(self.embed(x)))


def main(fault):
    rank = dist.get_rank()
    model = Second() if rank else First()
    known = {}
    if fault == "none":
        torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with nan
    else:
        known["input_args"] = torch.rand(2, 8, requires_grad=rank > 0)
        known["output_args"] = torch.rand(2, 1 if rank else 8, requires_grad=True)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"), **known)
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda found, wanted: (found - wanted).mean())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for step in range(4):
        x = torch.rand(4, 8)
        if step == 2 and fault != "none":
            if fault == "forward":
                x[3] = 3e38  # in the second micro-batch: the sixth forward, batch 5
            else:
                x[1] = 0  # in the first one, batch 4, whose backward runs when both forwards are done
        losses = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=torch.zeros(4, 1), losses=losses)
            assert all(map(finite, losses)) == (step < 2 or fault == "none" or (step == 2 and fault == "backward"))
        good = all(finite(parameter.grad) for parameter in model.parameters())
        assert step > 2 or good == (step < 2 or fault == "none")
        optimizer.step()


run(main, fault="forward")
