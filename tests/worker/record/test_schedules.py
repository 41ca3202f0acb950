"""However late the numbers of a device arrive, and in whatever order between streams: the same rows are the first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from gpuwatch.core.events.alarms import Anomaly, IgnoredAlarm, RangeWarning, ScalerSkip
from gpuwatch.core.frames import Frame
from gpuwatch.tests.fakes.late_device import LateDevice
from gpuwatch.worker.device import device
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from ..conftest import Watched, use_late_device


class OnStreams(nn.Module):
    """Runs its module on the next of some streams."""

    def __init__(self, module: nn.Module, streams: Iterator[int]) -> None:
        super().__init__()
        self.module = module
        self.streams = streams

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        driver = device.late_device()
        if isinstance(driver, LateDevice):
            driver.current = next(self.streams, 0)
        return self.module(x)


class Masks(nn.Module):
    """-inf above the diagonal, as attention has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf).softmax(-1)


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.masks = Masks()
        self.scale = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.masks(self.scale(x))


def train(fault: str, streams: Iterator[int]) -> None:
    """Six batches; a fault in the fourth."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.ReLU(inplace=True), Scores(), nn.Linear(4, 4), nn.LayerNorm(4)]
    model = nn.Sequential(*(OnStreams(layer, streams) for layer in layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in range(6):
        x = torch.randn(4, 4)
        with torch.no_grad():
            if batch == 3 and fault == "weight":
                layers[3].weight[1, 1] = math.inf
            if batch == 3 and fault == "forward":
                layers[3].weight[1, 1] = 3e38
                layers[3].bias[1] = 3e38
            if batch == 3 and fault == "input":
                x[0, 0] = math.nan
        loss = model(x).square().sum()
        if batch == 3 and fault == "gradient":
            loss = loss * math.inf
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def told(watched: Watched) -> list[tuple[Any, ...]]:
    """What followed, without the times."""
    events = [event for event in watched.events if isinstance(event, (Anomaly, RangeWarning, IgnoredAlarm, ScalerSkip))]
    return sorted(
        (
            type(e).__name__,
            e.where.batch,
            getattr(e, "frame", -1),
            e.module or "",
            e.role or "",
            getattr(e, "value", ""),
        )
        for e in events
    )


def frames(watched: Watched) -> list[list[Frame]]:
    return [page.frames for page in watched.pages]


FAULTS = ["none", "weight", "forward", "input", "gradient"]


@pytest.fixture(scope="module")
def schedule():
    """Makes the driver of one schedule the one of this process."""
    real = device.late_device
    patch = pytest.MonkeyPatch()
    yield partial(use_late_device, patch)
    patch.undo()
    assert device.late_device is real


def run(path, fault: str, streams: list[int]) -> tuple[list[tuple[Any, ...]], list[list[Frame]]]:
    watched = Watched(path, on_overflow="continue")
    try:
        train(fault, iter(streams))
        watched.settle()
        assert watched.faults == []
        return told(watched), frames(watched)
    finally:
        watched.close()
        path.unlink()


class Truth(dict[str, Any]):
    """Fault -> what the host's own numbers tell. Short in the report of an example that fails."""

    def __repr__(self) -> str:
        return "Truth(...)"


@pytest.fixture(scope="module")
def truth(tmp_path_factory, schedule):
    schedule(None)
    folder = tmp_path_factory.mktemp("host")
    return Truth({fault: run(folder / f"{fault}.recorder", fault, []) for fault in FAULTS})


def numbers(pages: list[list[Frame]]) -> list[list[tuple[Any, ...]]]:
    """What the pages show. A value before a call changed it in place is shown unless it is known to be finite."""
    return [
        [
            (frame.module, frame.phase, row.role, repr(row.abs_min), repr(row.abs_max), row.flags, row.mark)
            for frame in page
            for row in frame.rows
            if not row.role.startswith("before ")
        ]
        for page in pages
    ]


def check(folder, schedule, truth, fault: str, seed: int, longest: int, streams: list[int]) -> None:
    schedule(LateDevice(seed, longest=longest))
    events, pages = run(folder / "late.recorder", fault, streams)
    assert events == truth[fault][0]
    assert any(event[0] == "Anomaly" for event in events) == (fault != "none")
    assert numbers(pages) == numbers(truth[fault][1])


schedules = given(
    fault=st.sampled_from(FAULTS),
    seed=st.integers(0, 1 << 30),
    longest=st.integers(0, 200),
    streams=st.lists(st.integers(0, 3), max_size=30),
)
unlimited = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


@schedules
@settings(max_examples=5, **unlimited)
def test_a_few_schedules_give_one_verdict(tmp_path_factory, schedule, truth, fault, seed, longest, streams):
    check(tmp_path_factory.getbasetemp(), schedule, truth, fault, seed, longest, streams)


@pytest.mark.soak
@pytest.mark.timeout(3600)  # a second each
@schedules
@settings(max_examples=1000, **unlimited)
def test_a_thousand_schedules_give_one_verdict(tmp_path_factory, schedule, truth, fault, seed, longest, streams):
    check(tmp_path_factory.getbasetemp(), schedule, truth, fault, seed, longest, streams)
