"""DeepSpeed; `--how` is the stage of ZeRO. `--how 2,inf`: and its first step makes weights of inf."""

import gc

import deepspeed
import torch
from model import BACKENDS, Net, batches, device_of, parse, say

ARGS = parse()
STAGE, _, RATE = ARGS.how.partition(",")
device = device_of(ARGS)
deepspeed.init_distributed(BACKENDS[ARGS.device])
torch.manual_seed(0)
model = Net()
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=float(RATE or 1e-6)),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": int(STAGE)},
        "zero_allow_untested_optimizer": True,
    },
)
rank = torch.distributed.get_rank()
for inputs in batches(rank, ARGS.rank):
    loss = engine(inputs.to(device)).mean()
    engine.backward(loss)
    engine.step()
    say(f"rank {rank} loss {loss.item().hex()}")
del engine, model, loss
gc.collect()  # what still refers to the group may abort the process at its exit (torch 2.13 with gloo)
torch.distributed.destroy_process_group()
