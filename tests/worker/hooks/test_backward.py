"""The backward: gradients of what modules returned, and of parameters, in the order in which they come."""

from __future__ import annotations

import copy
import gc
import io
import warnings

import pytest
import torch
from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.events.alarms import RangeWarning
from gpuwatch.core.frames import RowMark
from gpuwatch.core.judge import anomaly_of_page
from gpuwatch.core.recorder.layout import HeadField
from gpuwatch.worker.hooks.backward import _GraphRecord
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..models import tanh_net as net

pytestmark = pytest.mark.quick_here(32)

X = torch.ones(3, 4)
BACKWARD = ("backward",)


class Bad(torch.autograd.Function):
    """Passes its input on, and a bad gradient back."""

    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.value, None


class BadBackward(nn.Module):
    def __init__(self, value=float("inf")) -> None:
        super().__init__()
        self.value = value

    def forward(self, x):
        return Bad.apply(x, self.value)


def same(rows, gradients) -> None:
    """Rows hold the abs min and max of these gradients."""
    assert [(row.abs_min, row.abs_max) for row in rows] == [
        (g.abs().min().item(), g.abs().max().item()) for g in gradients
    ]


# -- order and numbers --------------------------------------------------------------------------------------------


def test_gradients_come_in_causal_order_last_module_first(watch):
    watched = watch()
    net()(X).sum().backward()
    rows = watched.rows("backward")
    # the root returns what its last module returned: one tensor, and one row, under the name of who made it
    outputs = [row for row in rows if row[1] == "grad output"]
    assert outputs == [("2", "grad output"), ("1", "grad output"), ("0", "grad output")]
    for module in ("2", "0"):
        own = {(module, "grad weight"), (module, "grad bias")}
        assert own < set(rows)
        assert all(rows.index((module, "grad output")) < rows.index(row) for row in own)
    assert rows.index(("2", "grad weight")) < rows.index(("0", "grad weight"))
    assert len(rows) == 7
    assert [(frame.depth, frame.parent, len(frame.rows)) for frame in watched.frames("backward")] == [(0, None, 1)] * 7
    assert watched.faults == watched.anomalies == []


def test_gradient_rows_are_in_the_page_of_their_forward_after_its_frames(watch):
    watched = watch()
    net()(X).sum().backward()
    (page,) = watched.pages
    assert [frame.index for frame in page.frames] == list(range(len(page.frames)))
    assert [frame.phase for frame in page.frames] == ["forward"] * 4 + ["loss"] + ["backward"] * 7


def test_a_parameters_local_gradient_is_its_grad(watch):
    watched = watch()
    model = net()
    model(torch.randn(3, 4)).square().sum().backward()
    for name, parameter in model.named_parameters():
        module, _, short = name.rpartition(".")
        row = watched.row(module, f"grad {short}")
        same([row], [parameter.grad])
        assert (row.shape, row.dtype, row.mark) == (list(parameter.shape), "float32", 0)


def test_the_gradient_of_an_output_is_torchs_own(watch):
    watched = watch()
    model = net()
    kept = []
    hidden = model[0](X)
    watched.hooks.detach()
    hidden.register_hook(kept.append)  # what torch hands to a hook of the user's
    watched = watch()
    hidden = model[0](X)
    hidden.register_hook(kept.append)
    model[2](hidden.tanh()).sum().backward()
    same([watched.row("", "grad output", page=0)], [kept[0]])


def test_outputs_by_their_names(watch):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            x = self.fc(x)
            return {"logits": x * 2, "aux": (x * 3, x.detach())}

    watched = watch()
    out = Two()(X)
    (out["logits"].sum() + out["aux"][0].sum()).backward()
    names = {role for module, role in watched.rows("backward") if module == ""}
    assert names == {"grad output.logits", "grad output.aux[0]"}


def test_the_header_says_backward_while_it_runs(watch):
    watched = watch()
    model = net()
    seen = []
    out = model[0](X)
    out.register_hook(lambda _: seen.append(watched.reader.state().phase))
    model[2](out).sum().backward()
    assert seen == ["backward"]


# -- tied, accumulated, twice, of second order --------------------------------------------------------------------


def test_tied_weights_have_one_gradient_row_under_their_first_name(watch):
    watched = watch()
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    model(X).sum().backward()
    assert [row for row in watched.rows("backward") if row[1] == "grad weight"] == [("0", "grad weight")]
    same([watched.row("0", "grad weight")], [model[0].weight.grad])


def test_tied_weights_of_which_one_module_is_watched(watch):
    watched = watch(modules=["2"])
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    model(X).sum().backward()
    assert watched.rows("backward") == [("2", "grad output"), ("2", "grad weight")]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert watched.rows("optimizer") == [("2", "weight")]


def test_accumulated_gradients_are_rows_of_the_batch_that_added_to_them(watch):
    watched = watch()
    model = nn.Linear(4, 2)
    sums = []
    for _ in range(3):
        model(X).sum().backward()
        sums.append(model.weight.grad.clone())
    same([watched.row("", "grad weight", page=number) for number in range(3)], sums)


def test_two_forwards_then_two_backwards_keep_their_pages_apart(watch):
    watched = watch()
    model = nn.Linear(4, 2)
    first, second = model(X), model(2 * X)
    second.sum().backward()
    first.sum().backward()
    expected = [("", "grad output"), ("", "grad weight"), ("", "grad bias")]
    for page in (0, 1):
        assert sorted(watched.rows("backward", page=page)) == sorted(expected)
    assert watched.row("", "grad weight", page=1).abs_max == 6
    assert watched.row("", "grad weight", page=0).abs_max == 9, "what was there, and 3 more"
    assert watched.faults == []


def test_a_graph_that_is_run_twice_has_its_rows_twice(watch):
    watched = watch()
    loss = net()(X).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    rows = watched.rows("backward")
    assert rows[:7] == rows[7:]
    assert len(watched.pages) == 1


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_double_backward_gives_the_same_numbers_and_rows_of_both(watch):
    def penalty(model) -> list[torch.Tensor]:
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [p.grad for p in model.parameters()]

    plain = penalty(net())
    watched = watch()
    ours = penalty(net())
    assert all(torch.equal(left, right) for left, right in zip(plain, ours, strict=True))
    assert watched.rows("backward").count(("0", "grad output")) == 2
    assert watched.rows("backward").count(("0", "grad weight")) == 1, "only the second one goes to the parameters"
    assert watched.faults == []


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_that_have_a_graph_themselves(watch):
    watched = watch()
    model = net()
    model(X).square().sum().backward(create_graph=True)
    norm = sum(p.grad.square().sum() for p in model.parameters())
    for p in model.parameters():
        p.grad = None
    norm.backward()
    assert watched.rows("backward").count(("0", "grad weight")) == 2
    assert watched.faults == []


def test_autograd_grad_alone_has_the_rows_of_outputs(watch):
    watched = watch()
    x = X.clone().requires_grad_()
    torch.autograd.grad(net()(x).sum(), x)
    assert {role for _, role in watched.rows("backward")} == {"grad output"}


# -- what gets no hook --------------------------------------------------------------------------------------------


def hooks_of(tensor) -> int:
    """Those that record a gradient. What a root returns has one more, which only remembers the graph."""
    return sum(
        not isinstance(getattr(hook, "record", None), _GraphRecord) for hook in (tensor._backward_hooks or {}).values()
    )


def test_leaf_outputs_get_no_hooks_and_none_pile_up(watch):
    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(3, 4))
            self.register_buffer("mask", torch.ones(3, 4))
            self.loose = torch.ones(3, 4, requires_grad=True)

        def forward(self, x):
            return self.table, self.mask, x, self.loose

    watched = watch()
    model = Gives()
    x = X.clone().requires_grad_()
    for _ in range(5):
        table, _, same_x, loose = model(x)
        (table + same_x + loose).sum().backward()
    assert [hooks_of(tensor) for tensor in (model.table, model.mask, x, model.loose)] == [0, 0, 0, 0]
    assert len(model.table._post_accumulate_grad_hooks) == 1
    assert watched.rows("backward") == [("", "grad table")]
    assert watched.faults == []


def test_what_is_passed_through_has_one_row_under_the_name_of_its_maker(watch):
    watched = watch()
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Identity())
    out = model(X)
    assert hooks_of(out) == 1
    out.sum().backward()
    assert [row for row in watched.rows("backward") if row[1] == "grad output"] == [("0", "grad output")]


def test_an_output_that_is_kept_over_many_batches_gets_no_more_hooks(watch):
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.cache = None

        def forward(self, x):
            if self.cache is None:
                self.cache = self.fc(x)
            return self.cache

    watched = watch()
    model = Cached()
    for _ in range(20):
        model(X).sum().backward(retain_graph=True)
    assert hooks_of(model.cache) == 1
    assert [row for row in watched.rows("backward") if row[1] == "grad output"] == [("", "grad output")]
    assert watched.faults == []


def test_a_parameter_has_one_hook_however_many_batches(watch):
    watched = watch()
    model = net()
    for _ in range(5):
        model(X).sum().backward()
    assert [len(p._post_accumulate_grad_hooks) for p in model.parameters()] == [1] * 4
    watched.hooks.detach()
    assert [len(p._post_accumulate_grad_hooks or {}) for p in model.parameters()] == [0] * 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_are_no_hooks(watch, mode):
    watched = watch()
    with mode():
        out = net()(X)
    assert hooks_of(out) == 0
    assert watched.faults == []


def test_with_grads_unwatched_nothing_is_hooked(watch):
    watched = watch(watch=("forward", "weights"))
    model = net()
    out = model(X)
    out.sum().backward()
    assert hooks_of(out) == 0
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    assert watched.rows("backward") == []


def test_grads_alone_can_be_watched(watch):
    watched = watch(watch=("grads",))
    model = net()
    model(X).sum().backward()
    assert {role for _, role in watched.rows("backward")} == {"grad weight", "grad bias"}
    assert watched.rows("forward") == []


# -- in place, views ----------------------------------------------------------------------------------------------


class InPlace(nn.Module):
    def __init__(self, change) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.change = change

    def forward(self, x):
        return self.head(self.change(self.fc(x)))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.mul_(2),
        lambda x: x.relu_(),
        lambda x: x.view(-1).mul_(3).view(3, 4),
        lambda x: x.chunk(2)[0],
        lambda x: x[:, :4].add_(1),
        lambda x: x.t().t().mul_(2),
        nn.ReLU(inplace=True),
        nn.Dropout(0.0, inplace=True),
    ],
)
def test_outputs_that_are_changed_or_viewed_afterwards_train_as_ever(watch, change):
    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(5)
        model = InPlace(change)
        model(X).sum().backward()
        return [p.grad for p in model.parameters()]

    plain = gradients()
    watched = watch()
    ours = gradients()
    assert all(torch.equal(left, right) for left, right in zip(plain, ours, strict=True))
    assert ("fc", "grad output") in watched.rows("backward")
    assert watched.faults == []


def test_modules_that_return_views_of_one_tensor(watch):
    class Split(nn.Module):
        def forward(self, x):
            return x.unbind(0)

    def gradient() -> torch.Tensor:
        model = nn.Sequential(nn.Linear(4, 4), Split())
        with torch.no_grad():
            model[0].weight.fill_(0.5)
        first, second, _ = model(X)
        (first * second).sum().backward()
        return model[0].weight.grad

    torch.manual_seed(1)
    plain = gradient()
    watched = watch()
    torch.manual_seed(1)
    assert torch.equal(gradient(), plain)
    assert {role for module, role in watched.rows("backward") if module == "1"} == {"grad output[0]", "grad output[1]"}


# -- alarms -------------------------------------------------------------------------------------------------------


def test_a_bad_gradient_is_the_batchs_anomaly_and_the_first_one_only(watch):
    watched = watch()
    model = nn.Sequential(nn.Linear(4, 4), BadBackward(), nn.Linear(4, 2))
    for _ in range(2):
        model(X).sum().backward()
    assert [(a.module, a.cls, a.phase, a.role, a.value, a.where.batch) for a in watched.anomalies] == [
        ("0", "Linear", "backward", "grad output", "+inf", 0),
        ("0", "Linear", "backward", "grad output", "+inf", 1),
    ]
    (first, _) = watched.anomalies
    (frame,) = [frame for frame in watched.pages[0].frames if frame.index == first.frame]
    assert (frame.module, [row.role for row in frame.rows]) == ("0", ["grad output"])
    assert (first.shape, first.dtype) == ([3, 4], "float32")


def test_a_gradient_that_overflows_in_a_parameter_is_named(watch):
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(1e-30))

        def forward(self, x):
            return x * self.weight

    watched = watch()
    Scale()(X * 1e30).mul(1e10).sum().backward()
    assert [(a.phase, a.role) for a in watched.anomalies] == [("backward", "grad weight")]


def test_after_a_bad_backward_the_job_ends_at_the_step_and_not_after_it(watch):
    watched = watch(on_overflow="abort")
    model = nn.Sequential(nn.Linear(4, 4), BadBackward(float("nan")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    model(X).sum().backward()
    with pytest.raises(OverflowDetected, match=r"nan in grad output of `0` \(Linear\), backward of batch 0"):
        optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert watched.reader.abort == 4


def test_without_an_optimizer_the_job_ends_at_the_next_forward(watch):
    watch(on_overflow="abort")
    model = nn.Sequential(nn.Linear(4, 4), BadBackward())
    model(X).sum().backward()
    with pytest.raises(OverflowDetected):
        model(X)


def test_with_sync_the_backward_itself_ends(watch):
    watch(on_overflow="abort", sync=True)
    model = nn.Sequential(nn.Linear(4, 4), BadBackward())
    loss = model(X).sum()
    with pytest.raises(OverflowDetected, match="grad output of `0`"):
        loss.backward()
    assert model[0].weight.grad is None, "it did not get so far"


def test_a_rule_hides_a_gradient(watch):
    watched = watch(ignore=["0:grad *"])
    model = nn.Sequential(nn.Linear(4, 4), BadBackward())
    model(X).sum().backward()
    assert watched.anomalies == []
    assert watched.row("0", "grad output").mark == RowMark.IGNORED
    assert watched.reader[HeadField.IGNORED] == 3, "the output, the weight, the bias"


# -- errors of the script's ---------------------------------------------------------------------------------------


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("in the backward")


def test_an_exception_in_the_backward_passes_and_the_next_batch_is_fine(watch):
    watched = watch(on_overflow="abort")
    model = net()
    with pytest.raises(ArithmeticError, match="in the backward"):
        Raises.apply(model[0](X)).sum().backward()
    model(X).sum().backward()
    assert len(watched.rows("backward")) == 7
    assert watched.faults == []


def test_users_own_hooks_still_run_and_see_what_they_saw(watch):
    def run() -> list:
        seen = []
        model = net()
        model[0].weight.register_hook(lambda g: seen.append(("weight", g.clone())) or g * 2)
        model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(("post", p.grad.clone())))
        model[1].register_full_backward_hook(lambda m, i, o: seen.append(("full", o[0].clone())))
        out = model(X)
        out.register_hook(lambda g: g * 3)
        out.sum().backward()
        return [*seen, *((name, p.grad) for name, p in model.named_parameters())]

    plain = run()
    watched = watch()
    ours = run()
    assert [name for name, _ in plain] == [name for name, _ in ours]
    assert all(torch.equal(left, right) for (_, left), (_, right) in zip(plain, ours, strict=True))
    assert watched.faults == []


# -- parameters that come and go ----------------------------------------------------------------------------------


def test_a_frozen_parameter_is_seen_once_it_trains(watch):
    watched = watch()
    model = net()
    model[0].requires_grad_(False)
    model(X).sum().backward()
    assert ("0", "grad weight") not in watched.rows("backward")
    model[0].requires_grad_(True)
    model(X).sum().backward()
    assert "grad weight" in [row.role for page in watched.pages for frame in page.frames for row in frame.rows]
    model[2].requires_grad_(False)
    model(X).sum().backward()
    assert ("2", "grad weight") not in watched.rows("backward")


def test_a_replaced_parameter_is_seen(watch):
    watched = watch()
    model = net()
    model(X).sum().backward()
    model[2].weight = nn.Parameter(torch.zeros(2, 4))
    model(X).sum().backward()
    rows = [row for row in watched.rows("backward") if row == ("2", "grad weight")]
    assert len(rows) == 1
    same([watched.row("2", "grad weight")], [model[2].weight.grad])


def test_a_module_that_is_added_later_is_seen(watch):
    watched = watch()
    model = net()
    model(X).sum().backward()
    model.add_module("late", nn.Linear(2, 1))
    model(X).sum().backward()
    assert {("late", "grad output"), ("late", "grad weight")} <= set(watched.rows("backward"))


def test_a_lazy_module_is_seen_from_its_first_batch_on(watch):
    watched = watch()
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    for _ in range(2):
        model(X).sum().backward()
    for page in (0, 1):
        assert {("0", "grad weight"), ("0", "grad bias"), ("1", "grad weight")} < set(
            watched.rows("backward", page=page)
        )
    assert watched.faults == []


def test_an_optimizer_that_steps_within_the_backward(watch):
    watched = watch()
    model = net()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(p) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        model(X).sum().backward()
    assert sorted(watched.rows("optimizer")) == [("0", "bias"), ("0", "weight"), ("2", "bias"), ("2", "weight")]
    assert watched.rows("collective").count(("0", "grad weight")) == 1, "their hook came first, and took it away"
    assert watched.faults == watched.anomalies == []


def test_a_shared_module_has_one_row_per_call_and_one_per_parameter(watch):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(self.fc(x).tanh())

    watched = watch()
    Twice()(X).sum().backward()
    rows = watched.rows("backward")
    assert rows.count(("fc", "grad output")) == 2
    assert rows.count(("fc", "grad weight")) == 1


# -- odd gradients ------------------------------------------------------------------------------------------------


def test_sparse_gradients_are_measured_by_what_they_store(watch):
    watched = watch()
    model = nn.Embedding(5, 3, sparse=True)
    model(torch.tensor([1, 3])).mul(7).sum().backward()
    row = watched.row("", "grad weight")
    assert (row.kind, row.abs_min, row.abs_max) == ("measured", 7, 7)
    optimizer = torch.optim.SparseAdam(list(model.parameters()))
    optimizer.step()
    assert watched.faults == []


def test_complex_gradients(watch):
    watched = watch()
    model = nn.Linear(2, 2, dtype=torch.complex64)
    model(torch.ones(1, 2, dtype=torch.complex64)).abs().sum().backward()
    row = watched.row("", "grad weight")
    assert (row.kind, row.dtype) == ("measured", "complex64")
    assert row.abs_max == pytest.approx(model.weight.grad.abs().max().item())
    assert watched.faults == []


def test_float8_activations(watch):
    class Float8(nn.Module):
        def forward(self, x):
            return x.to(torch.float8_e4m3fn)

    watched = watch(on_overflow="abort")
    model = nn.Sequential(nn.Linear(4, 4), Float8())
    out = model(X)
    out.to(torch.float32).sum().backward()
    assert watched.row("1", "output").dtype == "float8_e4m3fn"
    assert "grad weight" in [row.role for page in watched.pages for frame in page.frames for row in frame.rows]
    assert watched.faults == []


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_modules(watch, kind):
    watched = watch()
    model = kind(4, 3, num_layers=2, bidirectional=True, batch_first=True)
    state = None
    for _ in range(3):
        out, state = model(torch.ones(2, 5, 4), state)
        state = tuple(part.detach() for part in state) if isinstance(state, tuple) else state.detach()
        out.sum().backward()
    names = {role.removeprefix("grad ") for _, role in watched.rows("backward")}
    assert names >= {name for name, _ in model.named_parameters()}
    assert watched.faults == []


def test_packed_sequences(watch):
    watched = watch()
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)])
    out, _ = nn.GRU(4, 3)(packed)
    out.data.sum().backward()
    assert ("", "grad output[0].data") in watched.rows("backward")
    assert watched.faults == []


# -- copies, files ------------------------------------------------------------------------------------------------


def test_copies_and_files_of_the_model_and_of_what_it_returned(watch):
    watch()
    model = net()
    out = model(X)
    out.sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for thing in (model, model.state_dict(), out, [p.grad for p in model.parameters()]):
            torch.save(thing, io.BytesIO())
        copied = copy.deepcopy(model)
    assert all(not p._post_accumulate_grad_hooks for p in copied.parameters())
    out = copied(X)
    out.sum().backward()
    assert [len(p._post_accumulate_grad_hooks) for p in copied.parameters()] == [1] * 4


# -- checkpointing ------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        x = checkpoint(self.a, x, use_reentrant=self.reentrant)
        x = checkpoint(self.b, x, use_reentrant=self.reentrant)
        return self.head(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_recomputed_stands_before_its_gradients(watch, reentrant):
    watched = watch()
    model = Checkpointed(reentrant)
    for _ in range(2):
        model(X.clone().requires_grad_()).sum().backward()
    assert len(watched.pages) == 2
    for page in watched.pages:
        assert [(f.phase, f.module) for f in page.frames[:4]] == [("forward", name) for name in ("a", "b", "head", "")]
        later = [(f.phase, f.module, f.rows[0].role) for f in page.frames[4:]]
        assert [entry[1] for entry in later if entry[0] == "recompute"] == ["b", "a"]
        weight = {name: later.index(("backward", name, "grad weight")) for name in ("a", "b", "head")}
        again = {entry[1]: place for place, entry in enumerate(later) if entry[0] == "recompute"}
        assert weight["head"] < again["b"] < weight["b"] < again["a"] < weight["a"]
    assert watched.faults == watched.anomalies == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_whole_model_under_a_checkpoint_is_one_batch(watch, reentrant):
    watched = watch()
    model = net()
    for _ in range(2):
        checkpoint(model, X.clone().requires_grad_(), use_reentrant=reentrant).sum().backward()
    assert [page.batch for page in watched.pages] == [0, 1]
    assert [frame.module for frame in watched.frames("recompute")] == ["0", "1", "2", ""]
    assert watched.faults == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_recomputed_belongs_to_the_batch_whose_backward_runs(watch, reentrant):
    watched = watch()
    model = Checkpointed(reentrant)
    first = model(X.clone().requires_grad_())
    second = model(X.clone().requires_grad_())
    first.sum().backward()
    second.sum().backward()
    assert [[f.module for f in watched.frames("recompute", page=page)] for page in (0, 1)] == [["b", "a"]] * 2


# -- near overflow, underflow -------------------------------------------------------------------------------------


class Gives(nn.Module):
    """Returns a constant, and passes a constant gradient back."""

    def __init__(self, value, dtype=torch.float16, gradient=1.0) -> None:
        super().__init__()
        self.value, self.dtype, self.gradient = value, dtype, gradient

    def forward(self, x):
        return torch.full_like(x, self.value, dtype=self.dtype)


@pytest.mark.parametrize(
    ("value", "near", "kinds"),
    [
        (40000.0, 1.0, ["near overflow"]),
        (20000.0, 1.0, []),
        (20000.0, 2.0, ["near overflow"]),
        (40000.0, 0.0, []),
        (torch.finfo(torch.float16).min, 1.0, []),
        (torch.finfo(torch.float16).max, 1.0, []),
        (1e-7, 1.0, ["underflow"]),
        (0.0, 1.0, []),
        (1.0, 1.0, []),
    ],
)
def test_outputs_near_overflow_and_in_underflow_are_warned_of_once(watch, value, near, kinds):
    watched = watch(on_overflow="abort", near_overflow=near)
    model = Gives(value)
    for _ in range(3):
        model(X)
    assert [(w.kind, w.role, w.phase, w.where.batch) for w in watched.of(RangeWarning)] == [
        (kind, "output", "forward", 0) for kind in kinds
    ]
    assert watched.anomalies == watched.faults == []


def test_a_share_of_subnormals_is_compared_with_the_threshold(watch):
    x = torch.ones(100, dtype=torch.float16)
    x[:20] = 1e-7
    for share, count in ((0.1, 1), (0.3, 0), (0.0, 0)):
        watched = watch(underflow_share=share)
        nn.ReLU()(x)
        assert len(watched.of(RangeWarning)) == count, share
        watched.close()


@pytest.mark.parametrize(("value", "kinds"), [(300.0, ["near overflow"]), (100.0, [])])
def test_an_output_of_float8_near_overflow_is_warned_of(watch, way, value, kinds):
    class Casts(nn.Module):
        def forward(self, x):
            return (x * value).to(torch.float8_e4m3fn)

    watched = watch()
    Casts()(torch.ones(2, 3))
    assert [(w.kind, w.role, w.dtype) for w in watched.of(RangeWarning)] == [
        (kind, "output", "float8_e4m3fn") for kind in kinds
    ]


def test_a_gradient_that_has_vanished_is_warned_of(watch, way):
    watched = watch()
    model = nn.Sequential(nn.Linear(4, 4), BadBackward(1.0)).to(torch.float16)
    for batch in range(11):
        model[1].value = 1e-30 if batch == 10 else 1.0
        model(X.half()).sum().backward()
        assert watched.of(RangeWarning) == [] or batch == 10
    assert ("underflow", "0", "grad output", "backward") in [
        (w.kind, w.module, w.role, w.phase) for w in watched.of(RangeWarning)
    ]
    assert watched.anomalies == []


def test_a_gradient_that_is_zero_by_design_is_not_warned_of(watch):
    """LoRA's B begins at zero, and so does the gradient of what A returned."""
    watched = watch()
    lora = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False))
    nn.init.zeros_(lora[1].weight)
    for _ in range(21):
        lora(X).sum().backward()
    assert watched.of(RangeWarning) == []


def test_a_warning_names_its_numbers(watch):
    watched = watch()
    Gives(32752.0)(X)
    (warned,) = watched.of(RangeWarning)
    assert (warned.cls, warned.dtype, warned.abs_max, warned.headroom) == ("Gives", "float16", 32752.0, 1.0)


# -- nothing is kept ----------------------------------------------------------------------------------------------


def test_graphs_and_gradients_are_not_kept_alive(watch):
    import weakref

    watch()
    model = net()
    out = model(X)
    out.sum().backward()
    references = [weakref.ref(out), weakref.ref(model[0].weight.grad), weakref.ref(model[0].weight)]
    del out, model
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_a_backward_after_detach_records_nothing_and_works(watch):
    watched = watch(on_overflow="abort")
    model = nn.Sequential(nn.Linear(4, 4), BadBackward())
    loss = model(X).sum()
    watched.hooks.detach()
    loss.backward()
    assert watched.rows("backward") == []
    assert watched.anomalies == []


class _Two(torch.autograd.Function):
    """As the function that a compiled graph becomes: an output that nobody uses gets no gradient, not even zeros."""

    @staticmethod
    def forward(context, x):
        context.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(context, first, second):
        assert second is None
        return first * 2


def test_an_output_that_gets_no_gradient_is_no_fault(watch):
    class Two(nn.Module):
        def forward(self, x):
            return _Two.apply(x)

    watched = watch()
    model = nn.Sequential(nn.Linear(4, 4), Two())
    for _ in range(3):
        model(torch.ones(2, 4))[0].sum().backward()
    assert watched.faults == []
    assert "grad output[0]" in [row.role for frame in watched.pages[-1].frames for row in frame.rows]


@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
def test_dynamo_compiles_no_hook_of_a_backward_that_a_compiled_function_runs(way, watch):
    """At the break of a backward, dynamo compiles each Python function that is called. A hook then records nothing."""
    from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

    watched = watch()
    model = net()

    @torch.compile(backend="eager")
    def backward_of(x):
        model(x).sum().backward()

    clear_compilation_metrics()
    for _ in range(2):
        backward_of(X)
    model(X)  # on a late device the last gradients are read by then
    compiled = [each.co_filename or "" for each in get_compilation_metrics()]
    torch.compiler.reset()

    assert len(compiled) > 0
    ours = "worker/hooks/backward.py", "worker/hooks/gradient_frames.py"
    assert not [name for name in compiled if name.endswith(ours)]
    assert "grad weight" in [row.role for page in watched.pages for frame in page.frames for row in frame.rows]
    assert watched.faults == watched.anomalies == []


# -- the rehearsal of a CUDA graph ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["native", "python", pytest.param("compiled", marks=pytest.mark.slow)])
def test_gradients_of_a_rehearsal_are_marked_and_no_evidence(watch, how):
    """tests/fakes/cuda/test_graphs.py has the real one. The next page's gradients count again."""
    watched = watch()
    gradients = watched.hooks._gradients
    if how == "python":
        gradients.writer = None
    model = net()
    called = torch.compile(model, backend="aot_eager") if how == "compiled" else model
    watched.hooks.progress.rehearses = True
    called(X).backward(torch.full((3, 2), float("nan")))
    watched.hooks.progress.rehearses = False
    (page,) = watched.pages
    marks = {row.mark for frame in page.frames if frame.phase == "backward" for row in frame.rows}
    assert marks == {RowMark.REHEARSED}
    assert anomaly_of_page(page) is None
    assert watched.anomalies == []

    model.zero_grad()
    called(X).backward(torch.full((3, 2), float("nan")))
    assert [anomaly.where.batch for anomaly in watched.anomalies] == [1]
    assert watched.faults == []
