"""Gradients of parameters on a device are read together when the backward ends. A late device shows when."""

from __future__ import annotations

import math

import pytest
import torch
from gpuwatch.core.recorder.layout import HeadField
from gpuwatch.tests.fakes.late_device import LateDevice
from gpuwatch.worker.device import queued_rows, reader_choice
from gpuwatch.worker.device.device_buffer import DeviceStatsBuffer
from gpuwatch.worker.device.torch_reader import TorchReader
from gpuwatch.worker.hooks import native_writer
from torch import nn

from ...needs import needs
from ..conftest import Watched, use_late_device

pytestmark = [
    needs("torch.Tensor.__dlpack_c_exchange_api__"),  # Python's writer reads each at once
    pytest.mark.skipif(native_writer.NativeFrameWriter is None, reason="worker/native was not built"),
]
LAYERS = 4


class CountingReader(TorchReader):
    """Notes how many tensors each launch has read."""

    def __init__(self):
        self.read_at_once = []

    def read(self, source, rows, position, count):
        self.read_at_once.append(1)
        super().read(source, rows, position, count)

    def read_many(self, readings, rows):
        self.read_at_once.append(len(readings.tensors))
        super().read_many(readings, rows)


@pytest.fixture
def reader(monkeypatch):
    use_late_device(monkeypatch, LateDevice(3))
    found = CountingReader()
    monkeypatch.setattr(reader_choice, "TorchReader", lambda: found)
    return found


@pytest.fixture
def watched(tmp_path, reader):
    found = Watched(tmp_path / "recorder", watch=("forward", "grads"))
    yield found
    assert found.faults == []
    found.close()


def layers():
    """After their first batch, whose frames Python writes."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(LAYERS)))
    model(torch.ones(2, 4)).sum().backward()
    model.zero_grad()
    return model


def backward(model, reader):
    """A forward and a backward. What the launches of the backward have read; the first one reads the loss."""
    loss = model(torch.ones(2, 4)).sum()
    reader.read_at_once.clear()
    loss.backward()
    return reader.read_at_once


def lost(watched):
    return int(watched.recorder.fields[HeadField.ROWS_LOST])


def test_they_are_read_by_one_launch_and_have_the_numbers_that_they_had(watched, reader):
    model = layers()
    for _ in range(2):
        model.zero_grad()
        assert backward(model, reader) == [1] + [1] * LAYERS + [2 * LAYERS]  # outputs at once, then all parameters
    found = {f"{name}.{row.role}": row.abs_max for name, row in rows_of(watched) if row.role != "grad output"}
    names = {name.replace(".", ".grad "): parameter.grad for name, parameter in model.named_parameters()}
    assert found == {name: pytest.approx(gradient.abs().max().item()) for name, gradient in names.items()}
    assert lost(watched) == 0


def rows_of(watched):
    return [(frame.module, row) for frame in watched.last.frames if frame.phase == "backward" for row in frame.rows]


def test_a_bad_one_is_named_where_it_arose(watched, reader):
    model = layers()
    model[2].weight.register_hook(lambda gradient: gradient * math.inf)
    backward(model, reader)
    (anomaly,) = watched.anomalies
    assert (anomaly.module, anomaly.role) == ("2", "grad weight")


def test_one_that_is_changed_in_the_backward_is_lost_and_none_waits_any_more(watched, reader):
    """Its numbers would be the later ones: the wrong module would be named."""
    model = layers()

    def spoil(gradient):
        model[3].weight.grad.fill_(math.inf)

    model[1].weight.register_hook(spoil)
    backward(model, reader)
    assert lost(watched) == 1
    assert [(name, row.role) for name, row in rows_of(watched) if row.abs_max is None] == [("3", "grad weight")]
    assert all(math.isfinite(row.abs_max) for _, row in rows_of(watched) if row.abs_max is not None)
    model.zero_grad()
    assert backward(model, reader) == [1] + [1] * 3 * LAYERS


@pytest.mark.parametrize("how", ["memory", "freed"])
def test_one_whose_memory_is_replaced_or_freed_is_lost(watched, reader, how):
    model = layers()

    def replace(gradient):
        before = model[3].weight.grad
        if how == "memory":
            before.data = torch.full((4, 4), math.inf)
        else:
            before.untyped_storage().resize_(0)

    model[1].weight.register_hook(replace)
    backward(model, reader)
    assert lost(watched) == 1


def test_what_another_hook_gets_is_read_at_once(watched, reader):
    model = layers()

    def zero(parameter):
        parameter.grad.zero_()

    model[3].weight.register_post_accumulate_grad_hook(zero)
    backward(model, reader)
    assert reader.read_at_once == [1] + [1] * (LAYERS + 1) + [2 * LAYERS - 1]
    assert lost(watched) == 0


def test_with_process_groups_each_is_read_at_once(watched, reader, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert backward(layers(), reader) == [1] + [1] * 3 * LAYERS


def test_large_ones_do_not_wait(watched, reader, monkeypatch):
    monkeypatch.setattr(queued_rows, "_MOST_HELD", 100)  # bytes: those of a layer have 80
    assert backward(layers(), reader) == [1, 1, 1, 4, 1, 1, 4]


def test_a_backward_that_fails_leaves_none_behind(watched, reader):
    model = layers()

    def fail(gradient):
        raise RuntimeError("no")

    handle = model[1].weight.register_hook(fail)
    with pytest.raises(RuntimeError):
        backward(model, reader)
    handle.remove()
    buffer = watched.hooks.rows.device_buffer
    assert isinstance(buffer, DeviceStatsBuffer)
    assert backward(model, reader)[-1] == 2 * LAYERS
    assert not any(stream.held or stream.waiting for stream in buffer._buffers.values())
    assert lost(watched) == 0


def test_a_reentrant_backward_reads_them_before_it_adds_to_them(watched, reader):
    from torch.utils.checkpoint import checkpoint

    model = layers()

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            x = checkpoint(self.inner, x, use_reentrant=True)
            return checkpoint(self.inner, x, use_reentrant=True)

    net = Twice()
    x = torch.ones(2, 4, requires_grad=True)
    for _ in range(2):
        net.zero_grad()
        net(x).sum().backward()
    assert lost(watched) == 0
