"""Two to eight ranks that meet in collectives, until one of them, --rank, does what --how says in batch --batch."""

import argparse
import atexit
import datetime
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.loops = False

    def forward(self, x):
        while self.loops:
            time.sleep(0.01)
        return self.fc(x)


class Endless(torch.utils.data.Dataset):
    def __init__(self, stuck_from):
        self.stuck_from = stuck_from
        self.rank_pid = os.getpid()

    def __len__(self):
        return 64

    def __getitem__(self, index):
        while index >= self.stuck_from and os.getppid() == self.rank_pid:  # a worker does not outlive its rank
            time.sleep(0.01)
        return torch.ones(8)


class LoopingSGD(torch.optim.SGD):
    loops = False

    def step(self, closure=None):
        while self.loops:
            time.sleep(0.01)
        return super().step(closure)


def share(how, me, others):
    """What all ranks do in the batch, and the odd one does otherwise."""
    loss = torch.ones(8)
    if how == "operation":
        dist.broadcast(loss, src=0) if me else dist.all_reduce(loss)
    elif how == "size":
        dist.all_reduce(torch.ones(5) if me else loss)
    elif how == "dtype":
        dist.all_reduce(torch.ones(8, dtype=torch.float64) if me else loss)
    elif how == "order":
        for group in reversed(others) if me else others:
            dist.all_reduce(loss, group=group)
    elif how == "skip":
        if not me:
            dist.all_reduce(loss)
        dist.broadcast(torch.ones(3), src=0)
    elif how == "barrier":
        if me:
            time.sleep(10_000)
        dist.barrier()
    elif how == "monitored":
        if me:
            time.sleep(10_000)
        dist.monitored_barrier()
    else:
        dist.all_reduce(loss)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", required=True)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--batch", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=1800)
    parser.add_argument("--ddp", action="store_true")
    options = parser.parse_args()
    how = options.how
    timeout = datetime.timedelta(seconds=options.timeout)
    dist.init_process_group("gloo", timeout=timeout)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    others = [dist.new_group(list(range(world)), timeout=timeout) for _ in range(2)]
    halves = range(world // 2), range(world // 2, world)
    half = [dist.new_group(list(ranks), timeout=timeout) for ranks in halves]
    mine = half[rank >= world // 2]
    net = Net()
    model = nn.parallel.DistributedDataParallel(net) if options.ddp else net
    optimizer = LoopingSGD(net.parameters(), lr=0.01)
    loader = iter(
        torch.utils.data.DataLoader(
            Endless(2 * options.batch if how == "loader" and rank == options.rank else 64), batch_size=2, num_workers=1
        )
        if how == "loader"
        else [torch.ones(2, 8)] * (options.batch + 4)
    )
    for batch in range(options.batch + 3):
        now = batch == options.batch
        me = now and rank == options.rank
        net.loops = me and how == "forward"
        optimizer.loops = me and how == "optimizer"
        x = next(loader)
        if me and how == "exit":
            sys.exit(0)
        if me and how == "_exit":
            os._exit(0)
        if me and how == "raises":
            threading.Thread(target=time.sleep, args=(10_000,)).start()
            raise ValueError("boom")
        if me and how == "leaves slowly":
            atexit.register(lambda: time.sleep(10_000))
            sys.exit(0)
        if me and how == "checkpoint":
            time.sleep(10_000)
        if me and how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if now and how == "subgroup":
            if me:
                time.sleep(10_000)
            dist.all_reduce(torch.ones(4), group=mine)
        if me and how == "send":
            dist.send(torch.ones(4), dst=(rank + 1) % world)
        model(x).sum().backward()
        optimizer.step()
        share(how if now else "", me, others)
        if how == "slow" and now:
            time.sleep(25 if rank == options.rank else 0)
    print("done", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    if how == "does not end" and rank == options.rank:
        threading.Thread(target=time.sleep, args=(40,)).start()


if __name__ == "__main__":
    main()
