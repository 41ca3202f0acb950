"""The operation that made a loss bad, from autograd's graph, where no module was called or a function has returned."""

from __future__ import annotations

import pytest
import torch

from .benchmark import verdict_on
from .plain_tensors import CHANGED, GRADIENTS, PLAIN, RETURNED, UNPROVED
from .scripts import KnownCause


def names_of(cases: list[KnownCause]) -> list[str]:
    return [known.name.replace(" ", "-") for known in cases]


@pytest.mark.quick(6)
@pytest.mark.parametrize("known", [*PLAIN, *RETURNED], ids=names_of([*PLAIN, *RETURNED]))
def test_the_operation_is_proved(known: KnownCause):
    verdict = verdict_on(known.train)
    assert (verdict.kind, verdict.phase) == ("overflow", "loss"), verdict.statement
    cause = verdict.cause
    assert cause is not None, verdict
    assert (cause.kind, cause.certainty) == (known.kind, "established"), cause
    assert known.says in cause.statement
    assert known.advises in verdict.next[0]
    assert verdict.certainty == "established", verdict.evidence
    assert verdict.operation.output.is_bad and not any(each.is_bad for each in verdict.operation.inputs)


@pytest.mark.quick(3)
@pytest.mark.parametrize("known", UNPROVED, ids=names_of(UNPROVED))
def test_no_operation_is_named_where_none_is_proved(known: KnownCause):
    verdict = verdict_on(known.train)
    assert (verdict.kind, verdict.operation) == ("overflow", None), verdict
    assert verdict.cause is None or verdict.cause.certainty != "established", verdict.cause


def test_nothing_is_unpacked_that_the_script_has_packed():
    unpacked: list[int] = []

    def train() -> None:
        weight = torch.full((6, 3), 0.0, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor, lambda tensor: unpacked.append(1) or tensor
        ):
            logs = weight.log()
            masked = torch.where(logs < 0, logs, weight).masked_select(logs < 0)
            loss = masked[torch.arange(3)].gather(0, torch.arange(2)).sum()
        loss.backward()

    train()
    alone, unpacked[:] = len(unpacked), []
    verdict = verdict_on(train)
    assert (verdict.kind, verdict.phase, verdict.operation) == ("overflow", "loss", None)
    assert len(unpacked) == alone > 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("known", GRADIENTS, ids=names_of(GRADIENTS))
def test_the_derivative_is_named_where_the_loss_is_finite(known: KnownCause):
    verdict = verdict_on(known.train)
    assert (verdict.kind, verdict.role) == ("overflow", "params[0]"), verdict.statement
    assert "its gradient was" in verdict.statement
    assert verdict.cause is not None, verdict
    assert (verdict.cause.kind, verdict.cause.certainty) == (known.kind, "supported")
    assert known.says in verdict.cause.statement
    assert known.advises in verdict.next[0]


@pytest.mark.quick(2)
@pytest.mark.parametrize("known", CHANGED, ids=names_of(CHANGED))
def test_no_derivative_is_named_where_something_else_changed_the_gradient(known: KnownCause):
    verdict = verdict_on(known.train)
    assert (verdict.kind, verdict.role, verdict.cause) == ("overflow", "params[0]", None), verdict
