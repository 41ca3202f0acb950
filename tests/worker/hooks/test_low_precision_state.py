"""The optimizer's states in 16 bits: which steps read them, and what inf in one of them is."""

from __future__ import annotations

import gpuwatch
import pytest
import torch
from gpuwatch.worker.hooks.optimizer_steps import LowPrecisionState
from torch import nn

pytestmark = pytest.mark.quick_here(12)


def half_net(dtype=torch.float16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def train(model, optimizer, batches, *, wild=()):
    """`wild`: batches whose gradient in the last layer is 3e4."""
    dtype = model[0].weight.dtype
    for batch in range(batches):
        loss = model(torch.full((1, 4), 0.5, dtype=dtype)).sum()
        (loss * (3e4 if batch in wild else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def states(watched):
    """(batch, module, role) of each row about a state."""
    return [
        (page.batch, frame.module, row.role) for page in watched.pages for frame in page.frames for row in frame.states
    ]


@pytest.mark.parametrize(("every", "read"), [(0, []), (1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6]), (50, [0])])
def test_the_first_step_and_one_in_so_many_are_read(every, read):
    due, optimizer = LowPrecisionState(every), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert [step for step in range(7) if due.is_due(optimizer)] == read


def test_optimizers_that_step_in_turn_are_read_each():
    due = LowPrecisionState(2)
    left, right = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    assert [(due.is_due(left), due.is_due(right)) for _ in range(4)] == [(True, True), (False, False)] * 2


def test_states_in_16_bits_have_rows_of_their_own(watch, way):
    watched = watch(state_every=2)
    model = half_net()
    model[2].float()  # its states are in float32
    model.insert(2, _ToFloat())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-4)
    train(model, optimizer, 4)
    roles = [f"state {key} {name}" for name in ("weight", "bias") for key in ("exp_avg", "exp_avg_sq")]
    assert states(watched) == [(batch, "0", role) for batch in (0, 2) for role in roles]
    watched.hooks.judging.finish()
    state = optimizer.state[model[0].weight]["exp_avg"]
    assert state.dtype == torch.float16
    assert watched.pages[0].frames[-1].phase == "optimizer"
    assert watched.anomalies == watched.faults == []


class _ToFloat(nn.Module):
    def forward(self, x):
        return x.float()


@pytest.mark.parametrize("settings", [{"state_every": 0}, {"watch": ("forward", "grads")}])
def test_states_that_are_not_to_be_read(watch, settings):
    watched = watch(**settings)
    model = half_net()
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-4), 2)
    assert states(watched) == []


def test_states_in_float32_cost_no_row(watch):
    watched = watch(state_every=1)
    model = half_net(torch.float32)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-4), 2)
    assert states(watched) == []


def watched_verdict(model, optimizer, batches, *, wild, **settings):
    with gpuwatch.watch(model, on_overflow="continue", **settings) as handle:
        train(model, optimizer, batches, wild=wild)
        handle._hooks.judging.finish()
        assert [each for each in handle.events if type(each).__name__ == "OwnFault"] == []
        return handle.verdict()


def test_a_square_that_overflows_in_the_first_step_is_the_steps_work(way):
    """Its weights stay finite, and are never changed again."""
    model = half_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-4, weight_decay=0.0)
    before = model[2].weight.detach().clone()
    verdict = watched_verdict(model, optimizer, 2, wild=(0,))
    assert optimizer.state[model[2].bias]["exp_avg_sq"].isinf().all()
    assert model[2].weight.isfinite().all() and before.isfinite().all()
    assert (verdict.kind, verdict.phase, verdict.batch, verdict.certainty) == (
        "overflow",
        "optimizer",
        0,
        "established",
    )
    assert (verdict.value, verdict.dtype) == ("+inf", "float16")
    assert verdict.role in ("state exp_avg_sq weight", "state exp_avg_sq bias")
    assert "exp_avg_sq that the optimizer keeps in float16 for" in verdict.statement
    assert "float32" in verdict.next[0]


def test_of_steps_that_were_not_read_any_can_have_made_it(way):
    model = half_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-4)
    verdict = watched_verdict(model, optimizer, 6, wild=(1,), state_every=4)
    assert (verdict.phase, verdict.batch, verdict.certainty) == ("optimizer", 4, "supported")
    assert "any step up to that point can have made it" in verdict.statement


def test_a_state_that_was_finite_when_it_was_last_read(way):
    model = half_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-4)
    verdict = watched_verdict(model, optimizer, 4, wild=(1,), state_every=2)
    assert (verdict.phase, verdict.batch, verdict.certainty) == ("optimizer", 2, "supported")
    assert "any step since that of batch 0 can have made it: it was finite then" in verdict.statement


def test_what_no_step_has_read_is_read_at_the_end(watch, way):
    watched, model = watch(), half_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-4)
    train(model, optimizer, 6, wild=(2,))
    verdict = watched.verdict()
    assert (verdict.phase, verdict.batch, verdict.certainty) == ("optimizer", 5, "supported")
    assert verdict.role.startswith("state exp_avg_sq")


@pytest.mark.parametrize(("is_freed", "certainty"), [(True, "supported"), (False, "established")])
def test_clean_is_established_only_if_the_last_states_were_read(watch, way, is_freed, certainty):
    watched, model = watch(), half_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-4)
    train(model, optimizer, 6)
    if is_freed:
        del optimizer
    verdict = watched.verdict()
    assert (verdict.kind, verdict.certainty) == ("clean", certainty)
    assert ("AdamW keeps in 16 bits or less was not read after its last 5 steps" in verdict.statement) == is_freed


def test_a_step_that_would_overflow_again_is_not_known_to_be_the_first(way):
    model = half_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-4)
    verdict = watched_verdict(model, optimizer, 6, wild=(1, 2, 3, 4), state_every=4)
    assert (verdict.phase, verdict.batch, verdict.certainty) == ("optimizer", 4, "supported")


def test_each_step_read_names_the_step(way):
    model = half_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-4)
    verdict = watched_verdict(model, optimizer, 4, wild=(2, 3), state_every=1)
    assert (verdict.phase, verdict.batch, verdict.certainty) == ("optimizer", 2, "established")
    assert "the step after batch 2 made +inf" in verdict.statement


def test_a_rule_of_the_users_covers_it(way):
    model = half_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-4)
    verdict = watched_verdict(model, optimizer, 2, wild=(0,), ignore=["*:state *"])
    assert verdict.kind == "clean"


def test_an_overflow_ends_the_job(watch):
    watch(on_overflow="abort")
    model = half_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-4)
    with pytest.raises(
        gpuwatch.OverflowDetected, match=r"inf in state exp_avg_sq \w+ of `\d` \(Linear\), optimizer of batch 0"
    ):
        train(model, optimizer, 1, wild=(0,))
