"""Each operation that makes a bad value of finite numbers: what its rule says, and that the mend mends it."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
from gpuwatch.collector.cause.operation_cause import of_range
from gpuwatch.collector.cause.operation_rules import OPERATION_RULES, domain_advice, outside_domain
from gpuwatch.core.events.alarm_evidence import BadOperation
from gpuwatch.worker.explain.operation_watch import OperationWatch

from .operations import ROWS, MadeBadly


def operation_of(row: MadeBadly, *, tries: bool = True) -> BadOperation:
    watch = OperationWatch("", {}, sys._getframe())
    watch.tries = tries
    with torch.no_grad(), watch:
        result = row.make()
    origin, flags = watch.origin_of(result)
    assert flags, "the row makes no bad value"
    assert origin is not None and origin.operation is not None
    return origin.operation


@pytest.mark.filterwarnings("ignore")
def test_a_rule_says_what_was_outside_and_its_mend_is_finite():
    wrong = []
    for row in ROWS:
        operation = operation_of(row)
        said, advice = outside_domain(operation), domain_advice(operation)
        if row.words not in said or bool(row.words) != bool(said):
            wrong.append(f"{operation.name}: {said!r} instead of {row.words!r}, {operation}")
        if bool(said) != bool(advice):
            wrong.append(f"{operation.name}: no advice")
        if not bool(row.mended().isfinite().all()):
            wrong.append(f"{operation.name}: its mend is not finite")
    assert not wrong, "\n".join(wrong)


@pytest.mark.filterwarnings("ignore")
def test_a_trial_in_float64_decides_between_too_large_and_outside():
    """What is finite there is called too large for its dtype; what is not is outside of the domain, or grows on."""
    for row in ROWS:
        trials = {each.changed: each.value for each in operation_of(row).trials}
        assert trials["nothing"] in ("nan", "+inf", "-inf", "inf"), row.name
        is_large = trials["float64"] == "finite"
        assert is_large == (not row.words or row.is_near_zero), row.name


@pytest.mark.filterwarnings("ignore")
def test_what_grows_beyond_float32_alone_is_said_with_its_trial():
    """exp of 100 is finite in float64. Of mul, mm and sum that is not said: what they are handed is too large."""
    found = {row.name: of_range(operation_of(row)) for row in ROWS if not row.words or row.is_near_zero}
    said = {name: cause.statement for name, cause in found.items() if cause is not None}

    assert set(said) == {"exp", "prod", "cumprod"}
    assert "exp of a number that is too large" in said["exp"]
    assert "is finite in float64, abs max 2.69e+43, which float32 cannot hold" in said["exp"]
    assert all(of_range(operation_of(row, tries=False)) is None for row in ROWS)


def test_without_trials_a_rule_is_no_less_careful():
    """A batch of --explain N makes no trials. What may be a number that is too large is not called a domain."""
    too_large = [row for row in ROWS if not row.words and row.name not in ("exp", "prod", "cumprod")]
    assert too_large
    for row in too_large:
        assert not outside_domain(operation_of(row, tries=False)), row.name


def test_each_rule_has_a_row():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = {name.rstrip("_") for row in ROWS for name in (operation_of(row).name,)}
    other_names = {"true_divide", "floor_divide", "float_power", "linalg_det", "_linalg_det", "linalg_inv_ex"}
    other_names |= {"nanmean", "_fused_rms_norm", "segment_reduce"}
    assert set(OPERATION_RULES) - other_names <= seen
