"""Ctrl-C at each place of ours in a forward: the next calls are a batch of their own, with all its frames."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from gpuwatch.tests.interruptions import all_of, interrupt
from gpuwatch.worker.hooks.call_frames import CallFrames
from gpuwatch.worker.hooks.global_hooks import GlobalHooks, RunningCalls
from gpuwatch.worker.hooks.module_calls import ModuleCalls
from gpuwatch.worker.hooks.returned_calls import ReturnedCalls
from torch import distributed as dist
from torch import nn

from ..models import Block

CODES = all_of(ModuleCalls, ReturnedCalls, CallFrames, GlobalHooks, RunningCalls)
X = torch.ones(3, 4)


def ctrl_c():
    raise KeyboardInterrupt


def titles(page):
    return [(frame.module, frame.parent, frame.depth) for frame in page.frames]


MODELS = {"one module": (lambda: nn.Linear(4, 4), 1), "a tree": (lambda: nn.Sequential(Block(), nn.Linear(4, 4)), 7)}
"""A model, and every how many of the places are tried."""


@pytest.mark.quick(1)
@pytest.mark.parametrize(("make", "every"), MODELS.values(), ids=MODELS)
def test_the_next_batch_is_whole_wherever_it_came(watch, make, every):
    watched = watch()
    model = make()
    model(X)
    alone = titles(watched.last)
    wrong, at = [], 0
    while True:
        try:
            where = interrupt(CODES, partial(model, X), ctrl_c, at)
        except KeyboardInterrupt:
            where = "raised"
        if not where:
            break
        for _ in range(2):
            model(X)
            if titles(watched.last) != alone or watched.hooks._running.stack:
                wrong.append((at, titles(watched.last), len(watched.hooks._running.stack)))
        at += every
    assert at > 20
    assert wrong == []
    assert watched.faults == watched.anomalies == []


class Again(nn.Module):
    """Calls itself, with operations of its own before and after."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x, depth=2):
        x = x * self.weight
        if depth:
            x = self(x, depth - 1)
        return x + 1


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.again = Again()

    def forward(self, x):
        self.made = self.again(x)
        self.calls = list(self.running.nodes.calls)
        return self.made


def test_each_call_of_a_module_that_calls_itself_has_its_own_nodes(watch):
    watched = watch()
    model = Around()
    model.running = watched.hooks._running
    for _ in range(2):
        model(X)
    nodes = [model.made.grad_fn]
    while nodes[-1].next_functions and nodes[-1].next_functions[0][0] is not None:
        nodes.append(nodes[-1].next_functions[0][0])
    numbers = [node._sequence_nr() for node in nodes if type(node).__name__ in ("AddBackward0", "MulBackward0")]
    first, last = min(numbers), max(numbers)
    # mul 0, mul 1, mul 2, add 2, add 1, add 0
    assert [(begins - first, end - first) for _, begins, end in model.calls] == [(2, 4), (1, 5), (0, 6)]
    assert last - first == 5


def test_each_call_of_a_module_that_calls_itself_has_its_own_collectives(watch, alone_in_a_group):
    class Communicates(Again):
        def forward(self, x, depth=2):
            dist.all_reduce(torch.ones(1))
            return super().forward(x, depth)

    watched = watch()
    model = Around()
    model.running = watched.hooks._running
    model.again = Communicates()
    model(X)
    assert [frame.collectives for frame in watched.last.frames if frame.module == "again"] == [1, 2, 3]
