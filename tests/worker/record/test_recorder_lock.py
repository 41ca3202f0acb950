"""Several threads run backward at the same time, as autograd does with one thread per device."""

from __future__ import annotations

import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from gpuwatch.tests.fakes.late_device import LateDevice
from gpuwatch.worker.hooks import native_writer
from gpuwatch.worker.record.passed import NOT_LOOKED, NotedOperation, PassedLook
from torch import nn

from ..conftest import use_late_device

THREADS, LAYERS, ROUNDS = 4, 6, 5


@pytest.fixture(params=["host", "late device"])
def driver(request, monkeypatch):
    driver = LateDevice(3, longest=20) if request.param == "late device" else None
    use_late_device(monkeypatch, driver)


@pytest.fixture(params=["native", "python", "both"])
def writer(request, monkeypatch):
    """`both`: the native writer gives up every other frame, as it does with what it cannot record."""
    if request.param == "python":
        monkeypatch.setattr(native_writer, "NativeFrameWriter", None)
    return request.param


@pytest.fixture
def impatient():
    """The interpreter changes the thread as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    yield
    sys.setswitchinterval(before)


class Parts(nn.Module):
    """A part for each thread."""

    def __init__(self, odd):
        super().__init__()
        self.parts = nn.ModuleList(
            nn.ModuleList(Scale(n * LAYERS + i, odd) for i in range(LAYERS)) for n in range(THREADS)
        )

    def forward(self, x):
        return [sum(layer(x) for layer in part) for part in self.parts]


class Scale(nn.Module):
    """The gradient of its weight, and of its output, is a number that no other layer has."""

    def __init__(self, number, odd):
        super().__init__()
        self.number = number + 1
        dtype = torch.complex64 if odd and number % 2 else torch.float32  # the native writer reads no complex numbers
        self.weight = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, x):
        return x * self.weight.real


@pytest.mark.quick(3)
def test_threads_that_run_backward_at_once_write_whole_frames(watch, driver, writer, impatient):
    watched = watch(on_overflow="continue", watch=("forward", "grads"))
    model = Parts(writer == "both")
    wrong: list[BaseException] = []
    for round_ in range(ROUNDS):
        losses = losses_of(model, round_)
        start = threading.Barrier(THREADS)

        def backward(loss, start=start):
            try:
                start.wait(60)
                loss.backward()
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=backward, args=(loss,)) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        model.zero_grad(set_to_none=True)
    assert wrong == []
    assert watched.faults == []
    for round_, page in enumerate(watched.pages):
        found = {}
        for frame in page.frames:
            if frame.phase == "backward":
                (row,) = frame.rows
                found.setdefault(frame.module, {})[row.role] = (row.abs_min, row.abs_max)
        expected = {}
        for n, part in enumerate(model.parts):
            for i, layer in enumerate(part):
                number = float(layer.number + 100 * round_)
                expected[f"parts.{n}.{i}"] = {"grad output": (number, number), "grad weight": (number, number)}
        assert found == expected
    assert len(watched.pages) == ROUNDS


def losses_of(model, round_):
    """A loss for each part, from one forward."""
    factors = [[layer.number + 100 * round_ for layer in part] for part in model.parts]
    outputs = {}
    handles = [
        layer.register_forward_hook(lambda module, args, out: outputs.__setitem__(id(module), out))
        for part in model.parts
        for layer in part
    ]
    model(torch.ones(3))
    for handle in handles:
        handle.remove()
    return [
        sum(factor * outputs[id(layer)].sum() for factor, layer in zip(row, part, strict=True))
        for row, part in zip(factors, model.parts, strict=True)
    ]


@pytest.mark.skipif(
    native_writer.NativeFrameWriter is None or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="worker/native was not built, or torch is too old for it",
)
def test_the_native_writer_gives_up_while_another_thread_writes(watch):
    watched = watch(on_overflow="continue")
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    hooks = watched.hooks
    info, parameters = hooks._roots.owner_of(model.weight)[0], [("weight", model.weight)]
    hooks.progress.resume(info.root.page)
    held, written = threading.Event(), threading.Event()

    def hold():
        with hooks.progress.lock, hooks.progress.lock:
            held.set()
            written.wait(60)

    other = threading.Thread(target=hold)
    other.start()
    assert held.wait(60)
    before = watched.recorder.frame_count
    assert not hooks._gradients.writer.weights(info, parameters, 1)
    written.set()
    other.join(60)
    assert watched.recorder.frame_count == before
    with hooks.progress.lock:  # this thread may write while it holds it
        assert hooks._gradients.writer.weights(info, parameters, 1)
    assert hooks._gradients.writer.weights(info, parameters, 1)
    assert watched.recorder.frame_count == before + 2


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x)


def test_what_an_alarm_changes_is_changed_under_the_lock(watch, monkeypatch):
    """Where a hook of another device's gradient may raise one at the same moment."""
    watched = watch(scaler_skips=1)
    lock, held = watched.hooks.progress.lock, []

    def noted(owner, name):
        before = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *given, **more: held.append((name, lock.is_held_here())) or before(*given, **more)
        )

    noted(watched.hooks.judging.held, "backward_begins")
    noted(watched.hooks.judging, "skipped")
    noted(watched.hooks._late_passed._passed.summands, "look_closer")
    model = Own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    model.linear.weight.grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    passed = watched.hooks._late_passed._passed
    operation = NotedOperation(SimpleNamespace(number=0, name="0", members="0"), 1, 1, 0, 0)
    closer = partial(passed.summands.look_closer, torch.ones(2), True)
    passed.report(operation, True, PassedLook(NOT_LOOKED, 0), 1, 1, 2, closer=closer)
    assert held == [("backward_begins", True), ("skipped", True), ("look_closer", True)]
    assert not lock.is_held_here()
    assert watched.faults == []
