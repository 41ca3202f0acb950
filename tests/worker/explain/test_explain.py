"""`gpuwatch.explain`: the operations of one forward."""

from __future__ import annotations

import math
import re
import sys
import threading

import gpuwatch
import pytest
import torch
from gpuwatch.core.marked_line import CODE_WIDTH
from gpuwatch.core.recorder import run_folder
from torch import nn

from ..models import ReturnsDTensor


class Net(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.norm, self.scale = nn.BatchNorm1d(4), scale

    def forward(self, x, *, bias=0.0):
        h = self.norm(x).abs() + bias
        h = (h + 1) * self.scale
        return h.half().float()  # the cast


def test_the_operation_and_the_headroom_of_all():
    model = Net(1e6)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found = gpuwatch.explain(model, torch.randn(3, 4), bias=1.0)
    assert found.operation.op == "aten._to_copy.default"
    assert found.operation.code.endswith("# the cast")
    assert (found.operation.element, found.unknown) == ("everything", "")
    ops = {seen.op: seen for seen in found.operations}
    assert 105 < ops["aten.mul.Tensor"].headroom < 108
    assert {"norm", ""} == {seen.place.module for seen in found.operations}
    first, _, *table = str(found).splitlines()
    assert first.startswith("`return h.half().float()  # the cast`, test_explain.py:")
    assert [line.split()[:2] for line in table[:2]] == [["-", "+inf"], ["-", "+inf"]]
    assert len(table) == len(found.operations)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])


class LongLine(nn.Module):
    def forward(self, x):
        return (x * 2 + 1).float() + (x.half().relu() * 6e4).float() - (x * x).sum() * 0.5 + x.mean() ** 2 + 17.5


def test_a_long_line_is_cut_around_the_operation_and_the_object_has_all_of_it():
    found = gpuwatch.explain(LongLine(), torch.full((2, 3), 9.0))
    assert len(found.operation.code) > 90
    first, _, *table = str(found).splitlines()
    shown = first.split("`")[1]
    assert len(shown) <= CODE_WIDTH and shown.endswith("...")
    assert all(len(line) <= CODE_WIDTH + 70 for line in table)
    if sys.version_info >= (3, 11):
        assert "x.half().relu() * 6e4" in shown
    with gpuwatch.watch(model := LongLine(), explain="auto"), pytest.raises(gpuwatch.OverflowDetected) as raised:
        model(torch.full((2, 3), 9.0))
    (text,) = re.findall(r"made it at .*?:\d+: (.*?); report", str(raised.value))
    assert text == shown


def test_a_finite_forward():
    found = gpuwatch.explain(Net(1.0), torch.randn(3, 4))
    assert (found.operation, found.unknown) == (None, "")
    assert str(found).startswith("the output is finite\n")
    closest = min(found.operations, key=lambda seen: seen.headroom)
    assert closest.output.dtype == "float16"


def test_a_bad_input_is_no_operations():
    found = gpuwatch.explain(Net(1.0), torch.full((3, 4), math.nan))
    assert found.operation is None
    assert str(found).startswith("not known: it was in what the module was handed or holds\n")


def test_errors_of_the_forward_are_raised():
    with pytest.raises(RuntimeError, match="running_mean"):
        gpuwatch.explain(Net(1.0), torch.ones(3, 5))


def test_compiled_code_runs_eagerly():
    found = gpuwatch.explain(torch.compile(Net(1e6), backend="eager"), torch.randn(3, 4))
    assert found.operation.code.endswith("# the cast")


class Counts(nn.Module):
    """Changes one buffer in place, and gives the other a new tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("scale", torch.full((1,), 1e30))

    def forward(self, x):
        self.calls.add_(1)
        self.scale = self.scale * 1e5
        return x * self.scale


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_module_is_afterwards_as_before():
    module = nn.Sequential(nn.Identity(), torch.jit.script(Counts()))
    found = gpuwatch.explain(module, torch.full((2,), 1e5))
    assert found.operation.op == "aten.mul.Tensor"
    assert module[1].calls.tolist() == [0.0]
    assert torch.equal(module[1].scale, torch.full((1,), 1e30))


def test_the_local_part_of_a_dtensor_is_looked_at(alone_in_a_group):
    module = ReturnsDTensor(4, 4)
    nn.init.constant_(module.weight, 3e38)
    assert gpuwatch.explain(module, torch.full((2, 4), 1e3)).operation.op == "aten.addmm.default"


def test_code_without_a_file_has_no_line():
    names = {"explain": gpuwatch.explain, "module": nn.Linear(4, 4), "x": torch.full((2, 4), 1e38)}
    code = compile("found = explain(module, x)", "<made>", "exec")
    thread = threading.Thread(target=exec, args=(code, names))  # no file of the test's is on its stack
    thread.start()
    thread.join()
    assert ":0:" not in str(names["found"]) and "aten.addmm.default" in str(names["found"])


def test_the_code_of_a_message_is_told_where_its_text_is():
    with pytest.raises(TypeError, match=r"expected a module .*, found 'GW104'; .*: gpuwatch explain GW104$"):
        gpuwatch.explain("GW104")


class LooksItself(nn.Module):
    def forward(self, x):
        y = (x * 2).half()
        gpuwatch.detect_overflow(y, "y")
        return y.float()


@pytest.mark.parametrize("model", [Net(2.0), LooksItself()], ids=lambda model: type(model).__name__)
def test_a_watch_neither_raises_nor_counts_it(model, tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "_SHARED_MEMORY", tmp_path)
    good, bad = torch.randn(3, 4), torch.full((3, 4), 6e4) * torch.randn(3, 4).sign()
    model.eval()
    with gpuwatch.watch(model) as handle, gpuwatch.watch() as other:
        model(good)
        assert gpuwatch.explain(model, bad).operation.op == "aten._to_copy.default"
        model(good)
        for each in (handle, other):
            assert [page.batch for page in each.pages()] == [0, 1]
            assert (each.anomalies, each.verdict().kind) == ([], "clean")
        with pytest.raises(gpuwatch.OverflowDetected):
            model(bad)
