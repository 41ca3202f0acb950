"""`--every auto` in a rank: what is read of a batch that is left out, and what an overflow in it leads to."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref

import pytest
import torch
from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.events.alarm_evidence import SecondRun
from gpuwatch.core.events.own_limits import WatchChoice
from gpuwatch.core.recorder.layout import HeadField
from gpuwatch.core.recorder.told_forecasts import tell_forecasts
from gpuwatch.worker.record.value_jumps import FEWEST
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

X = torch.ones(2, 4)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = 1.0

    def forward(self, x):
        return x * self.by


class Bad(torch.autograd.Function):
    """Makes an inf in the backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1e38 * 1e38


class Larger(torch.autograd.Function):
    """Makes a gradient that is finite, and far larger than others."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1e6


class Guarded(nn.Sequential):
    bad = grows = draws = False
    fails: type[BaseException] | None = None

    def forward(self, x):
        if self.fails is not None:
            raise self.fails("no")
        x = super().forward(x)
        if self.draws:
            x = nn.functional.dropout(x, 0.5)
        return Bad.apply(x) if self.bad else Larger.apply(x) if self.grows else x


def net() -> Guarded:
    torch.manual_seed(0)
    return Guarded(nn.Linear(4, 4), Scale(), nn.Linear(4, 4))


def leave_out(watched) -> None:
    """From here on nearly all steps are left out."""
    pace = watched.hooks.progress.pace
    pace._settled, pace._every = True, 1 << 20


@pytest.fixture
def left_out(watch):
    """Makes a model that is watched and has trained for five steps. From here on nearly all steps are left out."""

    def begin(model=None, **options):
        watched = watch(every="auto", **options)
        model = model or net()
        train(model, 5)
        leave_out(watched)
        return watched, model

    return begin


def train(model, steps: int):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        made = model(X)
        (made if isinstance(made, torch.Tensor) else made[0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def hooks_of_torch() -> list[list[int]]:
    return [list(torch_module._global_forward_pre_hooks), list(torch_module._global_forward_hooks)]


def test_the_choice_is_recorded_and_the_batches_that_are_left_out_are_counted(watch):
    watched = watch(every="auto")
    train(net(), 60)
    (choice,) = watched.of(WatchChoice)
    assert (choice.where.batch, choice.alert) == (52, "")
    assert 24 <= watched.reader[HeadField.BATCHES_SKIPPED] <= 24 + 8
    assert watched.faults == []


def test_training_makes_the_same_bits(watch):
    plain = net()
    train(plain, 60)
    watched = watch(every="auto")
    model = net()
    train(model, 60)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    assert watched.faults == []


def test_an_overflow_in_a_batch_that_is_left_out_is_found_by_a_second_run(left_out):
    watched, model = left_out(on_overflow="abort")
    train(model, 3)
    model[1].by = 1e39
    with pytest.raises(OverflowDetected, match=r"forward of batch 8.*not inspected.*; aten.mul"):
        train(model, 1)
    (ran,) = watched.of(SecondRun)
    assert ran.operation is not None
    assert (ran.operation.module, ran.cls) == ("1", "Scale")
    assert watched.faults == []


def test_a_bad_weight_in_a_batch_that_is_left_out_names_no_operation(left_out):
    watched, model = left_out(on_overflow="abort")
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    with pytest.raises(OverflowDetected, match="not inspected"):
        train(model, 1)
    (ran,) = watched.of(SecondRun)
    assert ran.operation is None


def test_a_bad_gradient_in_a_batch_that_is_left_out_is_an_alarm_of_that_batch(left_out):
    watched, model = left_out(on_overflow="abort")
    model.bad = True
    with pytest.raises(OverflowDetected, match="backward of batch 5"):
        train(model, 1)
    (anomaly,) = watched.anomalies
    assert (anomaly.phase, anomaly.where.batch, anomaly.role) == ("backward", 5, "grad weight")
    assert all(parameter.isfinite().all() for parameter in model.parameters()), "no step has used it"


def test_what_made_a_bad_gradient_in_a_batch_that_is_left_out_is_found_by_a_second_run(left_out):
    watched, model = left_out(on_overflow="abort")
    train(model, 3)
    model.bad = True
    with pytest.raises(OverflowDetected, match=r"backward of batch 8.*; aten.mul"):
        train(model, 1)
    (ran,) = watched.of(SecondRun)
    assert ran.operation is not None, ran.unknown
    assert (ran.operation.module, ran.operation.code) == ("", "return gradient * 1e38 * 1e38")
    frames = watched.pages[-1].frames
    assert [frame.phase for frame in frames] == ["forward", "backward"], "what the root returned stands before it"
    assert all(row.finite for row in frames[0].outputs)
    assert watched.faults == []


@pytest.mark.parametrize("every", [1, 1000], ids=["watched", "left out"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_a_checkpointed_part_that_runs_again_is_no_call_of_the_model(watch, reentrant, every):
    """What is kept for a second run is the model's own call, and not that of the part."""

    class Checkpointed(Guarded):
        def forward(self, x):
            part = self[2]
            self[2] = nn.Identity()
            try:
                x = super().forward(x)
            finally:
                self[2] = part
            return checkpoint(part, x, use_reentrant=reentrant)

    torch.manual_seed(0)
    model = Checkpointed(nn.Linear(4, 4), Scale(), nn.Linear(4, 4))
    watched = watch(every=every, on_overflow="abort")
    train(model, 3)
    model.bad = True
    with pytest.raises(OverflowDetected, match="backward of batch 3"):
        train(model, 1)
    (ran,) = watched.of(SecondRun)
    assert (ran.unknown == "") is (ran.operation is not None)
    if ran.operation is not None:
        assert ran.operation.code == "return gradient * 1e38 * 1e38"
    assert (ran.operation is None) is reentrant, ran.unknown
    assert watched.reader[HeadField.BATCHES_SKIPPED] == (3 if every > 1 else 0)
    assert watched.faults == []


def test_a_model_that_raised_in_a_batch_that_is_left_out_is_not_kept(left_out):
    _, model = left_out()
    model.fails = ValueError
    with contextlib.suppress(ValueError):
        model(X)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_forward_that_draws_random_numbers_draws_the_same_ones_again(watch):
    watched = watch(every="auto", on_overflow="abort")
    model = net()
    model.draws = True
    train(model, 5)
    leave_out(watched)
    train(model, 3)
    model.bad = True
    with pytest.raises(OverflowDetected, match="backward of batch 8"):
        train(model, 1)
    (ran,) = watched.of(SecondRun)
    assert ran.operation is not None, ran.unknown
    assert watched.faults == []


def test_a_batch_that_is_left_out_takes_no_room_in_the_recorder(left_out):
    watched, model = left_out()
    train(model, 1)
    written = watched.reader[HeadField.SEGMENT]
    train(model, 20)
    assert watched.reader[HeadField.SEGMENT] == written
    assert watched.reader[HeadField.BATCH] == 25
    assert watched.reader.page(watched.reader[HeadField.PAGE]) is None, "the header names no page of an earlier batch"
    assert watched.faults == []


def test_a_gradient_that_a_hook_of_the_scripts_has_changed_in_place_explains_nothing(left_out):
    watched, model = left_out(on_overflow="abort")
    model.bad = True
    out = model(X)
    out.register_hook(lambda gradient: gradient.mul_(2))
    with pytest.raises(OverflowDetected, match="backward of batch 5"):
        (out * 1.0).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.01).step()
    (ran,) = watched.of(SecondRun)
    assert (ran.operation, ran.unknown) == (None, "the gradient of an output of the model was changed in place")
    assert watched.faults == []


def test_after_a_forecast_all_is_watched_for_a_while(left_out):
    watched, model = left_out()
    train(model, 2)
    assert watched.reader[HeadField.BATCHES_SKIPPED] == 2
    tell_forecasts(watched.hooks.progress.recorder.path, 1)
    train(model, 4)
    assert watched.reader[HeadField.BATCHES_SKIPPED] == 2
    (choice,) = watched.of(WatchChoice)
    assert (choice.every, choice.alert) == (1, "an overflow is forecast")


@pytest.mark.parametrize("device", ["host", "late"])
@pytest.mark.parametrize("where", ["output", "gradient"])
def test_after_a_jump_all_is_watched_for_a_while(request, left_out, where, device):
    if device == "late":
        request.getfixturevalue("late")
    watched, model = left_out()
    for _ in range(FEWEST):
        train(model, 1)
        watched.hooks.judging.finish()
    assert watched.of(WatchChoice) == []
    if where == "output":
        model[1].by = 1e4
    else:
        model.grows = True
    train(model, 1)
    watched.hooks.judging.finish()
    unseen = 0 if device == "host" else 1
    train(model, unseen)  # it compares what has arrived by then
    skipped = watched.reader[HeadField.BATCHES_SKIPPED]
    assert skipped == FEWEST + 1 + unseen
    train(model, 4)
    assert watched.reader[HeadField.BATCHES_SKIPPED] == skipped
    choice = watched.of(WatchChoice)[0]
    place = "output of the root module" if where == "output" else "grad weight of `0` (Linear)"
    assert (choice.every, choice.where.batch) == (1, 5 + FEWEST)
    assert choice.alert.startswith("a jump to "), choice.alert
    assert place in choice.alert
    assert watched.faults == []


def test_an_output_that_jumps_is_seen_beside_one_that_cannot_be_read(left_out):
    class Both(Guarded):
        def forward(self, x):
            return super().forward(x), torch.empty(2, device="meta")

    torch.manual_seed(0)
    watched, model = left_out(Both(nn.Linear(4, 4), Scale(), nn.Linear(4, 4)))
    train(model, FEWEST)
    assert watched.of(WatchChoice) == []
    model[1].by = 1e4
    train(model, 1)
    (choice,) = watched.of(WatchChoice)
    assert "a jump to " in choice.alert
    assert watched.faults == []


def test_a_number_of_batches_is_kept_to_whatever_jumps(watch):
    watched = watch(every=1000)
    model = net()
    train(model, 2 * FEWEST)
    model[1].by = 1e4
    train(model, 3)
    assert watched.reader[HeadField.BATCHES_SKIPPED] == 2 * FEWEST + 2
    assert watched.of(WatchChoice) == []


def test_torchs_tables_have_our_hooks_again_whatever_ends_the_forward(watch):
    watched = watch(every="auto")
    model = net()
    train(model, 5)
    before = hooks_of_torch()
    leave_out(watched)
    seen = []
    model[1].register_forward_hook(lambda *_: seen.append(hooks_of_torch()))
    train(model, 1)
    assert seen == [[[], []]], "no hook of ours within"
    assert hooks_of_torch() == before
    assert not model._forward_hooks
    model.fails = ValueError
    with pytest.raises(ValueError, match="no"):
        model(X)
    assert hooks_of_torch() == before
    model.fails = None
    train(model, 1)
    assert not model._forward_hooks
    model.fails = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        model(X)
    model.fails = None
    train(model, 2)
    assert hooks_of_torch() == before
    assert watched.faults == []


def test_a_copy_of_a_model_that_raised_has_a_hook_that_does_nothing(left_out):
    watched, model = left_out()
    model.fails = ValueError
    with pytest.raises(ValueError, match="no"):
        model(X)
    model.fails = None
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert torch.equal(copied(X), loaded(X))
    assert watched.faults == []


def test_hooks_of_others_keep_their_place(left_out):
    watched, model = left_out()
    other = torch_module.register_module_forward_hook(lambda *_: None)
    try:
        before = hooks_of_torch()
        train(model, 3)
        assert hooks_of_torch() == before
    finally:
        other.remove()
    assert watched.faults == []
