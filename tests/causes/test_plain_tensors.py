"""The operation that made a loss bad, from autograd's graph, where no module was called or a function has returned."""

from __future__ import annotations

import pytest

from .benchmark import verdict_on
from .plain_tensors import PLAIN, RETURNED, UNPROVED
from .scripts import KnownCause


def names_of(cases: list[KnownCause]) -> list[str]:
    return [known.name.replace(" ", "-") for known in cases]


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


@pytest.mark.parametrize("known", UNPROVED, ids=names_of(UNPROVED))
def test_no_operation_is_named_where_none_is_proved(known: KnownCause):
    verdict = verdict_on(known.train)
    assert (verdict.kind, verdict.operation) == ("overflow", None), verdict
    assert verdict.cause is None or verdict.cause.certainty != "established", verdict.cause
