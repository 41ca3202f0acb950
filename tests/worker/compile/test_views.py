"""What each version of torch is asked for, and that a name that is gone harms no script."""

from __future__ import annotations

import pytest
import torch
from gpuwatch.core.events.own_limits import CompiledUnseen, NotLookedInto
from gpuwatch.worker.compile import attach
from gpuwatch.worker.compile import attach as traced
from gpuwatch.worker.compile.region_parts import compiled_views
from torch import nn
from torch._dynamo.utils import counters


@pytest.mark.parametrize(
    ("version", "rows", "gradients", "through_data", "missing"),
    [
        ("2.5.1", False, False, False, "torch 2.5: compiled modules are not inspected"),
        ("2.7.1+cu126", False, False, False, "torch 2.7: compiled modules are not inspected"),
        ("2.8.0", True, False, False, "torch 2.8: gradients inside of compiled modules are not inspected"),
        ("2.11.0", True, False, False, "torch 2.11: gradients inside of compiled modules are not inspected"),
        ("2.13.0+cpu", True, True, False, ""),
        ("2.14.1", True, True, False, ""),
        ("2.15.0", True, True, True, ""),
        ("2.16.0.dev20261101", False, False, False, "torch 2.16: compiled modules are not inspected"),
        ("of my own", False, False, False, "torch 0.0: compiled modules are not inspected"),
    ],
)
def test_what_was_not_tried_is_not_traced(version, rows, gradients, through_data, missing):
    found = compiled_views(version)
    assert (found.rows, found.gradients, found.through_data, found.missing) == (rows, gradients, through_data, missing)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.up(x))


@pytest.fixture
def as_torch(monkeypatch):
    """Have gpuwatch take the installed torch for another version. What is asked of it, every later version takes."""
    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr(traced, "before", None)
    monkeypatch.setattr(traced, "after", None)
    yield lambda version: monkeypatch.setattr(attach, "compiled_views", lambda: compiled_views(version))
    torch.compiler.reset()


@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
@pytest.mark.parametrize(
    ("version", "calls", "seen", "hidden"),
    [("2.5.1", True, {""}, [("", "Net")]), ("2.8.0", False, {"", "up", "act"}, [])],
)
def test_what_a_torch_hides_is_told_once(watch, as_torch, capfd, version, calls, seen, hidden):
    as_torch(version)
    watched = watch(on_overflow="continue", watch=("forward", "weights", "grads"))
    model = Net()
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    for size in (2, 3):
        call(torch.ones(size, 4)).sum().backward()

    assert counters["stats"]["unique_graphs"] == 2
    missing = compiled_views(version).missing
    assert [(each.text, each.calls) for each in watched.of(CompiledUnseen)] == [(missing, calls)]
    assert capfd.readouterr().err.count(missing) == 1
    assert {frame.module for page in watched.pages for frame in page.frames if frame.phase == "forward"} == seen
    assert [(each.module, each.cls) for each in watched.of(NotLookedInto)] == hidden
    verdict = watched.verdict()
    assert (verdict.kind, missing[1:] in verdict.statement, watched.faults) == ("clean", True, [])
    assert ("use torch 2.8" in " ".join(verdict.next)) == calls


@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
def test_a_name_of_dynamo_that_is_gone_ends_no_compilation(watch, as_torch, monkeypatch):
    monkeypatch.setattr(attach.CompiledRegions, "_trace_calls", lambda *_: [][0])
    watched = watch(on_overflow="continue")
    call = torch.compile(nn.Linear(4, 4), backend="eager", fullgraph=True)
    call(torch.ones(2, 4))

    assert counters["stats"]["unique_graphs"] == 1
    assert [fault.part for fault in watched.faults] == ["compiled modules"]
