"""A signal's handler that raises in a second run: it reaches the script, and all is as it was before the run."""

from __future__ import annotations

import random
import signal
import sys
import threading
import traceback
import warnings
from types import SimpleNamespace

import pytest
import torch
from gpuwatch.core.guest.threads import SECOND_RUN, AwaitedThread
from gpuwatch.core.signal_errors import then_put_back
from gpuwatch.tests.interruptions import all_of, interrupt
from gpuwatch.tests.waiting import until
from gpuwatch.worker.explain import forward_thread
from gpuwatch.worker.explain.forward_thread import ForwardTarget, ForwardThread, kept_as_it_is
from gpuwatch.worker.explain.operation_watch import OperationWatch
from gpuwatch.worker.hooks.global_hooks import GlobalHooks
from torch import nn
from torch.nn.modules import module as torch_module

CODES = all_of(forward_thread._KeptState, kept_as_it_is, ForwardThread.run, AwaitedThread, GlobalHooks.without_ours)
CODES |= all_of(
    then_put_back, warnings.catch_warnings, OperationWatch.restore, torch.get_rng_state, torch.set_rng_state
)


class Told(Exception):
    """What a handler raises."""


def tell(number=1, frame=None):
    raise Told


class Draws(nn.Module):
    """Changes all that a second run puts back."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))
        self.last = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        self.last = x
        self.more = torch.rand(1) + random.random()
        return x + self.more


def state(module: nn.Module) -> tuple[object, ...]:
    hooks = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks, module._forward_hooks
    numbers = torch.get_rng_state().tolist(), random.getstate(), warnings.filters[:]
    return int(module.calls), sorted(vars(module)), module.last, *numbers, *map(list, hooks)


@pytest.fixture
def second_run(watch):
    """(the module, what runs it a second time)"""
    hooks, module, x = watch().hooks._global, Draws(), torch.ones(3)
    target = ForwardTarget(module, SimpleNamespace(role="output", role_kind="output", flags=1, shape=None))

    def run() -> None:
        operations = OperationWatch("", {}, None)
        forward = ForwardThread(module, "forward", target, (x,), {}, operations)
        hooks.without_ours(lambda: kept_as_it_is(module, operations, None, lambda: forward.run(60, [torch.no_grad])))

    return module, run


def test_wherever_it_comes_all_is_put_back_and_the_thread_has_ended(second_run):
    module, run = second_run
    before, threads, seen = state(module), threading.active_count(), 0
    for at in range(1000):
        try:
            where = interrupt(CODES, run, tell, at)
        except Told as error:
            trace = [f"{each.name}:{each.lineno}" for each in traceback.extract_tb(error.__traceback__)]
            seen += 1
            where = "raised"
        left = [index for index, (then, now) in enumerate(zip(before, state(module), strict=True)) if then != now]
        assert not left, (at, left, trace)
        if not where:
            break
    assert seen > 50
    run()
    for thread in threading.enumerate():
        if thread.name == SECOND_RUN:
            thread.join()
    assert threading.active_count() == threads


def test_the_thread_that_it_interrupts_has_ended_when_it_is_raised(second_run):
    """Thread.join takes a thread that runs for one that has ended, where a handler raises in it (Python 3.11)."""
    module, run = second_run
    waits = all_of(AwaitedThread.ends_within)
    main, ended, raised = threading.main_thread().ident, [], threading.Event()

    def forward(x: torch.Tensor) -> torch.Tensor:
        try:
            until(lambda: sys._current_frames()[main].f_code in waits, "the main thread waits", look_s=0)
            signal.pthread_kill(main, signal.SIGUSR1)
            while True:
                x = x + 1  # until the run is told to stop
        finally:
            ended.append(not raised.wait(0.5))  # the script's own code, which takes a while

    module.forward = forward
    before = signal.signal(signal.SIGUSR1, tell)
    try:
        with pytest.raises(Told):
            run()
        assert ended
    finally:
        raised.set()
        signal.signal(signal.SIGUSR1, before)
