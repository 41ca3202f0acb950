"""Two or more ranks that train, until one of them does what --how says in batch 3."""

import argparse
import datetime
import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn


class Loops(torch.autograd.Function):
    """Its backward never ends."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        while True:
            time.sleep(0.01)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.widen = nn.Linear(8, 16)
        self.loops = False
        self.loops_back = False

    def forward(self, x):
        while self.loops:
            time.sleep(0.01)
        y = self.widen(x)
        return Loops.apply(y) if self.loops_back else y


def load_batch(stuck):
    while stuck:
        time.sleep(0.01)
    return torch.randn(4, 8)


def save_checkpoint():
    time.sleep(10_000)


class Slow:
    """Takes long to be saved."""

    def __reduce__(self):
        time.sleep(30)
        return (Slow, ())


def compiles(graph, inputs):
    """A backend of torch.compile that takes long."""
    time.sleep(30)
    return graph


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", required=True)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--timeout", type=int, default=1800)
    parser.add_argument("--only-first", action="store_true", help="in the attempts after the first one nothing happens")
    options = parser.parse_args()
    if options.only_first and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        options.how = "nothing"
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=options.timeout))
    me = dist.get_rank() == options.rank
    groups = [dist.new_group() for _ in range(2)] if options.how == "swaps" else []
    net = nn.Sequential(Block(), nn.Linear(16, 1))
    ddp = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    if me and options.how == "first":
        time.sleep(18)
    for batch in range(options.batches):
        now = me and batch == 3
        if now and options.how == "compiles":
            torch.compile(lambda x: x + 1, backend=compiles)(torch.ones(2))
        if options.how == "saves" and batch == 3:
            if me:
                torch.save({"model": net.state_dict(), "more": Slow()}, os.devnull)
            dist.barrier()
        if options.how == "paused" and batch == 3 and me:
            print("in the middle", flush=True)
        if options.how == "paused":
            time.sleep(0.3)
        x = load_batch(now and options.how == "data")
        net[0].loops = now and options.how == "forward"
        net[0].loops_back = now and options.how == "backward"
        if now and options.how == "evaluates":
            until = time.monotonic() + 30
            while time.monotonic() < until:
                net(torch.randn(4, 8))
                time.sleep(0.02)
        if options.how == "computes" and batch == 3:
            until = time.monotonic() + 30
            while time.monotonic() < until:
                sum(range(1000))
        if now and options.how == "sleeps":
            time.sleep(40)
        if now and options.how == "child":
            subprocess.run(["sleep", "30"], check=True)
        if now and options.how == "types":
            with subprocess.Popen(["sh", "-c", "sleep 30; echo yes"], stdout=subprocess.PIPE) as typist:
                assert os.read(typist.stdout.fileno(), 4) == b"yes\n"
        if options.how == "apart" and batch == 3:
            if me:
                save_checkpoint()
            dist.barrier()
        if options.how == "swaps" and batch == 5:
            for group in reversed(groups) if me else groups:
                dist.all_reduce(torch.ones(8), group=group)
        if options.how == "passes" and batch == 3 and not me:
            dist.barrier()
        if now and options.how == "checkpoint":
            save_checkpoint()
        if now and options.how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if now and options.how == "leaves":
            os._exit(0)
        loss = ddp(x).sum()
        if now and options.how == "between":
            os.kill(os.getpid(), signal.SIGSTOP)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not (now and options.how == "skips"):
            dist.all_reduce(loss.detach().clone())
        if now and options.how == "other":
            dist.broadcast(torch.zeros(3), src=0)
    print("done", flush=True)
    dist.barrier()
    # one that runs in this thread: a thread of gloo's that still holds the last operation while the interpreter ends
    # can abort the process (https://github.com/pytorch/pytorch/pull/179291)
    dist.monitored_barrier()
    dist.destroy_process_group()
    sys.exit(0)


if __name__ == "__main__":
    main()
