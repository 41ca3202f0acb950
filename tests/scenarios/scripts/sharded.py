"""Sharded training, whose bad value comes from rank 1 or from a reduction on the way.

zero      ZeRO-1: rank 1's part of the optimizer has an absurd learning rate, and hands its weights to all
hook      DDP's hook on rank 1 divides its bucket by a number of tokens, which is 0 once
fp16      FSDP2 computes in float16, in which `blocks.0` overflows on rank 1
reduced   FSDP2 computes in bfloat16 and reduces in float16: rank 1's gradient is above 65504
"""

import torch
import torch.distributed as dist
from common import Body, diagonal, finite, run
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(8, 1, bias=False)

    def forward(self, x):
        return self.head(self.body(x))


def zero(rank):
    net = Net()
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1e-4)
    for batch in range(4):
        if batch == 2 and rank == 1:
            for group in optimizer.param_groups:
                group["lr"] = 3e38
        loss = model(torch.rand(4, 8) + 1).sum()
        optimizer.zero_grad()
        loss.backward()
        assert batch > 2 or all(finite(parameter.grad) for parameter in model.parameters())
        optimizer.step()
        assert batch > 2 or all(finite(parameter) for parameter in model.parameters()) == (batch < 2)


def hook(rank):
    now = {"batch": 0}

    def by_tokens(state, bucket):
        mine = bucket.buffer() / (0.0 if now["batch"] == 2 and rank == 1 else 4.0)
        dist.all_reduce(mine)
        future = torch.futures.Future()
        future.set_result(mine)
        return future

    model = nn.parallel.DistributedDataParallel(Net())
    model.register_comm_hook(None, by_tokens)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for batch in range(4):
        now["batch"] = batch
        loss = model(torch.rand(4, 8) + 1).sum()
        optimizer.zero_grad()
        loss.backward()
        assert batch > 2 or finite(model.module.head.weight.grad) == (batch < 2)
        optimizer.step()


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Body(), diagonal(8, 1.0)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def fsdp(rank, fault):
    half = torch.float16 if fault == "fp16" else torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float16)
    model = Blocks()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for batch in range(4):
        x = torch.ones(4, 8)
        if batch == 2 and rank == 1:
            x[1] = 5e4 if fault == "fp16" else 3e5
        loss = model(x).float().sum()
        if fault == "reduced":
            assert batch > 2 or finite(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main(fault):
    rank = dist.get_rank()
    if fault in ("fp16", "reduced"):
        fsdp(rank, fault)
    else:
        {"zero": zero, "hook": hook}[fault](rank)


run(main, fault="zero")
