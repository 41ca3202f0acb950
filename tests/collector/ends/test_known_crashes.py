"""The steps for exceptions that many scripts meet: each is raised by torch itself where that is possible."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpuwatch.collector.ends.known_crashes import known_lines, known_steps, raised_at
from torch import nn


def twice() -> None:
    loss = torch.ones(2, requires_grad=True).exp().sum()
    loss.backward()
    loss.backward()


def in_place() -> None:
    x = torch.ones(2, requires_grad=True).exp()
    y = x.exp()
    y.add_(1)
    y.sum().backward()


def no_group() -> None:
    dist.all_reduce(torch.ones(2))


def unused() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.aux = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return self.body(x), self.aux(x)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = nn.parallel.DistributedDataParallel(Net())
        for _ in range(2):
            net(torch.ones(1, 2))[0].sum().backward()
    finally:
        dist.destroy_process_group()


def port_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        dist.TCPStore("localhost", taken.getsockname()[1], 1, is_master=True)


@pytest.mark.parametrize(
    ("make", "step"),
    [
        (twice, "detach() what is kept between batches"),
        (in_place, "set_detect_anomaly(True) shows its line"),
        (no_group, "Call torch.distributed.init_process_group() before it"),
        (unused, "find_unused_parameters=True"),
        (port_taken, "leave MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_what_torch_raises_has_a_step(make: Callable[[], None], step: str):
    with pytest.raises((RuntimeError, ValueError)) as raised:
        make()
    (said,) = known_steps(str(raised.value))
    assert step in said


def test_a_line_of_nccl_says_what_it_means():
    message = "NCCL error ... Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 2000"
    assert known_steps(message) == [
        "Start no more ranks on a node than it has GPUs, and let each rank use cuda:LOCAL_RANK."
    ]
    assert known_lines(message) == [
        "that message means: ranks 1 and 0 of the group use one and the same GPU (PCI bus 2000)"
    ]


@pytest.mark.parametrize("message", ["", "expected 3 labels, found 4", "'loss'", "No such file or directory"])
def test_of_others_nothing_is_said(message: str):
    assert known_steps(message) == known_lines(message) == []


@pytest.mark.parametrize(
    ("calls", "place"),
    [
        ([("/home/me/train.py", 44, "<module>"), ("/home/me/train.py", 12, "main")], " at train.py:12 in main"),
        (
            [("/home/me/train.py", 12, "main"), ("/venv/lib/python3.11/site-packages/torch/nn/functional.py", 9, "f")],
            " at train.py:12 in main",
        ),
        ([("/venv/lib/python3.11/site-packages/lightning/trainer.py", 3, "fit")], ""),
        ([], ""),
    ],
)
def test_an_exception_has_the_innermost_line_of_the_script(calls, place):
    lines = [f'  File "{path}", line {line}, in {name}\n    work()' for path, line, name in calls]
    assert raised_at("\n".join(["Traceback (most recent call last):", *lines, "ValueError: no"])) == place
