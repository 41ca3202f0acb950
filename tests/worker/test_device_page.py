"""Numbers that stay on the device until the page is copied: here on the CPU, and with -m gpu on CUDA."""

from __future__ import annotations

import pytest
import torch
from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.pages import Names, decode_page
from gpuwatch.core.recorder.reader import RecorderReader
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.settings import WorkerSettings
from gpuwatch.worker.device_page import DevicePages, runs
from gpuwatch.worker.hooks import Hooks
from torch import nn

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


class DeviceHooks(Hooks):
    """Hooks that take every tensor for one on the device."""

    _on_device = staticmethod(lambda tensor: True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.keep = nn.Linear(4, 4, bias=False)
        self.widen = nn.Linear(4, 4, bias=False)
        nn.init.eye_(self.keep.weight)
        nn.init.eye_(self.widen.weight)

    def forward(self, x):
        return self.widen(2 * self.keep(x))


@pytest.fixture
def recorder(tmp_path):
    return RecorderWriter(tmp_path / "recorder", rank=0, local_rank=0, world_size=1, attempt=0)


def read(recorder, number=None):
    reader = RecorderReader(recorder.path)
    names = Names()
    definitions, events = reader.new_entries()
    names.add(definitions)
    message = reader.last_page() if number is None else reader.page(number)
    reader.close()
    return decode_page(message, names), events


def watch(recorder, device, **settings):
    kind = DeviceHooks if device == "cpu" else Hooks
    hooks = kind(recorder, WorkerSettings(recorder_dir="", **settings), 0)
    if device == "cpu":
        hooks.device_pages = DevicePages(recorder, torch.device("cpu"))
    hooks.attach()
    return hooks


def settle(hooks, device):
    if device == "cuda":
        torch.cuda.synchronize()
    hooks.look_at_arrived()


def test_positions_become_runs():
    assert runs([]) == []
    assert runs([0, 1, 2, 5, 6, 9]) == [(0, 3), (5, 7), (9, 10)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_numbers_arrive_in_the_page(recorder, device, dtype):
    hooks = watch(recorder, device)
    try:
        x = torch.tensor([[-3, 0, 2, 1]], device=device).to(dtype)
        nn.Identity()(x)
    finally:
        hooks.detach()
    settle(hooks, device)

    page, _ = read(recorder)
    row = page.frames[0].inputs[0]
    assert (row.kind, row.abs_min, row.abs_max, row.finite) == ("measured", 0.0, 3.0, True)


@pytest.mark.parametrize("device", DEVICES)
def test_an_overflow_raises_when_its_numbers_are_back(recorder, device):
    hooks = watch(recorder, device)
    try:
        model = Net().to(device)
        model(torch.ones(2, 4, device=device))
        with pytest.raises(OverflowDetected, match=r"\+inf in input\[0\] of `widen`"):
            for _ in range(3):
                model(torch.full((2, 4), 3e38, device=device))
                settle(hooks, device)
    finally:
        hooks.detach()

    _, events = read(recorder)
    assert (events[0].module, events[0].where.batch, events[0].inputs_finite) == ("widen", 1, False)


@pytest.mark.parametrize("device", DEVICES)
def test_each_kind_of_non_finite_value_is_told(recorder, device):
    hooks = watch(recorder, device, on_overflow="continue")
    inf, nan = float("inf"), float("nan")
    try:
        for values in ([1.0, inf], [1.0, -inf], [inf, -inf], [nan, 1.0], [1.0, 2.0]):
            nn.Identity()(torch.tensor(values, device=device))
    finally:
        hooks.detach()
    settle(hooks, device)

    rows = [read(recorder, number)[0].frames[0].inputs[0] for number in range(5)]
    assert [(row.nan, row.posinf, row.neginf) for row in rows] == [
        (False, True, False),
        (False, False, True),
        (False, True, True),
        (True, False, False),
        (False, False, False),
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_a_page_of_many_segments_arrives_whole(recorder, device):
    hooks = watch(recorder, device)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(300))).to(device)
    try:
        model(torch.ones(1, 2, device=device))
    finally:
        hooks.detach()
    settle(hooks, device)

    page, _ = read(recorder)
    assert len(page.frames) == 301
    assert {row.kind for frame in page.frames for row in frame.rows} == {"measured"}
    expected = model[299].weight.abs().max().item()
    assert page.frames[299].weights[0].abs_max == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_weights_are_measured_once_per_step(recorder, device, monkeypatch):
    measured = []
    whole = DevicePages.measure
    monkeypatch.setattr(DevicePages, "measure", lambda self, t: (measured.append(t.shape), whole(self, t))[1])
    hooks = watch(recorder, device)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for _ in range(3):
            model(torch.ones(1, 4, device=device))
        before = measured.count(model.keep.weight.shape)
        model(torch.ones(1, 4, device=device)).sum().backward()
        optimizer.step()
        model(torch.ones(1, 4, device=device))
    finally:
        hooks.detach()
    settle(hooks, device)

    assert before == 2
    assert measured.count(model.keep.weight.shape) == 4
    assert {row.kind for frame in read(recorder)[0].frames for row in frame.rows} == {"measured"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_waits_for_the_device(recorder):
    hooks = watch(recorder, "cuda")
    model = Net().cuda()
    x = torch.ones(2, 4, device="cuda")
    try:
        model(x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(5):
            model(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        hooks.detach()

    assert hooks._faults == 0
