"""Ranks hand each other what their modules compute, in the middle of a model: rank 1's makes it, and all have it then.

--way experts: each rank has an expert, and all_to_all takes the tokens there and back, with their gradients.
--way context: a ring takes each rank's block of keys around, as in context parallel.
--way sequence: the parts of a product that is split over the ranks are summed with reduce_scatter, as in sequence
parallel, and gathered again.
--fault forward: `up` overflows on rank 1. --fault backward: there the gradient of `length` at zero is nan.
"""

import torch
import torch.distributed as dist
from common import Length, average_gradients, diagonal, finite, run
from torch import nn


class _Exchanged(torch.autograd.Function):
    """Each rank hands an equal share of its rows to each other one. Backward takes the gradients back."""

    @staticmethod
    def forward(ctx, x):
        found = torch.empty_like(x)
        dist.all_to_all_single(found, x.contiguous())
        return found

    @staticmethod
    def backward(ctx, grad):
        found = torch.empty_like(grad)
        dist.all_to_all_single(found, grad.contiguous())
        return found


class Expert(nn.Module):
    def __init__(self, grows):
        super().__init__()
        self.up = diagonal(8, 2.0 if grows else 1.0)
        self.length = Length()
        self.down = nn.Linear(1, 8, bias=False)

    def forward(self, x):
        return self.up(x) + self.down(self.length(x))


class Experts(nn.Module):
    def __init__(self, grows):
        super().__init__()
        self.enter = diagonal(8, 1.0)
        self.expert = Expert(grows)
        self.leave = diagonal(8, 1.0)

    def forward(self, x):
        return self.leave(_Exchanged.apply(self.expert(_Exchanged.apply(self.enter(x)))))


class Attend(nn.Module):
    def forward(self, query, key):
        return (query @ key.transpose(0, 1)).sum(-1, keepdim=True)


class Context(nn.Module):
    def __init__(self, grows):
        super().__init__()
        self.query = diagonal(8, 1.0)
        self.up = diagonal(8, 2.0 if grows else 1.0)
        self.attend = Attend()

    def forward(self, x):
        query, block = self.query(x / 3e38), self.up(x)
        total = self.attend(query, block)
        rank, size = dist.get_rank(), dist.get_world_size()
        block = block.detach()
        for _ in range(size - 1):
            found = torch.empty_like(block)
            sent = dist.isend(block, (rank + 1) % size)
            dist.recv(found, (rank - 1) % size)
            sent.wait()
            total, block = total + self.attend(query, found), found
        return total


class Sequence(nn.Module):
    def __init__(self, grows):
        super().__init__()
        self.enter = diagonal(8, 1.0)
        self.up = diagonal(8, 2.0 if grows else 1.0)
        self.leave = diagonal(8, 1.0)

    def forward(self, x):
        part = self.up(self.enter(x)).detach()
        mine = torch.empty(len(part) // dist.get_world_size(), 8)
        dist.reduce_scatter_tensor(mine, part)
        mine = self.leave(mine)
        whole = torch.empty_like(part)
        dist.all_gather_into_tensor(whole, mine.detach())
        return mine.sum() + whole.sum()


def main(way, fault):
    rank, size = dist.get_rank(), dist.get_world_size()
    guilty = rank == 1
    model = {"experts": Experts, "context": Context, "sequence": Sequence}[way](guilty and fault == "forward")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    for batch in range(4):
        x = torch.rand(2 * size, 8) + 1
        if batch == 2 and fault == "forward":
            x[2:4] = 3e38 if guilty or way == "experts" else 1.0  # with experts: rank 1's share of each
        if batch == 2 and fault == "backward":
            x[2:4] = 0.0 if rank == 0 else 1.0  # rank 0's, for rank 1's expert
        loss = model(x).sum()
        optimizer.zero_grad()
        loss.backward()
        if batch <= 2 and fault == "backward":
            bad = batch == 2 and rank == 0
            assert finite(loss)
            assert finite(model.enter.weight.grad) != bad
        average_gradients(model)
        optimizer.step()


run(main, way="experts", fault="forward")
