"""The second run of a call that Lightning or Fabric redirects from `forward` to `training_step`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.events.alarm_evidence import ForwardCaptured, SecondRun
from gpuwatch.tests.fakes.late_device import LateDevice
from torch import nn

from ..conftest import use_late_device

lightning = pytest.importorskip("lightning")
SOURCE = Path(__file__).read_text().splitlines()


class InItsStep(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def training_step(self, x, number):
        return (self.inner(x).abs() / 0).sum()  # InItsStep


class InItsForward(InItsStep):
    def forward(self, x):
        return self.inner(x).abs() / 0  # InItsForward

    def training_step(self, x, number):
        return self(x).sum()


class OnTheWayToItsForward(InItsStep):
    def forward(self, x):
        return self.inner(x)

    def training_step(self, x, number):
        return self(x / 0).sum()  # OnTheWayToItsForward


class StepsItself(InItsStep):
    automatic_optimization = False


def in_ddp(model):
    """A step as Lightning's strategies call it."""
    from lightning.pytorch.strategies.strategy import _ForwardRedirection

    wrapper = nn.parallel.DistributedDataParallel(model)
    return lambda x: _ForwardRedirection()(wrapper, model, "training_step", x, 0)


def in_fabric(model):
    from lightning.fabric.plugins.environments import LightningEnvironment  # else it looks for one, and warns of srun
    from lightning.fabric.wrappers import _FabricModule

    strategy = lightning.Fabric(accelerator="cpu", devices=1, plugins=LightningEnvironment()).strategy
    wrapper = nn.parallel.DistributedDataParallel(model)
    return partial(_FabricModule(wrapper, strategy, original_module=model).training_step, number=0)


@pytest.fixture(autouse=True, params=["host", "device"])
def memory(request, monkeypatch, alone_in_a_group):
    """Where the tensors are. The numbers of a device arrive later."""
    if request.param == "device":
        use_late_device(monkeypatch, LateDevice(7))


def ended(watched, step):
    """The record of the second run. The numbers of a device end the job when the next batch begins."""
    with pytest.raises(OverflowDetected):
        step(torch.ones(2, 4))
        watched.collect()
        step(torch.ones(2, 4))
    assert watched.faults == []
    (ran,) = watched.of(SecondRun)
    return ran


@pytest.mark.parametrize("called", [in_ddp, in_fabric])
@pytest.mark.parametrize("cls", [InItsStep, InItsForward, OnTheWayToItsForward])
def test_the_line_is_found_in_the_step_and_in_the_forward_that_it_calls(watch, called, cls):
    watched = watch(on_overflow="abort")
    ran = ended(watched, called(cls()))

    (line,) = (number for number, text in enumerate(SOURCE, 1) if text.endswith(f"# {cls.__name__}"))
    assert ran.operation, ran
    assert (ran.unknown, ran.operation.line, ran.operation.op) == ("", line, "aten.div.Tensor")


def test_a_step_that_runs_its_own_optimizer_does_not_run_again(watch):
    ran = ended(watch(on_overflow="abort"), in_ddp(StepsItself()))
    assert ran.unknown == "`training_step` runs backward and optimizer itself, and so does not run again"


def test_a_capture_says_that_it_is_of_a_forward(watch, tmp_path):
    watched = watch(on_overflow="abort", capture=str(tmp_path / "run"))
    assert ended(watched, in_ddp(InItsStep())).operation is not None
    (captured,) = watched.of(ForwardCaptured)
    assert captured.file.refused == "`training_step` ran, and a capture is of a forward"
    assert not (tmp_path / "run").exists()
