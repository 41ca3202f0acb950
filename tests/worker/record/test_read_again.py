"""What changed without a new version is read again: the same rows on the host and on a device.

A collective writes into a tensor that a module has returned; a bit of a weight flips; a step makes a weight bad.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from gpuwatch.tests.fakes.late_device import LateDevice
from gpuwatch.worker.hooks import native_writer
from needs import RELEASE
from torch import nn

from ..conftest import use_late_device

pytestmark = pytest.mark.quick_here(10)

DRIVERS = {"host": None, "device": 0, "late device": 12, "very late device": 400}


@pytest.fixture(params=DRIVERS)
def driver(request, monkeypatch):
    """The longest delay of each kind of device."""
    longest = DRIVERS[request.param]
    driver = None if longest is None else LateDevice(5, longest=longest)
    use_late_device(monkeypatch, driver)
    return driver


@pytest.fixture(params=["native", "python"])
def writer(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(native_writer, "NativeFrameWriter", None)


class Reduced(nn.Module):
    """Reduces what `proj` returns. `adds` is what the other ranks would add."""

    def __init__(self, adds):
        super().__init__()
        self.adds = adds
        self.proj = nn.Linear(3, 3)
        self.other = nn.Linear(3, 3)
        self.next = nn.Linear(3, 3)

    def forward(self, x):
        out = self.proj(x)
        version = out._version
        out.data.add_(self.adds)
        dist.all_reduce(out.detach())
        if RELEASE < (2, 6):
            torch._C._autograd._unsafe_set_version_counter(out, version)
        else:
            torch._C._autograd._unsafe_set_version_counter((out,), (version,))
        self.other(x)
        return self.next(out)


@pytest.mark.quick(8)
@pytest.mark.parametrize("adds", [0.0, math.inf])
def test_an_argument_that_a_collective_has_changed(watch, driver, writer, group, adds):
    watched = watch(on_overflow="continue")
    model = Reduced(adds)
    for _ in range(2):
        with torch.no_grad():
            model(torch.ones(2, 3))
    for page in (0, 1):
        assert watched.row("proj", "output", page=page).finite
        assert watched.row("next", "input[0]", page=page).finite == (adds == 0)
    assert [(bad.module, bad.inputs_finite) for bad in watched.anomalies] == [("next", False)] * (2 * (adds != 0))
    assert watched.faults == []


def test_a_root_without_a_length_is_no_fault_of_ours(watch, driver, writer, group):
    """What torch.compile returns for a module says that it has one, and raises."""

    class Unsized(Reduced):
        def __len__(self):
            raise TypeError("Unsized does not support len()")

    watched = watch(on_overflow="continue")
    model = Unsized(math.inf)
    for _ in range(2):
        with torch.no_grad():
            model(torch.ones(2, 3))
    assert watched.faults == []
    assert watched.anomalies[0].module == "next"


@pytest.mark.quick(8)
@pytest.mark.parametrize("becomes", [math.inf, 1e38])
def test_a_weight_that_something_else_has_changed(watch, driver, writer, becomes):
    watched = watch(on_overflow="continue")
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for batch in range(4):
        if batch == 3:
            model[1].weight.data[1, 1] = becomes
            model[1].bias.data[1] = 3e38
        loss = model(torch.full((2, 3), 4.0)).sum()
        if batch < 3:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    anomaly = watched.anomalies[0]
    assert (anomaly.module, anomaly.role) == ("1", "weight" if becomes == math.inf else "output")
    assert watched.row("1", "weight").abs_max == pytest.approx(becomes)
    if becomes != math.inf:  # one bad weight is enough
        assert watched.row("1", "bias").abs_max == pytest.approx(3e38)
    assert watched.row("0", "weight").finite
    assert watched.faults == []


def test_the_state_of_a_weight_that_a_step_made_bad(watch, driver, writer):
    watched = watch(on_overflow="continue")
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.Adam(model.parameters())
    for batch in range(3):
        model(torch.ones(2, 3)).sum().backward()
        if batch == 2:
            optimizer.state[model[1].weight]["exp_avg_sq"][0, 0] = -1.0
        optimizer.step()
        optimizer.zero_grad()
    anomaly = watched.anomalies[0]
    assert (anomaly.module, anomaly.role, anomaly.phase, anomaly.where.batch) == ("1", "weight", "optimizer", 2)
    rows = [(frame.module, row.role) for frame in watched.frames("optimizer") for row in frame.rows]
    state = [entry for entry in rows if entry[1].startswith("state")]
    assert state == [("1", f"state {key} weight") for key in ("step", "exp_avg", "exp_avg_sq")]
    assert watched.row("1", "state exp_avg weight").abs_max > 0
    assert watched.faults == []


def test_the_state_of_a_later_step_is_not_shown_as_that_of_an_earlier_one(watch):
    driver = LateDevice(5)
    with pytest.MonkeyPatch.context() as patch:
        use_late_device(patch, driver)
        watched = watch(on_overflow="continue")
        model = nn.Linear(3, 3)
        optimizer = torch.optim.Adam(model.parameters())
        for batch in range(4):
            model(torch.ones(2, 3)).sum().backward()
            if batch == 1:
                driver.held.add(0)
                optimizer.state[model.weight]["exp_avg_sq"][0, 0] = -1.0
            optimizer.step()
            optimizer.zero_grad()
        driver.held.clear()
        assert watched.anomalies[0].where.batch == 1
        assert not any(row.role.startswith("state") for frame in watched.pages[1].frames for row in frame.rows)
