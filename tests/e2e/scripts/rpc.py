"""RPC: rank 0 trains a model that rank 1 holds, with DistributedOptimizer. `bad`: the last step makes a weight inf."""

import os
import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer

HELD = {}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.leave = nn.Linear(4, 4)

    def forward(self, x):
        return self.leave(self.enter(x).tanh())


def make():
    torch.manual_seed(0)
    HELD["net"] = Net()
    return {name: rpc.RRef(parameter) for name, parameter in HELD["net"].named_parameters()}


def call(x):
    return HELD["net"](x)


def weights():
    return {name: parameter.detach().clone() for name, parameter in HELD["net"].named_parameters()}


def train(bad):
    torch.manual_seed(1)
    head = nn.Linear(4, 4).requires_grad_(False)
    parameters = rpc.rpc_sync("worker1", make)
    optimizer = DistributedOptimizer(torch.optim.Adam, list(parameters.values()), lr=0.05)
    last = DistributedOptimizer(torch.optim.SGD, [parameters["leave.weight"]], lr=3e38)
    for batch in range(5):
        with dist_autograd.context() as context:
            y = rpc.rpc_sync("worker1", call, args=(torch.ones(2, 4),))
            loss = (head(y) - 8.0).square().sum()
            dist_autograd.backward(context, [loss])
            (last if bad and batch == 4 else optimizer).step(context)
        print("loss", loss.item().hex(), flush=True)
    for name, weight in rpc.rpc_sync("worker1", weights).items():
        print(name, weight.flatten().tolist(), flush=True)


rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
if rank == 0:
    train("bad" in sys.argv)
rpc.shutdown()
