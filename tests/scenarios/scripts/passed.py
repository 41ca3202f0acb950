"""One rank's own code makes a bad value in batch 2, and passes it to others: no module has made it.

--way broadcast: rank 0's batch, to all. send: rank 0's, to rank 1. all_to_all: rank 1 hands rank 0's expert an inf and
its own none. partial: rank 1's part of a product that is split over the ranks. ring: rank 2's block goes around, as in
context parallel. sum: no rank's number is bad, their sum is.
"""

import torch
import torch.distributed as dist
from common import diagonal, run
from torch import nn

HUGE = 3e38


class Net(nn.Module):
    """What it is handed goes through `enter`, then to the other ranks, then through `leave`."""

    def __init__(self, exchange):
        super().__init__()
        self.enter = diagonal(8, 1.0)
        self.leave = diagonal(8, 1.0)
        self.exchange = exchange

    def forward(self, x):
        x = self.enter(x).detach()
        for part in self.exchange(x) if self.exchange else [x]:
            x = self.leave(part)
        return x


def main(way):
    rank, size = dist.get_rank(), dist.get_world_size()
    now = {"batch": 0}

    def grows(guilty):
        return 10.0 if now["batch"] == 2 and rank == guilty else 1.0

    def all_to_all(x):
        x = x.clone()
        x[: len(x) // size] *= grows(1)  # what goes to rank 0
        found = torch.empty_like(x)
        dist.all_to_all_single(found, x)
        return [found]

    def partial(x):
        part = x * grows(1) / size
        dist.all_reduce(part)
        return [part]

    def total(x):
        part = x * 0.8
        dist.all_reduce(part)
        return [part]

    def ring(x):
        block = x * grows(2)
        for _ in range(size - 1):
            found = torch.empty_like(block)
            sent = dist.isend(block, (rank + 1) % size)
            dist.recv(found, (rank - 1) % size)
            sent.wait()
            block = found
            yield block

    exchange = {"all_to_all": all_to_all, "partial": partial, "sum": total, "ring": ring}.get(way)
    model = Net(exchange)
    for batch in range(4):
        now["batch"] = batch
        x = torch.rand(4, 8) if batch != 2 or way in ("broadcast", "send") else torch.full((4, 8), HUGE)
        if way == "broadcast":
            if batch == 2 and rank == 0:
                x[1, 3] = float("nan")
            dist.broadcast(x, src=0)
        elif way == "send":
            if rank == 0:
                dist.send(x * HUGE * grows(0) * (1 if batch == 2 else 0), 1)
            else:
                dist.recv(x, 0)
        model(x)


run(main, way="broadcast")
