"""`gpuwatch.log_to(target)`, in one process with no launcher. Real trackers: tests/frameworks/test_log_to.py."""

from __future__ import annotations

import gc
import math

import gpuwatch
import pytest
import torch
from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.events.own_limits import OwnFault
from gpuwatch.tests.fakes.late_device import LateDevice
from gpuwatch.worker import log_to as module
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from .conftest import use_late_device
from .models import Multiplies

HALF = torch.full((2, 4), 2.0**10, dtype=torch.float16)


class Tracker:
    """A function that keeps what it is called with."""

    def __init__(self) -> None:
        self.calls = []

    def __call__(self, values, step) -> None:
        self.calls.append((step, {name.removeprefix("gpuwatch/"): value for name, value in values.items()}))


class Flushed(SummaryWriter):
    """Counts its flushes."""

    times = 0

    def flush(self) -> None:
        super().flush()
        self.times += 1


@pytest.fixture
def tracker():
    return Tracker()


def net(factor: float) -> nn.Module:
    return nn.Sequential(nn.Identity(), Multiplies(factor))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_it_logs_the_output_that_is_closest_to_its_limit(tracker):
    model = net(8)
    with gpuwatch.watch(model):
        model(HALF)
        gpuwatch.log_to(tracker, 5)
        gpuwatch.log_to(tracker, 6)
    ((step, first), (_, second)) = tracker.calls
    assert step == 5
    assert first.pop("headroom") == pytest.approx(math.log2(65504) - 13, abs=0.01)
    assert first.pop("closest_module") == "`1` (Multiplies), float16"
    assert first == {"nonfinite": 0, "near_overflow": 0, "skipped_steps": 0}, "no step was timed"
    assert "closest_module" not in second, "a text is sent when it changes"


def test_what_ends_the_job_is_in_tensorboards_file_before_it_does(tmp_path):
    """A thread of TensorBoard's writes the file, and a script that ends by an exception does not close it."""
    writer, model = Flushed(tmp_path), net(8)
    with pytest.raises(OverflowDetected), gpuwatch.watch(model):
        model(HALF)
        gpuwatch.log_to(writer, 5)
        assert writer.times == 0, "else it would wait for the disk"
        model(HALF * 32)
    assert writer.times == 1
    (file,) = tmp_path.iterdir()
    assert b"rank 0: +inf in output of `1` (Multiplies), forward of batch 1" in file.read_bytes()
    writer.close()


def test_each_target_has_the_time_of_the_steps_since_its_last_call(tracker):
    other, model = Tracker(), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gpuwatch.watch(model):
        train(model, optimizer)
        gpuwatch.log_to(tracker)
        gpuwatch.log_to(tracker)
        train(model, optimizer)
        gpuwatch.log_to(other)
    assert [step for step, _ in tracker.calls + other.calls] == [1, 1, 2]
    assert ["step_seconds" in values for _, values in tracker.calls + other.calls] == [True, False, True]
    assert 0 <= tracker.calls[0][1]["waiting_share"] < 1


def test_what_a_rank_has_found_is_logged_before_the_exception(tracker):
    model = net(1e30)
    with pytest.raises(OverflowDetected) as raised, gpuwatch.watch(model):
        model(torch.ones(2, 4))
        gpuwatch.log_to(tracker, 7)
        model(torch.full((2, 4), 1e30))
    (_, (step, last)) = tracker.calls
    assert step == 7, "the script's last one"
    assert last["nonfinite"] == 1
    assert last["overflow"].startswith("rank 0: +inf in output of `1` (Multiplies), forward of batch 1")
    assert str(raised.value).startswith(f"gpuwatch: {last['overflow']}; report() of the watch")


def test_where_the_training_goes_on_the_first_one_is_logged(tracker):
    model = net(math.inf)
    with gpuwatch.watch(model, on_overflow="continue"):
        for _ in range(3):
            model(torch.ones(2, 4))
        gpuwatch.log_to(tracker)
    ((_, values),) = tracker.calls
    assert values["nonfinite"] == 3
    assert values["overflow"] == "rank 0: +inf in output of `1` (Multiplies), forward of batch 0"


def test_a_batch_that_every_leaves_out_is_not_looked_at(tracker):
    model = net(8)
    with gpuwatch.watch(model, every=2):
        model(HALF)
        model(HALF / 64)
        gpuwatch.log_to(tracker)
    assert tracker.calls[0][1]["headroom"] == pytest.approx(3, abs=0.01), "of batch 0"


def test_numbers_on_their_way_from_a_device_are_not_waited_for(tracker, monkeypatch):
    driver = LateDevice()
    use_late_device(monkeypatch, driver)
    model = net(1)
    with gpuwatch.watch(model):
        for batch in range(6):
            driver.held = {0} if batch in (2, 3) else set()  # the stream is busy: nothing arrives
            model(torch.full((2, 4), 2.0**-batch))
            gpuwatch.log_to(tracker, batch)
    newest = {step: round(values["headroom"] - 128) for step, values in tracker.calls if "headroom" in values}
    assert newest[2] < 2 and newest[3] < 2, "of a batch before"
    assert newest[5] >= 4


def test_a_failing_tracker_costs_nothing_and_is_recorded_once(tracker):
    def fails(values, step):
        raise ConnectionError("no route to the tracker")

    model = net(8)
    with gpuwatch.watch(model) as watch:
        for _ in range(3):
            model(HALF)
            gpuwatch.log_to(fails)
            gpuwatch.log_to(tracker)
        faults = [event for event in watch.events if isinstance(event, OwnFault)]
        assert [(fault.part, fault.message) for fault in faults] == [
            ("log_to", "ConnectionError: no route to the tracker")
        ]
        assert watch.verdict().kind == "clean"
    assert len(tracker.calls) == 3


def test_without_gpuwatch_it_does_nothing_and_says_so_once(tracker, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(module, "_is_warned", False)
    model = net(8)
    with gpuwatch.watch(model):
        pass
    model(HALF)
    with SummaryWriter(tmp_path) as writer:
        gpuwatch.log_to(writer)
        gpuwatch.log_to(tracker)
    assert tracker.calls == []
    assert capfd.readouterr().err.count("gpuwatch: log_to logs nothing") == 1


def test_a_rank_without_a_tracker_logs_nothing():
    model = net(8)
    with gpuwatch.watch(model) as watch:
        model(HALF)
        gpuwatch.log_to(None)
        assert watch.events == []


def test_it_keeps_no_watch_alive(tracker):
    model = net(8)
    with gpuwatch.watch(model) as watch:
        model(HALF)
        gpuwatch.log_to(tracker)
    folder = watch._recorder.path.parent
    del watch, model
    gc.collect()
    assert not folder.exists()


def test_what_is_no_tracker_is_refused():
    with pytest.raises(TypeError, match=r"log_to: expected wandb or a run of it, mlflow, .* found str"):
        gpuwatch.log_to("wandb")


def test_old_targets_are_let_go(tracker):
    model = net(8)
    with gpuwatch.watch(model):
        model(HALF)
        gpuwatch.log_to(tracker)
        for _ in range(20):
            gpuwatch.log_to(lambda values, step: None)
            gpuwatch.log_to(tracker)
        assert len(module._live()._targets) == module._MOST_TARGETS
    assert len(tracker.calls) == 21
    assert sum("closest_module" in values for _, values in tracker.calls) == 1, "it is known all along"
