"""DDP around an ordinary model, and one fault on rank 1 (on all ranks for `alike`) in batch 2.

--fault data: a weight is set to nan through `.data` after the last step, which raises no version. --fault buffer: a
buffer is nan, as one that nobody has initialised. --fault alike: the same overflow on all ranks. --fault wild: a
weight upstream is 1e30 times too large. --fault compiled: `body`, which is compiled, overflows within an uncompiled
forward. --fault hidden: a compiled function around it does. --fault exit: the process ends with code 0 in a forward.
--fault lazy: `body` overflows, and a batch earlier `leave` returns a mapping that raises when it is read. --compile 1:
the whole model is compiled.
"""

import os

import torch
import torch.distributed as dist
from common import Body, diagonal, finite, run
from torch import nn


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", torch.ones(8))

    def forward(self, x):
        return x * self.inv_freq


class Lazy(dict):
    def __getitem__(self, key):
        raise RuntimeError("not computed yet")

    def compute(self):
        return super().__getitem__("x")


class Leave(nn.Module):
    now = lazy = False

    def forward(self, x):
        if self.now:
            os._exit(0)
        return Lazy(x=x) if self.lazy else x


class Net(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.enter = diagonal(8, 1.0)
        self.rotary = Rotary()
        self.leave = Leave()
        self.body = Body()
        self.head = nn.Linear(8, 1)
        self.run = [self.body]  # in a list: it is no module of its own
        if fault in ("compiled", "hidden"):
            body = self.body
            self.run = [torch.compile(body if fault == "compiled" else lambda x: body(x))]

    def forward(self, x):
        left = self.leave(self.rotary(self.enter(x)))
        return self.head(self.run[0](left.compute() if isinstance(left, Lazy) else left))


def main(fault, compile):
    net = Net(fault)
    model = nn.parallel.DistributedDataParallel(torch.compile(net) if compile else net, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    for batch in range(4):
        x = torch.rand(4, 8) + 0.5
        here = batch == 2 and (dist.get_rank() == 1 or fault == "alike")
        net.leave.lazy = fault == "lazy" and batch == 1 and dist.get_rank() == 1
        if here and fault in ("alike", "compiled", "hidden", "lazy"):
            x[1] = 3e38
        if here and fault == "data":
            net.head.weight.data[0, 3] = float("nan")
        if here and fault == "buffer":
            net.rotary.inv_freq[2] = float("nan")
        if here and fault == "wild":
            net.enter.weight.data.mul_(1e38)
            net.body.up.weight.data.mul_(1e3)
        net.leave.now = here and fault == "exit"
        loss = model(x).mean()
        assert finite(loss) == (batch < 2 or (batch == 2 and not here))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main, fault="data", compile=0)
