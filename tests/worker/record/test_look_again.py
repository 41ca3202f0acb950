"""The second look that the first alarm of a rank leads to, on the host, on a late device and in a compiled graph."""

from __future__ import annotations

import enum
import hashlib
import math

import pytest
import torch
from gpuwatch.core.events.alarm_evidence import BatchInputs
from gpuwatch.core.events.looked_again import BadWeight, HeldValue, LookedAgain, OwnCodeModule
from gpuwatch.core.events.own_limits import NotLookedInto
from torch import nn

pytestmark = pytest.mark.quick_here(11)


class Rotary(nn.Module):
    """With a buffer that nobody has initialised."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("inv_freq", torch.full((4,), math.nan))
        self.register_buffer("fine", torch.ones(4))

    def forward(self, x):
        return x * self.weight * self.inv_freq


@pytest.fixture(params=["host", "late"])
def path(request):
    if request.param == "late":
        request.getfixturevalue("late")
    return request.param


def _settle(watched):
    watched.settle()
    assert watched.faults == []


def test_the_first_alarm_tells_of_weights_and_bad_buffers(watch, path):
    watched = watch()
    model = nn.Sequential(nn.Linear(4, 4), Rotary())
    for _ in range(2):
        model(torch.randn(2, 4))
    _settle(watched)
    first, second = watched.anomalies
    assert first.module == "1"
    # a graph of which no backward begins is not seen from a device
    own_code = [OwnCodeModule("1", "Rotary", "MulBackward0")] if path == "host" else []
    assert first.again == LookedAgain(
        weights={"weight": "finite"},
        buffers={"inv_freq": "nan"},
        own_code=own_code,
        own_code_of="output",
        bad_before=[HeldValue("1", "Rotary", "inv_freq", "nan")],
    )
    assert second.again is None, "one look is enough"


@pytest.mark.parametrize("compiled", [False, True])
def test_a_weight_that_was_changed_without_a_trace_is_found(watch, compiled):
    """`.data` raises no version: the numbers of after the last step are still those that are known."""
    watched = watch()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in range(3):
        if batch == 2:
            model[1].weight.data[0, 0] = math.nan
        called(torch.randn(2, 4)).sum().backward()
        if batch < 2:
            optimizer.step()
            optimizer.zero_grad()
    _settle(watched)
    first = watched.anomalies[0]
    assert (first.where.batch, first.module) == (2, "1")
    assert first.again is not None
    assert first.again.weights == {"weight": "nan", "bias": "finite"}
    assert first.again.same_step


def test_autocast_is_told(watch):
    watched = watch()
    model = nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.full((2, 4), math.inf))
    _settle(watched)
    assert watched.anomalies[0].again.autocast == "bfloat16"


class _Status(enum.Enum):
    """As DeepSpeed's ZeroParamStatus."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2


def _released(weight, whole) -> None:
    """As ZeRO 3 leaves a parameter outside of its module's call; `whole` keeps its elements."""
    whole.append(weight.data)
    weight.data, weight.ds_status = torch.empty(0), _Status.NOT_AVAILABLE


@pytest.mark.parametrize("memory", ["none", "another one's"])
def test_a_weight_that_zero_has_released_has_not_changed(watch, memory):
    watched = watch()
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), Rotary())
    weight, whole = model[0].weight, []
    weight.ds_id, weight.ds_status = 0, _Status.AVAILABLE
    if memory == "none":
        model[0].register_forward_hook(lambda *_: _released(weight, whole))
    else:
        model[0].register_forward_hook(lambda *_: setattr(weight, "ds_status", _Status.NOT_AVAILABLE))
        model[1].register_forward_hook(lambda *_: weight.data.fill_(7.0))
    with torch.no_grad():
        model(torch.randn(2, 4))
    _settle(watched)
    assert watched.anomalies[0].again.changed == []


class _Around(nn.Module):
    """Runs compiled code inside of its own, uncompiled forward, as a model does whose outer frame was broken."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.run = [torch.compile(self.inner, backend="eager")]

    def forward(self, x):
        return self.run[0](x)


def test_compiled_code_that_is_not_looked_into_is_told(watch):
    watched = watch()
    model = _Around()
    for _ in range(2):
        model(torch.randn(2, 4))
    frames = {frame.module for frame in watched.frames("forward")}
    assert not frames & {"inner.0", "inner.1"}
    told = watched.of(NotLookedInto)
    assert len(told) == 1, "once"
    assert (told[0].module, told[0].cls) == ("<OptimizedModule>", "Sequential")
    assert watched.faults == []


def test_what_the_model_was_handed_can_be_found_again(watch):
    watched = watch()
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    batches = [torch.randn(2, 4) for _ in range(4)]
    batches[2][1, 1] = batches[3][0, 0] = math.nan
    for batch in batches:
        model(batch).sum().backward()
        optimizer.step()
    (inputs,) = watched.of(BatchInputs)
    expected = hashlib.blake2b(batches[2].view(torch.uint8).numpy(), digest_size=8).hexdigest()
    assert (inputs.where.batch, inputs.digests) == (2, {"input[0]": expected})
    assert inputs.rows == {"input[0]": [1]}
    last = watched.anomalies[0].again.optimizer
    assert (last.cls, last.settings["lr"]) == ("torch.optim.adamw.AdamW", 0.25)
    assert watched.faults == []


def test_a_weight_upstream_that_was_changed_without_a_trace_is_told(watch, path):
    watched = watch()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for batch in range(2):
        if batch == 1:
            model[0].weight.data.fill_(1e37)
            model[2].weight.data.fill_(1e38)
        model(torch.ones(2, 4))
    _settle(watched)
    first = watched.anomalies[0]
    assert first.module == "2"
    (changed,) = first.again.changed
    assert changed.startswith("weight of `0` (Linear), abs max ")
    assert changed.endswith(" then, 1.00e+37 now")
    assert first.again.bad_weight is None


def test_the_weight_upstream_that_is_not_finite_any_more_is_told_by_itself(watch):
    """As in compiled code that is not inspected: only the model's own output is seen."""
    watched = watch()
    model = _Around()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in range(3):
        if batch == 2:
            model.inner[1].weight.data[0, 0] = math.nan
        model(torch.ones(2, 4)).sum().backward()
        if batch < 2:
            optimizer.step()
            optimizer.zero_grad()
    _settle(watched)
    again = watched.anomalies[0].again
    (changed,) = again.changed
    assert changed.startswith("weight of `inner.1` (Linear), abs max ")
    assert changed.endswith(" then, nan now")
    assert again.bad_weight == BadWeight("inner.1", "Linear", "weight", "nan", "float32")


def test_a_weight_that_has_been_nan_for_long_was_not_changed(watch, path):
    watched = watch(ignore=("0:weight",))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight.fill_(math.nan)
    for _ in range(2):
        model(torch.ones(2, 4))
    _settle(watched)
    assert watched.anomalies[0].again.changed == []


def _fail(*_args):
    raise RuntimeError("a part of ours that fails")


def test_an_alarm_is_recorded_even_if_the_second_look_at_it_fails(watch, path):
    watched = watch()
    watched.hooks.judging.look_again = _fail
    nn.Sequential(nn.Linear(4, 4), Rotary())(torch.randn(2, 4))
    watched.settle()
    [first] = watched.anomalies
    assert (first.module, first.again) == ("1", None)
    [fault] = watched.faults
    assert (fault.part, "a part of ours that fails" in fault.message) == ("a second look", True)


@pytest.mark.parametrize("part", ["optimizer_of", "on_bad_weight"])
def test_an_alarm_of_a_weight_is_recorded_even_if_what_is_told_beside_it_fails(watch, path, part):
    watched = watch()
    setattr(watched.hooks.judging, part, _fail)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=math.inf)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    watched.settle()
    assert watched.anomalies[0].phase == "optimizer"
    assert any("a part of ours that fails" in fault.message for fault in watched.faults)
