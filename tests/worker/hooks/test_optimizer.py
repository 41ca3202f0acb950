"""Optimizer steps: the gradients that go in, the weights that come out, the guard between them."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.events.own_limits import LooseParameters
from gpuwatch.core.recorder.layout import HeadField
from torch import nn

from ..models import tanh_net as net

X = torch.ones(3, 4)
BIG = 3e38


def weights(model) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def unchanged(model, before) -> bool:
    return all(torch.equal(left, right) for left, right in zip(weights(model), before, strict=True))


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


# -- weights at the end of a step ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_weights_are_read_at_the_end_of_the_step(watch, make):
    watched = watch()
    model = net()
    optimizer = make(model.parameters())
    for number in range(3):
        model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert watched.rows("optimizer") == [("0", "weight"), ("0", "bias"), ("2", "weight"), ("2", "bias")]
        rows = [row for frame in watched.frames("optimizer") for row in frame.rows]
        assert [row.abs_max for row in rows] == [p.abs().max().item() for p in model.parameters()]
        assert watched.reader[HeadField.STEP] == number + 1
        assert watched.reader.state().phase == "script"
    assert watched.rows("collective") == [], "one rank, gradients as they were in the backward"
    assert [(page.batch, page.step) for page in watched.pages] == [(0, 0), (1, 1), (2, 2)]
    assert watched.faults == watched.anomalies == []


def test_the_next_forward_shows_what_the_step_made(watch, measured):
    watched = watch()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    optimizer.step()
    measured.clear()
    model(X)
    assert watched.row("0", "weight").abs_max == model[0].weight.abs().max().item()
    assert not {id(tensor) for tensor in measured} & {id(p) for p in model.parameters()}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_step_that_makes_a_weight_bad_is_the_anomaly(watch, make):
    watched = watch(on_overflow="abort")
    model = net()
    optimizer = make(model.parameters())
    optimizer.param_groups[0]["lr"] = float("inf")
    model(X).sum().backward()
    with pytest.raises(OverflowDetected, match=r"in weight of `0` \(Linear\), optimizer of batch 0"):
        optimizer.step()
    (anomaly,) = watched.anomalies
    assert (anomaly.phase, anomaly.module, anomaly.role) == ("optimizer", "0", "weight")
    assert watched.frames("optimizer")[0].index == anomaly.frame


def test_the_state_of_a_weight_that_became_bad_is_shown(watch):
    watched = watch()
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(X).sum().backward()
    optimizer.step()
    assert not any(role.startswith("state") for _, role in watched.rows("optimizer"))
    optimizer.state[model[2].weight]["exp_avg_sq"].fill_(float("nan"))
    model(X).sum().backward()
    optimizer.step()
    assert watched.rows("optimizer") == [
        ("0", "weight"),
        ("0", "bias"),
        ("2", "weight"),
        ("2", "state step weight"),
        ("2", "state exp_avg weight"),
        ("2", "state exp_avg_sq weight"),
        ("2", "bias"),
    ]
    assert watched.row("2", "state exp_avg weight").finite
    assert watched.row("2", "state exp_avg_sq weight").nan
    assert [(a.module, a.role, a.phase) for a in watched.anomalies] == [("2", "weight", "optimizer")]


def test_a_weight_that_the_script_made_bad_itself_is_a_forwards(watch):
    watched = watch()
    model = net()
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    model(X)
    assert [(a.module, a.role, a.phase) for a in watched.anomalies] == [("0", "weight", "forward")]


def test_with_weights_unwatched_a_step_has_no_rows(watch):
    watched = watch(watch=("forward", "grads"))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    optimizer.step()
    assert watched.rows("optimizer") == []
    assert watched.reader[HeadField.STEP] == 1


# -- gradients as the optimizer gets them -------------------------------------------------------------------------


def test_gradients_that_were_changed_after_the_backward_are_rows_of_their_own(watch):
    watched = watch()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    assert watched.rows("collective") == [(m, f"grad {name}") for m in ("0", "2") for name in ("weight", "bias")]
    local, clipped = [
        row for frame in watched.last.frames for row in frame.rows if (frame.module, row.role) == ("2", "grad weight")
    ]
    assert clipped.abs_max == model[2].weight.grad.abs().max().item() < local.abs_max


def test_of_gradients_only_those_that_were_changed(watch):
    watched = watch()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    model[0].bias.grad.mul_(2)
    model[2].bias.grad = torch.zeros(2)
    optimizer.step()
    assert watched.rows("collective") == [("0", "grad bias"), ("2", "grad bias")]


def test_a_gradient_that_the_script_makes_bad_is_seen_before_the_step(watch):
    watch(on_overflow="abort")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    model[2].weight.grad.div_(0)
    before = weights(model)
    with pytest.raises(OverflowDetected, match=r"grad weight of `2` \(Linear\), collective of batch 0"):
        optimizer.step()
    assert unchanged(model, before)


def test_a_single_process_group_of_ddp_is_watched(watch):
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        watched = watch()
        inner = net()
        model = nn.parallel.DistributedDataParallel(inner)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(X).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert watched.last.root == "Sequential"
        phases = [frame.phase for frame in watched.last.frames]
        reduced = ["collective"] * 2  # the reducer has written into the gradients
        assert phases == ["forward"] * 4 + ["loss"] + ["backward"] * 7 + reduced + ["optimizer"] * 2
        assert watched.last.frames[-1].seq > watched.last.frames[0].seq > 0, "the reductions are counted"
        assert watched.faults == watched.anomalies == []
        optimizer.param_groups[0]["lr"] = math.inf
        model(X).sum().backward()
        optimizer.step()
        assert watched.anomalies[0].again.held == [], "DDP's list of the parameters is no attribute of the model"
        watched.hooks.detach()
    finally:
        del model
        dist.destroy_process_group()


# -- optimizers of all kinds --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # LBFGS of torch 2.8 does so
def test_lbfgs_evaluates_its_closure_within_the_step(watch):
    def run() -> list[torch.Tensor]:
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

        def closure():
            optimizer.zero_grad()
            loss = model(X).square().sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        return weights(model)

    plain = run()
    for guard in (False, True):
        watched = watch(guard_optimizer=guard)
        assert all(torch.equal(left, right) for left, right in zip(run(), plain, strict=True))
        assert watched.reader[HeadField.STEP] == 2
        assert len(watched.pages) >= 4
        assert watched.faults == watched.anomalies == []
        watched.hooks.detach()


def test_several_optimizers_show_their_own_parameters(watch):
    watched = watch()
    model = net()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.Adam(model[2].parameters(), lr=0.1)
    model(X).sum().backward()
    first.step()
    assert {module for module, _ in watched.rows("optimizer")} == {"0"}
    second.step()
    assert {module for module, _ in watched.rows("optimizer")} == {"0", "2"}
    assert watched.faults == []


def test_two_models_and_their_optimizers_keep_their_pages(watch):
    watched = watch()
    models = [nn.Linear(4, 4), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for _ in range(2):
        loss = models[1](models[0](X)).sum()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert [(page.root, page.batch) for page in watched.pages] == [
        ("Linear", 0),
        ("Linear#2", 0),
        ("Linear", 1),
        ("Linear#2", 1),
    ]
    for page in range(4):
        loss = ["loss"] if page % 2 else []  # of the model that its backward reaches first
        phases = [frame.phase for frame in watched.pages[page].frames]
        assert phases == ["forward", *loss] + ["backward"] * 3 + ["optimizer"]


def test_an_optimizer_over_parameters_that_no_module_owns(watch):
    watched = watch(on_overflow="abort")
    model, loose = net(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), loose], lr=0.1)
    (model(X) * loose).sum().backward()
    optimizer.step()
    assert {module for module, _ in watched.rows("optimizer")} == {"0", "2"}
    assert watched.faults == []


def test_an_optimizer_without_any_model(watch):
    watched = watch(on_overflow="abort", guard_optimizer=True)
    loose = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([loose], lr=0.1)
    loose.sum().backward()
    optimizer.step()
    assert watched.reader[HeadField.STEP] == 1
    assert watched.faults == watched.pages == []


# -- the guard ----------------------------------------------------------------------------------------------------


class Inf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_guard_keeps_a_bad_gradient_out_and_the_training_goes_on(watch, make):
    watched = watch(guard_optimizer=True)
    model = net()
    optimizer = make(model.parameters())
    for number in range(4):
        out = model(X)
        before, state = weights(model), copy.deepcopy(optimizer.state_dict()["state"])
        (Inf.apply(out) if number == 1 else out).sum().backward()
        optimizer.step()
        assert unchanged(model, before) == (number == 1)
        if number == 1:
            assert optimizer.state_dict()["state"].keys() == state.keys()
            momenta = [(s, optimizer.state_dict()["state"][k]) for k, s in state.items()]
            assert all(torch.equal(a[n], b[n]) for a, b in momenta for n in a if isinstance(a[n], torch.Tensor))
        optimizer.zero_grad()
    assert [(a.where.batch, a.phase) for a in watched.anomalies] == [(1, "backward")]
    assert all(p.isfinite().all() for p in model.parameters())


def test_without_the_guard_the_weights_are_lost(watch):
    watch()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Inf.apply(model(X)).sum().backward()
    optimizer.step()
    assert not model[2].weight.isfinite().all()


def test_the_guard_with_abort(watch):
    watched = watch(on_overflow="abort", guard_optimizer=True)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Inf.apply(model(X)).sum().backward()
    before = weights(model)
    with pytest.raises(OverflowDetected):
        optimizer.step()
    assert unchanged(model, before)
    assert len(watched.anomalies) == 1


@pytest.mark.parametrize("settings", [{}, {"modules": ["0"]}, {"watch": ("forward",)}, {"every": 2}])
def test_the_guard_looks_at_what_is_not_watched_too(watch, settings):
    watched = watch(guard_optimizer=True, **settings)
    model, loose = net(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), loose], lr=0.1)
    for broken in (loose, model[2].weight):
        (model(X) * loose).sum().backward()
        broken.grad.fill_(float("nan"))
        before = weights(model)
        optimizer.step()
        assert unchanged(model, before)
        assert loose.isfinite().all()
        optimizer.zero_grad()
    first, second = watched.anomalies
    assert (first.module, first.cls, first.role) == ("optimizer.param_groups[0]", "SGD", "grad params[4]")
    assert (second.module, second.cls, second.role) == ("2", "Linear", "grad weight")
    assert [a.value for a in watched.anomalies] == ["nan", "nan"]
    assert watched.faults == []


def test_the_guard_in_a_script_that_calls_no_module(watch):
    watched = watch(on_overflow="abort", guard_optimizer=True)
    loose = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([loose], lr=0.1)
    (loose * float("inf")).backward(torch.ones(2))  # of no loss
    with pytest.raises(OverflowDetected, match=r"grad params\[0\] of `optimizer.param_groups\[0\]` \(Adam\)"):
        optimizer.step()
    assert loose.tolist() == [1, 1]
    assert watched.last.root == "Adam"


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.LBFGS(p, max_iter=3)])
@pytest.mark.parametrize("by_keyword", [False, True])
def test_the_guard_looks_at_what_a_closure_computes(watch, make, by_keyword):
    watched = watch(guard_optimizer=True)
    model = net()
    optimizer = make(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = Inf.apply(model(X)).sum()
        loss.backward()
        return loss

    before = weights(model)
    loss = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
    assert unchanged(model, before)
    assert torch.equal(loss, model(X).sum())
    assert watched.anomalies
    assert watched.faults == []


def test_the_guard_ends_the_job_in_a_closure(watch):
    watch(guard_optimizer=True, on_overflow="abort")
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters())
    before = weights(model)

    def closure():
        loss = Inf.apply(model(X)).sum()
        loss.backward()
        return loss

    with pytest.raises(OverflowDetected):
        optimizer.step(closure)
    assert unchanged(model, before)


def test_a_rule_lets_a_gradient_through_the_guard(watch):
    watched = watch(guard_optimizer=True, ignore=["*:grad *"])
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Inf.apply(model(X)).sum().backward()
    optimizer.step()
    assert not model[2].weight.isfinite().all()
    assert [a.phase for a in watched.anomalies] == ["optimizer"], "what the rule does not cover"


def test_sparse_gradients_under_the_guard(watch):
    watched = watch(guard_optimizer=True)
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(list(model.parameters()))
    model(torch.tensor([1, 3])).mul(float("inf")).sum().backward()
    before = weights(model)
    optimizer.step()
    assert unchanged(model, before)
    assert watched.faults == []


@pytest.mark.parametrize("path", ["host", "late"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_the_event_of_a_weight_says_whose_step_it_was(watch, request, path, optimizer):
    if path == "late":
        request.getfixturevalue("late")
    watched = watch()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5}]
    stepping = getattr(torch.optim, optimizer)(groups, lr=0.25)
    for batch in range(3):
        model(torch.randn(2, 4)).sum().backward()
        if batch == 1:
            model[1].weight.data[0, 0] = float("inf")
        stepping.step()
        stepping.param_groups[1]["lr"] = 0.5 / (batch + 2)
    watched.settle()
    first = watched.anomalies[0]
    assert (first.where.batch, first.module, first.role, first.phase) == (1, "1", "weight", "optimizer")
    assert first.optimizer.cls == f"torch.optim.{optimizer.lower()}.{optimizer}"
    assert first.optimizer.settings["lr"] == 0.25
    assert watched.faults == []


# -- parameters that no module has --------------------------------------------------------------------------------


def test_a_parameter_that_no_module_has_is_read_after_its_step_and_that_is_told_once(watch):
    watched = watch()
    model, loose = net(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), loose], lr=0.1)
    for factor in (1.0, 1.0, float("inf")):
        optimizer.zero_grad()
        (model(X).sum().detach() * loose * factor).backward(torch.ones(2))  # of no loss
        optimizer.step()
    (anomaly,) = watched.anomalies
    assert (anomaly.module, anomaly.cls, anomaly.role) == ("optimizer.param_groups[0]", "SGD", "params[4]")
    assert (anomaly.phase, anomaly.where.step) == ("optimizer", 2)
    (told,) = watched.of(LooseParameters)
    assert (told.optimizer, told.parameters, told.unread) == ("SGD", 1, 0)
    assert watched.faults == []


def test_a_copy_of_the_weights_that_an_optimizer_steps_on_is_read_and_not_told(watch):
    """As ZeRO's float32 partition: the gradient is put there by hand."""
    watched = watch()
    model = net()
    copy = nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))
    optimizer = torch.optim.SGD([copy], lr=0.1)
    for number in range(4):
        model.zero_grad()
        model(X).sum().backward()
        copy.grad = torch.cat([p.grad.flatten() for p in model.parameters()])
        if number == 3:
            copy.grad[5] = float("nan")
        optimizer.step()
    (anomaly,) = watched.anomalies
    assert (anomaly.role, anomaly.where.step) == ("params[0]", 3)
    assert watched.of(LooseParameters) == watched.faults == []


def test_the_hook_on_a_parameter_that_no_module_has_comes_off(watch):
    watched = watch()
    model, loose = net(), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([loose], lr=0.1)
    (model(X).sum().detach() * loose).sum().backward()
    optimizer.step()
    assert loose._post_accumulate_grad_hooks
    watched.hooks.detach()
    assert not loose._post_accumulate_grad_hooks


def test_one_that_fsdp2_keeps_in_host_memory_gets_no_hook(watch):
    """torch copies its gradient from the device without overlap if it has one."""
    watched = watch()
    model, loose = net(), nn.Parameter(torch.ones(1))
    loose.device_mesh = SimpleNamespace(device_type="cuda")
    optimizer = torch.optim.SGD([loose], lr=0.1)
    (model(X).sum().detach() * loose).sum().backward()
    optimizer.step()
    assert not loose._post_accumulate_grad_hooks
    (told,) = watched.of(LooseParameters)
    assert (told.optimizer, told.parameters, told.unread) == ("SGD", 1, 0)
    assert watched.faults == []


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # LBFGS of torch 2.8 does so
def test_no_parameter_of_a_model_is_loose_that_is_called_in_the_step(watch):
    watched = watch()
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(X).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert watched.of(LooseParameters) == watched.faults == []
    assert watched.rows("optimizer")


def test_a_parameter_on_a_device_that_no_module_has_is_told_as_unread(watch, late):
    watched = watch()
    loose = nn.Parameter(torch.ones(2))
    loose.sum().backward()
    torch.optim.Adam([loose]).step()
    (told,) = watched.of(LooseParameters)
    assert (told.optimizer, told.parameters, told.unread) == ("Adam", 1, 1)
