"""A small training job in which one rank goes wrong in a way that you choose, to see what gpuwatch says of it.

    gpuwatch launch --nproc-per-node 2 examples/faults.py --fault backward
    gpuwatch launch --nproc-per-node 2 --hang-timeout 15 examples/faults.py --fault loop

It knows nothing of gpuwatch: torchrun runs it as well. docs/verdicts has what gpuwatch says of each fault.
"""

import argparse
import gc
import os
import signal
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 64


class Activation(nn.Module):
    """ReLU times `scale` squared; with `root` the square root of positive elements."""

    scale = 1.0
    root = False

    def forward(self, x: Tensor) -> Tensor:
        if self.root:
            return torch.where(x > 0, x.sqrt(), 0.0)  # where x is negative: finite, and its derivative is not
        return x.relu() * self.scale * self.scale


class Block(nn.Module):
    """A residual block: (batch, WIDTH) -> (batch, WIDTH), float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = Activation()
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Model(nn.Module):
    """Three residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def weight(model: Model, x: Tensor) -> None:
    """A bit of a weight flips, or the script writes nonsense into it."""
    model.blocks[1].up.weight.data[3, 5] = float("inf")


def bad_input(model: Model, x: Tensor) -> None:
    """A sample of the data is bad."""
    x[0, 0] = float("nan")


def forward(model: Model, x: Tensor) -> None:
    """All inputs and weights are finite, and what a module makes of them is too large for float32."""
    model.blocks[1].act.scale = 1e20


def backward(model: Model, x: Tensor) -> None:
    """The forward is finite, and a derivative is not."""
    model.blocks[1].act.root = True


def raises(model: Model, x: Tensor) -> None:
    """The script raises."""
    raise ValueError("/data/00017.tar is empty")


def kill(model: Model, x: Tensor) -> None:
    """The process is killed, as the kernel does when the memory is used up."""
    os.kill(os.getpid(), signal.SIGKILL)


def loop(model: Model, x: Tensor) -> None:
    """The data loader waits for something that never comes."""
    while True:
        time.sleep(0.1)


def leave(model: Model, x: Tensor) -> None:
    """One rank believes that it is done."""
    os._exit(0)


FAULTS: dict[str, Callable[[Model, Tensor], None]] = {
    "weight": weight,
    "input": bad_input,
    "forward": forward,
    "backward": backward,
    "raise": raises,
    "kill": kill,
    "loop": loop,
    "leave": leave,
}


def train(args: argparse.Namespace) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    model = Model().to(device)
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(dist.get_rank())
    for batch in range(args.batches):
        x = torch.randn(32, WIDTH, generator=data)
        if args.fault and batch == args.batch and dist.get_rank() == args.rank:
            FAULTS[args.fault](model, x)
        loss = replica(x.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if batch % 10 == 0 and dist.get_rank() == 0:
            print(f"batch {batch}: loss {loss.item():.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=FAULTS, help="default: none, the job is healthy")
    parser.add_argument("--rank", type=int, default=1, help="the rank that goes wrong; default: 1")
    parser.add_argument("--batch", type=int, default=20, help="the batch in which it does; default: 20")
    parser.add_argument("--batches", type=int, default=40)
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(args)
    gc.collect()  # what still refers to the group may abort the process at its exit (torch 2.13 with gloo)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
