"""Pipeline parallel in four stages on two ranks: each has two, and runs them interleaved.

--fault forward: `up` of --stage overflows, and the later stages are handed the inf. --fault backward: in --stage the
gradient of `length` at zero is nan, and the earlier stages are handed that.
"""

import torch
import torch.distributed as dist
from common import Length, diagonal, finite, run
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

STAGES, MICRO_BATCHES = 4, 4


class Stage(nn.Module):
    def __init__(self, grows, has_length):
        super().__init__()
        self.enter = diagonal(8, 1.0)
        self.up = diagonal(8, 2.0 if grows else 1.0)
        self.length = Length() if has_length else None
        self.leave = nn.Linear(1, 8, bias=False) if has_length else diagonal(8, 1.0)

    def forward(self, x):
        x = self.up(self.enter(x))
        return self.leave(x if self.length is None else self.length(x))


class Zeroth(Stage):
    pass


class First(Stage):
    pass


class Second(Stage):
    pass


class Third(Stage):
    pass


def main(fault, stage):
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = range(rank, STAGES, size)
    models = {
        number: (Zeroth, First, Second, Third)[number](
            number == stage and fault == "forward", number == stage and fault == "backward"
        )
        for number in mine
    }
    pipes = []
    for number, model in models.items():
        given, returned = (torch.rand(2, 8, requires_grad=wants) for wants in (number > 0, True))
        pipes.append(PipelineStage(model, number, STAGES, torch.device("cpu"), input_args=given, output_args=returned))
    schedule = ScheduleInterleaved1F1B(pipes, MICRO_BATCHES, loss_fn=lambda found, wanted: (found - wanted).mean())
    optimizer = torch.optim.SGD([each for model in models.values() for each in model.parameters()], lr=1e-9)
    for step in range(4):
        x = torch.rand(2 * MICRO_BATCHES, 8)
        if step == 2:
            x[2:4] = 3e38 if fault == "forward" else 0  # the second micro-batch
        optimizer.zero_grad()
        if STAGES - 1 in models:
            schedule.step(*([x] if rank == 0 else []), target=torch.zeros(2 * MICRO_BATCHES, 8), losses=[])
        else:
            schedule.step(*([x] if rank == 0 else []))
        if fault == "backward" and step <= 2:
            for number, model in models.items():
                assert finite(model.enter.weight.grad) == (step < 2 or number > stage)
        optimizer.step()


run(main, fault="forward", stage=1)
