"""The line whose backward makes a bad gradient, in the very run: 30 faults in a model's own code, none named wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.events.alarm_evidence import SecondRun
from gpuwatch.tests.worker.conftest import Watched, alone_in_a_group, watch
from gpuwatch.worker.record.collectives import issued

from .backward_faults import FILE, SITES, Net, fit, line_of, trained

__all__ = ["alone_in_a_group", "watch"]
PLACES = ("inside", "root", "checkpointed", "ddp")


def operation_of(watched: Watched, net: torch.nn.Module) -> tuple[str, SecondRun]:
    """(place of the alarm's module, what the second run has found), after a training that ends at an alarm."""
    torch.manual_seed(0)
    trained(net)
    (alarm,) = watched.anomalies
    assert alarm.phase == "backward"
    assert watched.faults == []
    (ran,) = watched.of(SecondRun)
    return alarm.module, ran


@pytest.mark.quick(8)
@pytest.mark.sample(20)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fault", SITES)
def test_the_line(watch: Callable[..., Watched], request: pytest.FixtureRequest, fault: str, place: str):
    torch.manual_seed(0)
    net: torch.nn.Module = Net(SITES[fault], place)
    if place == "ddp":
        request.getfixturevalue("alone_in_a_group")
        net = torch.nn.parallel.DistributedDataParallel(net)
    _, ran = operation_of(watched := watch(on_overflow="abort"), net)
    found = ran.operation
    assert found is not None, ran.unknown
    assert (found.file, found.line) == (str(FILE), line_of(fault)), found
    verdict = watched.verdict()
    assert verdict.operation == found
    cause = verdict.cause
    known = ("domain", "established"), ("precision", "supported")
    assert cause is None or (cause.kind, cause.certainty) in known


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_there_are_30():
    assert len(SITES) == 30
    assert len({line_of(fault) for fault in SITES}) == 30


@pytest.mark.quick(4)
@pytest.mark.sample(8)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", SITES)
def test_nothing_is_changed(watch: Callable[..., Watched], fault: str):
    """Weights, gradients, buffers, random numbers and hooks are as an abort without a second run leaves them."""

    def left_by(explain: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = Net(SITES[fault])
        seen: list[torch.Tensor] = []
        net.leave.weight.register_hook(seen.append)  # type: ignore[no-untyped-call]
        hooks = net.leave.weight._backward_hooks
        watched = watch(on_overflow="abort", explain=explain)
        issued_before = issued()
        trained(net)
        assert bool(watched.of(SecondRun)) == (explain == "auto")
        watched.close()
        assert (net.leave.weight._backward_hooks is hooks, issued()) == (True, issued_before)
        assert not torch.is_anomaly_enabled()
        assert not any(part._forward_hooks for part in net.modules())
        state = [each.detach().clone() for each in (*net.parameters(), *net.buffers())]
        state += [each.grad for each in net.parameters() if each.grad is not None]
        return [*state, torch.tensor(len(seen)), torch.get_rng_state()]

    one, other = left_by("off"), left_by("auto")
    assert len(one) == len(other)
    assert all(each.equal(again) for each, again in zip(map(bits, one), map(bits, other), strict=True))


def test_a_healthy_training_has_the_same_bits(watch: Callable[..., Watched]):
    def run(**settings: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        watched = watch(**settings)
        found = trained(Net(SITES["root_of_square"]), bad=-1)
        assert watched.anomalies == []
        watched.close()
        return found

    assert all(map(torch.equal, run(explain="off"), run(on_overflow="abort")))


def test_a_fault_of_the_loss_is_no_line_of_the_model(watch: Callable[..., Watched]):
    watched = watch(on_overflow="abort")
    torch.manual_seed(0)
    with contextlib.suppress(OverflowDetected):
        fit(Net(torch.tanh), loss=lambda out: (out - out.detach()).square().sum(1).sqrt().mean())
    (ran,) = watched.of(SecondRun)
    assert (ran.operation, ran.unknown) == (None, "the gradient that an output of the model was given was not finite")
    assert watched.verdict().operation is None
