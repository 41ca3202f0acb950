"""Pipeline parallel in four stages with four micro-batches: one forward, one backward (1F1B).

--fault forward: `up` of --stage overflows, and the later stages are handed the inf. --fault backward: in --stage the
gradient of `length` at zero is nan, and the earlier stages are handed that. The first and the last stage have one
neighbour, the others two: they send and receive twice as much.
"""

import torch
import torch.distributed as dist
from common import Length, diagonal, finite, run
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

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


def main(fault, stage):
    rank = dist.get_rank()
    guilty = rank == stage
    model = Stage(guilty and fault == "forward", guilty and fault == "backward")
    given, returned = (torch.rand(2, 8, requires_grad=wants) for wants in (rank > 0, True))
    pipe = PipelineStage(model, rank, STAGES, torch.device("cpu"), input_args=given, output_args=returned)
    schedule = Schedule1F1B(pipe, n_microbatches=MICRO_BATCHES, loss_fn=lambda found, wanted: (found - wanted).mean())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for step in range(4):
        x = torch.rand(2 * MICRO_BATCHES, 8)
        if step == 2:
            x[2:4] = 3e38 if fault == "forward" else 0  # the second micro-batch
        optimizer.zero_grad()
        if rank == STAGES - 1:
            schedule.step(target=torch.zeros(2 * MICRO_BATCHES, 8), losses=[])
        else:
            schedule.step(*([x] if rank == 0 else []))
        good = all(finite(parameter.grad) for parameter in model.parameters())
        assert step != 2 or fault == "forward" or good == (rank > stage)
        optimizer.step()


run(main, fault="forward", stage=1)
