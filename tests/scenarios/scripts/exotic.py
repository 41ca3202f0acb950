"""Tensors of every kind go through modules, all of them good: no alarm, and no error of gpuwatch's own."""

import warnings
from collections import namedtuple
from dataclasses import dataclass

import torch
from common import average_gradients, diagonal, finite, run
from torch import nn

Pair = namedtuple("Pair", "left right")


@dataclass
class Record:
    tensor: torch.Tensor
    text: str = "not a tensor"


class Sub(torch.Tensor):
    """A subclass with no code of its own."""


class Through(nn.Module):
    """Makes something new of anything, in a container."""

    def forward(self, thing, **more):
        return {"found": [Record(thing), Pair(thing, None), more], "kind": str(type(thing))}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8, sparse=True)
        self.body = diagonal(8, 1.0)
        self.through = Through()

    def forward(self, tokens, things):
        x = self.body(self.embedding(tokens))
        for thing in things:
            self.through(thing, also=thing)
        spectrum = torch.fft.fft(x)
        self.through(spectrum)
        return spectrum.abs().mean()


def things():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of these are prototypes
        nested = torch.nested.nested_tensor([torch.rand(2, 8), torch.rand(3, 8)], layout=torch.jagged)
        strided = torch.nested.nested_tensor([torch.rand(2, 8), torch.rand(3, 8)])
        rows = torch.eye(4).to_sparse_csr()
        quantized = torch.quantize_per_tensor(torch.rand(4), 0.1, 0, torch.qint8)
    return [
        torch.tensor([True, False]),
        torch.tensor([2**62, -(2**63)]),
        torch.tensor(3, dtype=torch.uint8),
        torch.tensor([1e300, -1e300], dtype=torch.float64),  # finite: inf only if somebody narrows it
        torch.tensor([1 + 2j, 3e200j], dtype=torch.complex128),
        torch.rand(4).to(torch.float8_e4m3fn),
        torch.rand(4).to(torch.float8_e5m2),
        torch.tensor([3e38], dtype=torch.bfloat16),
        torch.empty(0, 8),
        torch.tensor(1.0),
        torch.rand(8, 8).t()[::2, ::3],
        torch.rand(1, 8).expand(1000, 8),
        torch.eye(4).to_sparse(),
        rows,
        nested,
        strided,
        quantized,
        torch.empty(4, 8, device="meta"),
        torch.rand(4).as_subclass(Sub),
        nn.Parameter(torch.rand(4)),
        None,
        "text",
        {1: torch.rand(2), "nested": (torch.rand(1), [torch.rand(1)])},
    ]


def main():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(4):
        loss = model(torch.randint(0, 10, (4,)), things())
        assert finite(loss)
        optimizer.zero_grad()
        loss.backward()
        assert model.embedding.weight.grad.is_sparse
        average_gradients(model.body)
        optimizer.step()
    assert all(finite(parameter) for parameter in model.parameters())


run(main)
