"""A script or a library clears torch's global hooks: gpuwatch notices that, puts its own back, and says so."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch
from gpuwatch.core.recorder.layout import HeadField
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

X = torch.ones(2, 4)
BAD = torch.full((2, 4), math.nan)
CLAUSE = "rank 0 lost gpuwatch's hooks {}: its script, or a library, cleared torch's global hooks"
PRE, POST = "_global_forward_pre_hooks", "_global_forward_hooks"
FLAGS = tuple(
    name
    for name in ("_global_forward_hooks_with_kwargs", "_global_forward_hooks_always_called")
    if hasattr(torch.nn.modules.module, name)  # torch 2.5 lacks one
)
STEPS = "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"


def clear(*names):
    for name in names:
        getattr(torch_optimizer if name in STEPS else torch_module, name).clear()


def replace(monkeypatch, *names):
    """As a library does that keeps the tables, which others may still hold."""
    for name in names:
        monkeypatch.setattr(torch_optimizer if name in STEPS else torch_module, name, OrderedDict())


@pytest.fixture
def job(watch):
    """A model, the step of its optimizer, and the rank that trains it."""
    watched = watch()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return watched, model, optimizer.step


def gone(watched):
    return watched.recorder.fields[HeadField.HOOKS_GONE]


def test_hooks_that_stay_are_not_called_gone(job):
    watched, model, step = job
    for _ in range(3):
        model(X).sum().backward()
        step()
    verdict = watched.verdict()
    assert (verdict.kind, verdict.certainty, gone(watched)) == ("clean", "established", 0)


@pytest.mark.parametrize("names", [(PRE, POST, *FLAGS), (PRE,), (PRE, POST)])
@pytest.mark.parametrize("noticed_by", ["step", "end"])
def test_modules_that_ran_without_hooks_keep_a_run_from_being_clean(job, names, noticed_by):
    watched, model, step = job
    model(X)
    clear(*names)
    model(BAD)
    if noticed_by == "step":
        step()
    assert watched.anomalies == []
    verdict = watched.verdict()
    assert (verdict.kind, verdict.missing) == ("unknown", [CLAUSE.format("1 time")])


@pytest.mark.parametrize("names", [(POST,), FLAGS])
def test_a_forward_hook_that_is_gone_is_put_back_when_the_next_batch_begins(job, names):
    watched, model, _ = job
    model(X)
    clear(*names)
    model(input=BAD)
    assert (len(watched.anomalies), gone(watched)) == (1, 1)
    if len(FLAGS) == 2:  # torch 2.5 hands over no kwargs
        assert not watched.row("", "kwargs.input").finite
    assert watched.verdict().certainty == "supported"


@pytest.mark.parametrize("noticed_by", ["step", "end"])
def test_a_clear_before_the_first_batch_is_noticed(job, noticed_by):
    watched, model, step = job
    clear(PRE, POST, *FLAGS)
    model(BAD)
    if noticed_by == "step":
        step()
        model(X)
    verdict = watched.verdict()
    assert verdict.kind == "unknown"
    assert CLAUSE.format("1 time") in verdict.missing


def test_a_clear_within_a_batch_is_noticed(job):
    watched, model, step = job
    model(X)
    model.insert(1, Clears())
    model(X)
    step()
    model[0](X)
    assert not watched.hooks._running.stack
    assert len(watched.pages[-1].frames) == 1, "what is called next is a root of its own"
    verdict = watched.verdict()
    assert (verdict.kind, verdict.missing) == ("unknown", [CLAUSE.format("1 time")])


class Clears(nn.Module):
    def forward(self, x):
        clear(PRE, POST, *FLAGS)
        return x


@pytest.mark.parametrize("names", [STEPS[:1], STEPS[1:], STEPS])
def test_steps_without_hooks_keep_a_run_from_being_clean(job, names):
    watched, model, step = job
    model(X).sum().backward()
    clear(*names)
    step()
    model(X)
    verdict = watched.verdict()
    assert (verdict.kind, verdict.missing) == ("unknown", [CLAUSE.format("1 time")])


def test_tables_that_are_replaced_are_noticed(job, monkeypatch):
    watched, model, step = job
    model(X)
    replace(monkeypatch, PRE, POST, *FLAGS, *STEPS)
    model(BAD)
    step()
    verdict = watched.verdict()
    assert (verdict.kind, verdict.missing) == ("unknown", [CLAUSE.format("1 time")])
    watched.hooks.detach()
    assert not torch_module._global_forward_hooks
    assert not torch_optimizer._global_optimizer_post_hooks


def test_hooks_are_put_back_as_they_were_and_once(job):
    """Whoever has cleared the tables may fill them again with what was there."""
    watched, model, step = job
    model(X)
    kept = dict(torch_module._global_forward_hooks), dict(torch_module._global_forward_pre_hooks)
    clear(PRE, POST, *FLAGS, *STEPS)
    model(X)
    watched.hooks.settle()
    torch_module._global_forward_hooks.update(kept[0])
    torch_module._global_forward_pre_hooks.update(kept[1])
    model(input=X).sum().backward()
    step()
    assert [frame.module for frame in watched.frames("forward")] == ["0", "1", ""]
    roles = [row.role for row in watched.frames("forward")[-1].rows]
    assert roles == (["kwargs.input", "output"] if len(FLAGS) == 2 else ["output"])  # torch 2.5 hands over no kwargs
    assert watched.frames("optimizer")
    assert gone(watched) == 1


@pytest.mark.parametrize("after", [True, False])
def test_an_overflow_after_a_time_without_hooks_is_not_established(job, after):
    watched, model, _ = job
    bad = nn.Sequential(nn.Identity(), Infinite())
    if not after:
        bad(X)
        model(X)
    clear(PRE, POST, *FLAGS)
    model(X)
    watched.hooks.settle()
    if after:
        bad(X)
    verdict = watched.verdict()
    assert (verdict.kind, verdict.module) == ("overflow", "1")
    said = any("had cleared torch's global hooks" in line for line in verdict.evidence)
    assert (verdict.certainty, said) == (("supported", True) if after else ("established", False))


class Infinite(nn.Module):
    def forward(self, x):
        return x * math.inf
