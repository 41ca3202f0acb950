"""torch's pipeline, a stage on each rank. On one rank a weight of its stage becomes too large.

`--how` is the schedule's name.
"""

import gc

import torch
import torch.distributed as dist
from model import BACKENDS, Block, batches, device_of, parse, say
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

ARGS = parse()
device = device_of(ARGS)
dist.init_process_group(BACKENDS[ARGS.device])
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = Block().to(device)
stage = PipelineStage(model, rank, size, device)
Schedule = get_schedule_class(ARGS.how or "GPipe")
schedule = Schedule(stage, n_microbatches=2, loss_fn=lambda output, target: (output - target).square().mean())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for number, inputs in enumerate(batches(0, -1)):
    inputs = inputs.to(device)
    if (rank, number) == (ARGS.rank, 2):
        with torch.no_grad():
            model.widen.weight.fill_(3e38)  # finite; sums of it are not
    losses = []
    if rank == 0:
        schedule.step(inputs)
    elif rank == size - 1:
        schedule.step(target=torch.zeros_like(inputs), losses=losses)
    else:
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()
    weights = sum(parameter.detach().double().sum() for parameter in model.parameters())
    say(f"rank {rank} loss {[loss.item().hex() for loss in losses]} weights {weights.item().hex()}")
del model, stage, schedule, optimizer, losses  # as above a group that ends before what refers to it may abort
gc.collect()
dist.destroy_process_group()
