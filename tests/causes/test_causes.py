"""The cause that a verdict names, against trainings whose cause is known."""

from __future__ import annotations

import pytest

from .benchmark import verdict_on
from .scripts import CAUSES, KnownCause
from .traps import TRAPS

ALL = [*CAUSES, *TRAPS]


@pytest.mark.quick(22)
@pytest.mark.parametrize("known", ALL, ids=[known.name.replace(" ", "-") for known in ALL])
def test_a_cause_is_named(known: KnownCause):
    verdict = verdict_on(known.train)
    assert verdict.kind == "overflow", verdict.statement
    cause = verdict.cause
    assert (cause.kind if cause is not None else "") == known.kind, (verdict.statement, cause)
    if cause is not None:
        assert known.says in cause.statement
        assert known.advises in verdict.next[0]
        is_named = "row " in known.says or known.kind == "data"
        assert is_named or cause.sample is None, cause
        assert not any("learning rate that is too high" in step for step in verdict.next)
