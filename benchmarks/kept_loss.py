"""What it costs the host to keep what the graph of a loss has saved, as gpuwatch does with a loss on a device.

    python benchmarks/kept_loss.py [--rounds N]

For each loss: the nodes of its own graph, the time of the thread's processor for keeping it, and the same time as a
part of that loss's forward and backward without a model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import weakref
from collections.abc import Callable

import torch
from gpuwatch.worker.explain.kept_loss import kept_loss
from gpuwatch.worker.record.autograd_graph import ReturnedOutputs, next_node
from torch import Tensor, nn
from torch.nn import functional
from turns import in_turns

_AT_A_TIME = 50
Y, T = torch.randint(0, 10, (32,)), torch.rand(32, 10)


def vae(out: Tensor) -> Tensor:
    """That of a variational autoencoder."""
    mean, log_variance = out.chunk(2, 1)
    divergence = -0.5 * torch.mean(1 + log_variance - mean.pow(2) - log_variance.exp())
    return functional.mse_loss(out, T) + divergence


def many_terms(out: Tensor) -> Tensor:
    """Ten terms, a term a column."""
    return torch.stack([(out[:, at].exp() / T[:, at]).mean() for at in range(10)]).sum()


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "cross_entropy": lambda out: functional.cross_entropy(out, Y),
    "mse_loss": lambda out: functional.mse_loss(out, T),
    "of a VAE": vae,
    "of ten terms": many_terms,
}


class _LossTimes:
    """One loss of a Linear layer's output."""

    def __init__(self, loss_of: Callable[[Tensor], Tensor]) -> None:
        self._loss_of, self._model, self._x = loss_of, nn.Linear(64, 10), torch.randn(32, 64)
        self.nodes, self.keeping, self.plain = 0, list[float](), list[float]()

    def run(self) -> None:
        """Take both times once."""
        keeping = plain = 0.0
        for _ in range(_AT_A_TIME):
            first = next_node()
            out = self._model(self._x)
            returned = [ReturnedOutputs(first, next_node(), [(weakref.ref(out), 0)])]
            began = time.thread_time()
            loss = self._loss_of(out)
            made = time.thread_time()
            kept = kept_loss(loss, returned, False, sys._getframe())
            ended = time.thread_time()
            self.nodes = max(self.nodes, loss.grad_fn._sequence_nr() - returned[0].end + 1)  # type: ignore[union-attr,attr-defined]
            del kept
            before = time.thread_time()
            torch.autograd.backward(loss, inputs=[out])
            keeping, plain = keeping + ended - made, plain + made - began + time.thread_time() - before
        self.keeping.append(keeping / _AT_A_TIME)
        self.plain.append(plain / _AT_A_TIME)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="turns of each loss (20)")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    times = {name: _LossTimes(loss_of) for name, loss_of in LOSSES.items()}
    in_turns(list(times), rounds, lambda name: times[name].run())
    print("| loss | nodes | kept in | part of its forward and backward |\n|---|---|---|---|")
    for name, one in times.items():
        ratio = statistics.median(kept / plain for kept, plain in zip(one.keeping, one.plain, strict=True))
        print(f"| {name} | {one.nodes} | {1e6 * statistics.median(one.keeping):.0f} us | {ratio:.2f} |")


if __name__ == "__main__":
    main()
