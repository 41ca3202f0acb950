"""What the graph of a loss on a device has saved is kept until the loss's number has arrived, and read only if it is
still the same. The variable of the loss is told by sources alone."""

from __future__ import annotations

import gc
import importlib.util
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.events.alarm_evidence import SecondRun
from gpuwatch.core.events.read_tensors import OperandNumbers
from gpuwatch.tests.fakes.late_device import LateDevice
from gpuwatch.worker.explain.code_place import call_sites
from gpuwatch.worker.explain.kept_loss import KeptLoss, kept_loss
from gpuwatch.worker.explain.loss_graph import origin_of
from gpuwatch.worker.explain.loss_variable import loss_variable
from gpuwatch.worker.explain.saved_operands import outside_domain
from gpuwatch.worker.record.autograd_graph import ReturnedOutputs, next_node
from torch import nn

from ..conftest import use_late_device

ZEROS = torch.zeros(2, 3)
BAD = OperandNumbers("float32", [], None, "nan")


def keep(loss: torch.Tensor, *returned: ReturnedOutputs) -> KeptLoss | None:
    return kept_loss(loss, returned, False, sys._getframe())


def operation(kept: KeptLoss | None) -> str | None:
    """What it is, once the backward has freed the graph."""
    assert kept is not None
    found = origin_of(kept)
    return found.operation.op if found is not None else None


def weight(value: float = 1.0) -> torch.Tensor:
    return torch.full((2, 3), value, requires_grad=True)


def test_an_operation_is_found_when_the_backward_has_freed_the_graph():
    w = weight()
    loss = (w / ZEROS).sum()
    kept = keep(loss)
    loss.backward()
    assert origin_of(loss) is None
    assert operation(kept) == "aten.div.Tensor"


def test_so_is_one_with_a_list_of_tensors_and_one_that_takes_a_leaf():
    w = weight(200.0)
    loss = w[torch.tensor([1, 0])].exp().mean()
    kept = keep(loss)
    loss.backward()
    assert operation(kept) == "aten.exp.default"


def test_nodes_outside_of_their_domain_are_told_where_no_operation_is():
    w = weight(0.0)
    loss = torch.special.entr(w).sum() + (w / w.sum()).sum()  # of entr no rule is known
    kept = keep(loss)
    loss.backward()
    assert outside_domain(loss) == []
    assert kept is not None
    assert outside_domain(kept) == ["DivBackward0"]


def test_a_tensor_that_was_changed_since_is_not_read():
    w, divisor = weight(), torch.zeros(2, 3)
    loss = (w / divisor).sum()
    kept = keep(loss)
    loss.backward()
    divisor.add_(0)
    assert operation(kept) is None


def test_nor_is_one_whose_memory_was_given_back():
    w, divisor = weight(), torch.zeros(2, 3)
    loss = (w / divisor).sum()
    kept = keep(loss)
    loss.backward()
    divisor.untyped_storage().resize_(0)
    assert operation(kept) is None


def test_nor_is_a_weight_after_its_step():
    w = weight(200.0)
    optimizer = torch.optim.SGD([w], lr=0.0)
    loss = w.exp().mean()
    kept = keep(loss)
    loss.backward()
    optimizer.step()
    assert operation(kept) is None


@pytest.mark.parametrize("handed", ["itself", "a view", "without its gradient"])
def test_nor_is_a_weight_after_a_fused_step_which_leaves_no_mark(handed):
    w = weight(2e19)
    optimizer = torch.optim.SGD([w], lr=2.0, fused=True)
    used = {"itself": w, "a view": w[:1], "without its gradient": w.detach()}[handed]
    loss = (used * weight(2e19)).sum() + w.sum()
    kept = keep(loss)
    loss.backward()
    optimizer.step()
    assert kept is not None
    kept.forget_weights([])
    assert operation(kept) is None


class _OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def test_nothing_is_kept_of_a_graph_with_a_node_of_another_library():
    assert keep(_OwnFunction.apply(weight()).sum()) is None


def test_nothing_is_kept_of_a_very_long_graph():
    w = weight()
    assert keep(sum((w * 2).sum() for _ in range(30))) is not None
    assert keep(sum((w * 2).sum() for _ in range(50))) is None


def test_large_tensors_are_not_kept():
    alive: list[weakref.ref[torch.Tensor]] = []
    for elements in (1 << 18, 1 << 21):  # 1 and 8 MiB
        w = torch.ones(elements, requires_grad=True)
        made = w * 2
        loss = made.exp().sum()
        kept = keep(loss)
        assert kept is not None
        storage = weakref.ref(made.untyped_storage())
        del made
        alive.append(storage)
        (exp, _), *_ = kept.grad_fn.next_functions
        assert exp is not None
        assert (exp._raw_saved_result is not None) == (elements == 1 << 18)


def test_a_large_weight_is_not_read_either_as_a_step_may_have_changed_it():
    loss = torch.full((1 << 21,), 200.0, requires_grad=True).exp().mean()
    kept = keep(loss)
    loss.backward()
    assert operation(kept) is None


def test_a_view_counts_as_all_of_its_memory():
    base = torch.zeros(1 << 21)
    loss = (weight() / base[:3]).sum()
    kept = keep(loss)
    loss.backward()
    assert operation(kept) is None


def test_no_more_than_16_mib_are_kept_of_one_loss():
    w = torch.ones(1 << 20, requires_grad=True)  # 4 MiB
    loss = sum((w / (w + number)).sum() for number in range(1, 8))
    kept = keep(loss)
    assert kept is not None
    saved = (part for node in kept.nodes for each in node._kept.values() for part in each.tensors)
    held = {part.data_ptr() for part in saved if part.numel() > 1}
    assert 1 <= len(held) <= 4


def large_output() -> tuple[torch.Tensor, ReturnedOutputs]:
    """What a module returned, which exp() makes inf of."""
    model, x = nn.Linear(3, 3), torch.ones(2, 3)
    nn.init.constant_(model.weight, 100.0)
    first = next_node()
    out = model(x)
    return out, ReturnedOutputs(first, next_node(), [(weakref.ref(out), 0)])


def test_a_module_is_not_looked_into_and_its_output_is_an_operand():
    out, returned = large_output()
    loss = out.exp().sum()
    kept = keep(loss, returned)
    loss.backward()
    assert operation(kept) == "aten.exp.default"


def test_an_output_of_a_module_that_was_changed_before_the_backward_is_no_operand():
    out, returned = large_output()
    loss = out.exp().sum()
    with torch.no_grad():
        out.add_(1)
    assert operation(keep(loss, returned)) is None


def test_an_output_of_a_module_that_is_gone_is_no_operand():
    out, returned = large_output()
    loss = out.exp().sum()
    del out
    assert operation(keep(loss, returned)) is None


# -- while it trains ----------------------------------------------------------------------------------------------


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    driver = LateDevice(3)
    use_late_device(monkeypatch, driver)
    return driver


def test_nothing_is_held_once_the_numbers_are_there(late, watch):
    watched = watch(on_overflow="abort")
    model = nn.Linear(3, 3)
    made: list[weakref.ref[Any]] = []
    for _ in range(4):
        out = model(torch.ones(2, 3))
        middle = out.sigmoid()
        made.append(weakref.ref(middle.untyped_storage()))
        (middle / torch.ones(2, 3)).sum().backward()
        del out, middle
    watched.settle()
    model(torch.ones(2, 3))
    gc.collect()
    assert [each() for each in made] == [None] * 4
    assert watched.faults == []


def run_until_the_step(sync, watched):
    """A loss of batch 1 that divides by 0."""
    model, divisor = nn.Linear(3, 3), torch.ones(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in range(2):
        if batch:
            divisor = torch.zeros(2, 3)
        out = model(torch.ones(2, 3))
        quotient = out.square() / divisor
        loss = quotient.mean()
        loss.backward()
        if not sync:
            watched.settle()
        optimizer.step()


@pytest.mark.parametrize("sync", [False, True])
def test_the_operation_its_line_and_the_variable_are_told(late, watch, sync):
    watched = watch(on_overflow="abort", sync=sync)
    with pytest.raises(
        OverflowDetected, match=r"in the loss, after the forward of batch 1; aten\.div\.Tensor made it at"
    ):
        run_until_the_step(sync, watched)
    (ran,) = watched.of(SecondRun)
    (alarm,) = watched.anomalies
    assert (ran.operation.op, ran.operation.code) == ("aten.div.Tensor", "quotient = out.square() / divisor")
    assert {told.name for told in alarm.again.script if told.is_bad} == {"quotient", "loss"}
    assert watched.faults == []


def test_a_loss_that_was_changed_after_its_backward_is_no_variable(late, watch):
    watched = watch(on_overflow="abort")
    loss = (nn.Linear(3, 3)(torch.ones(2, 3)) / torch.zeros(2, 3)).square().mean()
    loss.backward()
    with torch.no_grad():
        loss.mul_(0)
    watched.settle()
    (alarm,) = watched.anomalies
    assert alarm.again.script == []
    assert alarm.module == "(loss)"


def test_variables_are_not_read_once_the_script_has_gone_on(late, watch):
    """Another one is bad by then, and was not when the loss was computed."""
    watched = watch(on_overflow="abort")
    model, divisor = nn.Linear(3, 3), torch.zeros(2, 3)
    for batch in range(2):
        if batch:
            divisor = torch.full((2, 3), torch.nan)
            watched.settle()
            break
        loss = (model(torch.ones(2, 3)).square() / divisor).mean()
        loss.backward()
    (alarm,) = watched.anomalies
    assert [told.name for told in alarm.again.script] == ["loss"]
    assert divisor.isnan().all()


def test_a_batch_that_is_watched_from_the_start_has_what_was_tried_too(late, watch):
    watched = watch(on_overflow="abort", explain=1)
    with pytest.raises(OverflowDetected):
        run_until_the_step(False, watched)
    (ran,) = watched.of(SecondRun)
    assert (ran.operation.op, ran.operation.code) == ("aten.div.Tensor", "quotient = out.square() / divisor")
    assert ran.operation.trials


def test_no_numbers_of_a_weight_are_told_that_are_those_after_its_step(late, watch):
    watched = watch(on_overflow="abort")
    model, w = nn.Linear(3, 3), nn.Parameter(torch.full((2, 3), 2e19))
    optimizer = torch.optim.SGD([*model.parameters(), w], lr=2.0, fused=True)
    loss = model(torch.ones(2, 3)).sum() + w.square().sum()
    loss.backward()
    optimizer.step()
    watched.settle()
    assert watched.anomalies[0].module == "(loss)"
    assert watched.of(SecondRun) == []
    assert watched.faults == []


def test_the_operation_of_a_loss_whose_backward_begins_in_another_thread_is_not_told(late, watch):
    watched = watch(on_overflow="abort")
    has_begun, may_go_on = threading.Event(), threading.Event()
    mine = (nn.Linear(3, 3)(torch.ones(2, 3)).square() / torch.zeros(2, 3)).mean()
    out = nn.Linear(3, 3)(torch.ones(2, 3))
    other = out.clamp(100, 200).exp().mean()

    def wait(gradient):
        has_begun.set()
        may_go_on.wait()

    other.register_hook(wait)
    thread = threading.Thread(target=other.backward)

    def begin(gradient):
        thread.start()
        has_begun.wait()

    mine.register_hook(begin)
    mine.backward()
    watched.settle()
    ran = watched.of(SecondRun)
    may_go_on.set()
    thread.join()
    assert [each.operation.op for each in ran if each.operation is not None] == []
    assert watched.anomalies[0].module == "(loss)"


def test_a_later_alarm_is_not_told_with_the_operation_of_the_first(watch):
    watch(on_overflow="abort")
    model, said = nn.Linear(3, 3), list[str]()
    for batch in range(2):
        try:
            loss = (
                (model(torch.ones(2, 3)) / torch.zeros(2, 3)).mean() if not batch else model(torch.full((2, 3), 1e38))
            )
            loss.sum().mul(1e38).backward()
            model(torch.full((2, 3), torch.nan))
        except OverflowDetected as error:
            said.append(str(error))
    first, second = said
    assert "aten.div.Tensor made it" in first
    assert "made it" not in second


def test_the_line_of_another_backward_that_runs_by_then_is_not_told(late, watch):
    watched = watch(on_overflow="abort")
    model, divisor = nn.Linear(3, 3), torch.zeros(2, 3)

    def train():
        (model(torch.ones(2, 3)).square() / divisor).mean().backward()
        out = model(torch.ones(2, 3))
        out.register_hook(lambda gradient: watched.settle())
        (out.square() / torch.ones(2, 3)).mean().backward()

    with pytest.raises(OverflowDetected):
        train()
        watched.hooks.judging.raise_pending()
    (ran,) = watched.of(SecondRun)
    assert (ran.operation.op, ran.operation.code) == ("aten.div.Tensor", "")
    assert watched.faults == []


def test_nothing_is_kept_if_the_training_goes_on_after_an_overflow(late, watch, monkeypatch):
    kept: list[Any] = []
    watched = watch(on_overflow="continue")
    monkeypatch.setattr(watched.hooks._gradients.graphs.__class__, "keep", lambda self, loss: kept.append(loss))
    nn.Linear(3, 3)(torch.ones(2, 3)).sum().backward()
    assert kept == []


# -- the variable -------------------------------------------------------------------------------------------------

VARIABLES = {
    "at once": ("loss = w.sum()\n    loss.backward()", "loss", 2),
    "handed on": ("value = w.sum()\n    back(value)", "value", 2),
    "handed on by name": ("value = w.sum()\n    back(loss=value)", "value", 2),
    "to a method": ("value = w.sum()\n    Engine().backward(value)", "value", 2),
    "to a method whose object has another name": (
        "value, half = w.sum(), w\n    Odd().backward(value, half)",
        "value",
        2,
    ),
    "to a method of a class": ("value, engine = w.sum(), Engine()\n    Engine.backward(engine, value)", None, 0),
    "to a method by its own name": (
        "value, half = w.sum(), w\n    backward_of = Odd().backward_of\n    backward_of(value, half)",
        None,
        0,
    ),
    "to a static method": ("value, half = w.sum(), w\n    Odd().static(value, half)", "value", 2),
    "divided": ("loss = w.sum()\n    loss = loss / 2\n    loss.backward()", "loss", 3),
    "beside others": ("value = w.sum()\n    print(); value.backward(); print()", "value", 2),
    "no variable": ("w.sum().backward()", None, 0),
    "of a module of torch": ("value = w.sum()\n    autograd.backward(value)", None, 0),
    "in two branches": ("if w.sum() > 0:\n        loss = w.sum()\n    loss.backward()", None, 0),
    "changed on the way": ("value = w.sum()\n    halved(value)", "loss", -1),
    "beside another one": ("loss = w.sum()\n    loss = loss / 2; loss.backward()", None, 0),
    "in an expression": ("loss = w.sum()\n    [back(loss) for loss in (w * 2).sum().view(1)]", None, 0),
    "in a case": (
        "loss = None\n    match w:\n        case torch.Tensor():\n"
        "            loss = w.sum()\n            loss.backward()",
        "loss",
        5,
    ),
    "captured by a case": (
        "loss = None\n    match [w.sum()]:\n        case [loss]:\n            loss.backward()",
        None,
        0,
    ),
    "shared": (
        "loss = w\n    def summed():\n        nonlocal loss\n        loss = loss.sum()\n    summed()\n    back(loss)",
        None,
        0,
    ),
    "of two calls": ("loss = w.sum()\n    loss.backward(), (w * 2).sum().backward()", None, 0),
    "with a star": ("value = [w.sum()]\n    back(*value)", None, 0),
}


@pytest.mark.parametrize(("body", "name", "line"), VARIABLES.values(), ids=VARIABLES)
def test_the_variable_of_a_loss_is_told_if_it_is_certain(tmp_path: Path, monkeypatch, body, name, line):
    path = tmp_path / "script.py"
    path.write_text(
        f"""def run(w):
    {body}
def back(loss):
    loss.backward()
class Engine:
    def backward(self, loss, retain_graph=False):
        back(loss)
class Odd:
    def backward(engine, loss, half=None):
        back(loss)
    def backward_of(engine, loss, half):
        back(loss)
    @staticmethod
    def static(loss, half):
        back(loss)
def halved(loss):
    loss = loss / 2
    loss.backward()
import torch
from torch import autograd
"""
    )
    spec = importlib.util.spec_from_file_location("script", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    sites: list[Any] = []
    monkeypatch.setattr(
        torch.autograd, "_engine_run_backward", lambda *args, **kwargs: sites.append(call_sites(sys._getframe(1), 4))
    )
    script.run(weight())
    found = loss_variable(sites[0], BAD, ["DivBackward0"])
    if name is None:
        assert found is None
        return
    assert found is not None
    told, _ = found
    expected = path.read_text().splitlines().index("    loss = loss / 2") + 1 if line < 0 else line
    assert (told.name, told.line, told.nodes) == (name, expected, ["DivBackward0"])
