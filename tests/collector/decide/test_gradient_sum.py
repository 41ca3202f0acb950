"""What a sum over the ranks can have made of their own gradients."""

from __future__ import annotations

import pytest
from gpuwatch.collector.decide.gradient_sum import GradientSum
from gpuwatch.core.frames import Row
from gpuwatch.core.values import NonFinite


def row(size, flags=NonFinite.NONE, dtype="float16"):
    return Row(
        role="grad weight",
        abs_min=0.0,
        abs_max=None if flags else size,
        nan=bool(flags & NonFinite.NAN),
        posinf=bool(flags & NonFinite.POSINF),
        neginf=bool(flags & NonFinite.NEGINF),
        dtype=dtype,
        shape=[2],
        flags=int(flags),
    )


def of(own, *flags, dtype="float16"):
    got = {rank: row(1.0, each, dtype) for rank, each in enumerate(flags)}
    return GradientSum({rank: row(size, dtype=dtype) for rank, size in enumerate(own)}, got)


@pytest.mark.parametrize(
    "flags", [NonFinite.POSINF, NonFinite.NEGINF, NonFinite.INF, NonFinite.POSINF | NonFinite.NEGINF]
)
@pytest.mark.parametrize(
    ("own", "dtype", "answer"),
    [
        ((4e4, 4e4), "float16", "sum"),
        ((3e4, 3e4), "float16", "no"),
        ((4e4, 4e4), "bfloat16", "narrower"),
        ((2e38, 2e38), "float32", "sum"),
        ((0.0, 0.0), "float32", "no"),
    ],
)
def test_an_inf_needs_a_sum_beyond_the_largest_number(own, dtype, answer, flags):
    found = of(own, flags, flags, dtype=dtype)
    assert (found.answer, found.is_proven) == (answer, answer == "sum")


def test_a_nan_is_no_sum():
    assert of((4e4, 4e4), NonFinite.NAN, NonFinite.NAN).answer == "no"
    both = NonFinite.NAN | NonFinite.POSINF
    assert (of((4e4, 4e4), both, both).answer, of((4e4, 4e4), both, both).is_proven) == ("sum", False)


def test_all_ranks_get_the_same_sum():
    """A rank that was stopped before its step says nothing against it."""
    assert not of((4e4, 4e4, 4e4), NonFinite.POSINF, NonFinite.POSINF, NonFinite.NONE).is_proven
    assert of((4e4, 4e4, 4e4), NonFinite.POSINF, NonFinite.POSINF).is_proven
