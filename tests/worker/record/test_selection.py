"""`--modules`, `--ignore`, `--every`: what is looked at, and what is no alarm."""

from __future__ import annotations

import math

import pytest
import torch
from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.events.alarms import IgnoredAlarm
from gpuwatch.core.frames import RowMark
from gpuwatch.core.recorder.layout import HeadField
from gpuwatch.worker.record.names import ModuleSelection
from torch import nn

from ..models import Block, Multiplies
from ..models import block_net as net

X = torch.ones(3, 4)


# -- patterns -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "module", "watched"),
    [
        ([], "encoder.0.fc", True),
        (["encoder.*"], "encoder.0.fc", True),
        (["encoder"], "encoder.0", False),
        (["*.fc"], "encoder.0.fc", True),
        (["*.fc"], "encoder.0.fc2", False),
        (["encoder.?.fc"], "encoder.7.fc", True),
        (["encoder.[0-3].*"], "encoder.2.fc", True),
        (["encoder.[0-3].*"], "encoder.4.fc", False),
        (["a", "b"], "b", True),
        (["*"], "", True),
    ],
)
def test_modules_by_pattern(patterns, module, watched):
    assert ModuleSelection(patterns, []).watches(module) is watched


@pytest.mark.parametrize(
    ("pattern", "module", "role", "covers"),
    [
        ("m", "m", "output", True),
        ("m", "m", "grad weight", True),
        ("m", "m2", "output", False),
        ("m:output", "m", "output", True),
        ("m:output", "m", "output[0]", False),
        ("m:output[0]", "m", "output[0]", True),
        ("m:output[0]", "m", "output0", False),
        ("m:output*", "m", "output[1].logits", True),
        ("m:grad *", "m", "grad output[0]", True),
        ("m:output[?]", "m", "output[7]", True),
        ("*.attn:output", "layers.3.attn", "output", True),
        ("*:weight", "", "weight", True),
        (":output", "", "output", True),
        (":output", "m", "output", False),
    ],
)
def test_rules_by_pattern(pattern, module, role, covers):
    assert ModuleSelection([], ["other:*", pattern]).ignored_by(module, role) == (pattern if covers else None)


# -- --modules ----------------------------------------------------------------------------------------------------


def test_only_the_modules_that_were_asked_for_have_frames(watch):
    watched = watch(modules=["0.fc*"])
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    optimizer.step()
    frames = [frame for frame in watched.last.frames if frame.phase != "loss"]
    assert {frame.module for frame in frames} == {"0.fc1", "0.fc2"}
    phases = [(frame.phase, frame.module) for frame in frames if frame.phase != "backward"]
    assert phases == [(phase, name) for phase in ("forward", "optimizer") for name in ("0.fc1", "0.fc2")]
    assert len(watched.frames("backward")) == 6
    assert [frame.parent for frame in watched.frames("forward")] == ["0", "0"]


def test_what_is_not_asked_for_raises_no_alarm(watch):
    watched = watch(on_overflow="abort", modules=["0"])
    nn.Sequential(nn.Identity(), Multiplies())(X)
    assert watched.anomalies == []


# -- --ignore -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["1", "1:output", "1:out*", "*:output"])
def test_what_a_rule_covers_is_recorded_and_counted_and_no_alarm(watch, pattern):
    watched = watch(on_overflow="abort", ignore=[pattern])
    model = nn.Sequential(nn.Identity(), Multiplies())
    for _ in range(3):
        model(X)
    (event, *_) = watched.of(IgnoredAlarm)
    assert (event.pattern, event.module, event.role, event.value) == (pattern, "1", "output", "+inf")
    assert watched.row("1", "output").mark == RowMark.IGNORED
    assert watched.row("1", "output").posinf
    assert watched.row("", "output").value == watched.row("1", "output").value, "the same tensor"
    assert watched.reader[HeadField.IGNORED] == (6 if pattern == "*:output" else 3)
    assert [e.module for e in watched.of(IgnoredAlarm)].count("1") == 1


def test_what_becomes_of_it_further_on_is_an_alarm(watch):
    watched = watch(ignore=["1"])
    nn.Sequential(nn.Identity(), Multiplies(), Multiplies(0.0))(X)
    assert [(a.module, a.value) for a in watched.anomalies] == [("2", "nan")]


def test_one_of_several_outputs(watch):
    class Two(nn.Module):
        def forward(self, x):
            return x * math.inf, x * self.factor

    watched = watch(on_overflow="abort", ignore=["m:output[0]"])
    model = nn.ModuleDict({"m": Two()})
    model["m"].factor = 1.0
    model.forward = lambda x: model["m"](x)[1]
    model(X)
    model["m"].factor = math.nan
    with pytest.raises(OverflowDetected, match=r"nan in output\[1\] of `m`"):
        model(X)
    assert [(e.role, e.pattern) for e in watched.of(IgnoredAlarm)] == [("output[0]", "m:output[0]")]


def test_a_weight_that_a_rule_covers(watch):
    watched = watch(on_overflow="abort", ignore=["1:weight", "1:output", ":output"])
    model = net()
    with torch.no_grad():
        model[1].weight[0, 0] = math.nan
    model(X)
    assert [(e.module, e.role) for e in watched.of(IgnoredAlarm)] == [("1", "weight"), ("1", "output"), ("", "output")]


# -- --every ------------------------------------------------------------------------------------------------------


def test_every_third_batch_has_frames(watch, measured):
    watched = watch(every=3)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    looked = []
    for _ in range(7):
        model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        looked.append(len(measured))
        measured.clear()
    batches = [page.batch for page in watched.pages if page.frames]
    assert batches == [0, 3, 6]
    assert looked[1] == looked[2] == looked[4] == 2, "what the model returned, and one gradient"
    assert looked[0] > 10
    assert watched.reader[HeadField.BATCHES_SKIPPED] == 4
    assert watched.reader[HeadField.STEP] == 7
    assert watched.reader[HeadField.HAS_FRAMES] == 1
    assert watched.faults == []


@pytest.mark.parametrize(("modules", "is_told"), [(["no_such", "1.*"], True), (["no_such", "0"], False), ([], False)])
def test_patterns_that_match_nothing_are_told_at_once(watch, capfd, modules, is_told):
    watched = watch(modules=modules)
    model = net()
    for _ in range(5):
        model(X).sum().backward()
    told = [line for line in capfd.readouterr().err.splitlines() if "matches" in line]
    expected = (
        "gpuwatch: no module that was called matches `no_such` and `1.*` (modules=): none is watched; modules of "
        "Sequential are `0`, `0.fc1`, `0.fc2` [GW508]"
    )
    assert told == [expected] * is_told
    assert watched.faults == []


@pytest.mark.parametrize(("modules", "has_frames"), [(["0"], 1), (["no_such"], 0)])
def test_whether_any_batch_has_a_frame_is_known_though_the_last_ones_have_none(watch, modules, has_frames):
    watched = watch(every=100, modules=modules)
    model = net()
    for _ in range(5):
        model(X).sum().backward()
    assert not any(page.frames for page in watched.pages if page.batch)
    assert watched.reader[HeadField.HAS_FRAMES] == has_frames


def test_a_batch_that_is_left_out_is_looked_at_from_outside(watch):
    watched = watch(on_overflow="abort", every=10)
    model = nn.Sequential(nn.Identity(), Multiplies(1.0))
    model(X)
    model[1].factor = math.nan
    expected = r"nan in output of the root module \(Sequential\), forward of batch 1 \(not inspected"
    with pytest.raises(OverflowDetected, match=expected):
        model(X)
    (anomaly,) = watched.anomalies
    assert (anomaly.module, anomaly.cause) == ("", "not inspected: --every 10")


def test_traced_batches_are_never_left_out(watch):
    watched = watch(every=5, trace_batches=[2, 3])
    model = net()
    for _ in range(7):
        model(X)
    assert [page.batch for page in watched.pages if page.frames] == [0, 2, 3, 5]


def test_an_idle_batch_under_a_checkpoint(watch):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    watched = watch(every=2)
    model = Checkpointed()
    for _ in range(4):
        model(X).sum().backward()
    with_frames = [page for page in watched.pages if page.frames]
    assert [page.batch for page in with_frames] == [0, 2]
    assert [sum(f.phase == "recompute" for f in page.frames) for page in with_frames] == [3, 3]
    assert watched.faults == []


def test_an_exception_in_a_batch_that_is_left_out(watch):
    class Fails(nn.Module):
        def forward(self, x):
            if x is None:
                raise ValueError("no")
            return x * 1

    watched = watch(every=2)
    model = nn.Sequential(Fails())
    model(X)
    with pytest.raises(ValueError, match="no"):
        model(None)
    nn.Linear(4, 4)(X)
    model(X)
    assert [(page.root, page.batch) for page in watched.pages if page.frames] == [
        ("Sequential", 0),
        ("Linear", 0),
        ("Sequential", 2),
    ]
    assert watched.faults == []


def test_two_roots_leave_out_their_own_batches(watch):
    watched = watch(every=2)
    left, right = nn.Linear(4, 4), nn.Linear(4, 4)
    for model in (left, right, left, left, right, right):
        model(X)
    assert [(page.root, page.batch) for page in watched.pages if page.frames] == [
        ("Linear", 0),
        ("Linear#2", 0),
        ("Linear", 2),
        ("Linear#2", 2),
    ]
