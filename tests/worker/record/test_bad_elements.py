"""Which elements are not finite, in words."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from gpuwatch.core.events.across_ranks import PassedTensor
from gpuwatch.core.events.read_tensors import ReducedElement
from gpuwatch.worker.record import bad_elements
from gpuwatch.worker.record.bad_elements import bad_rows, pattern_of
from torch import distributed as dist

from ..models import tanh_net


def bad(shape, *indices):
    tensor = torch.ones(shape)
    for index in indices:
        tensor[index] = math.nan
    return tensor


ALL = slice(None)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.ones(3), ""),
        (torch.tensor(math.inf), "everything"),
        (torch.full((2, 3), -math.inf), "everything"),
        (bad((2000, 2100), (3, 5)), "one element of 4.2M, at [3, 5]"),
        (bad((32, 8), 17), "all of row 17 (dim 0)"),
        (bad((32, 8), (ALL, 2), (ALL, 3)), "all of columns 2, 3 (dim 1)"),
        (bad((32, 8), (17, slice(2, 4))), "all of row 17 (dim 0), columns 2, 3 (dim 1)"),
        (bad((2, 4, 8, 8), (ALL, 2)), "all of index 2 of dim 1"),
        (bad((64, 8), slice(10, 20)), "all of 10 of 64 rows (dim 0) from 10 to 19"),
        (bad((32, 8), (17, 0), (17, 2), (17, 5)), "all of row 17 (dim 0), columns 0, 2, 5 (dim 1)"),
        (
            bad((4, 4), (0, 1), (2, 3)),
            "2 of 16 elements, all in rows 0, 2 (dim 0), columns 1, 3 (dim 1), the first at [0, 1]",
        ),
        (bad((9,), 2, 4), "all of elements 2, 4"),
        (bad((4,), 1).to(torch.float8_e5m2), "one element of 4, at [1]"),
        (torch.ones(2, device="meta"), ""),
    ],
)
def test_words(tensor, words):
    assert pattern_of(tensor) == words


@pytest.mark.slow
def test_nothing_is_imported_for_it():
    """It may be asked within a collective: torch.unravel_index imports sympy, which takes seconds."""
    code = "import sys, torch\nfrom gpuwatch.worker.record.bad_elements import pattern_of\nhad = set(sys.modules)\n"
    code += "print(pattern_of(1 / torch.tensor([1.0, 0.0, 1.0])), set(sys.modules) - had)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "one element of 3, at [1] set()\n"


@pytest.fixture
def kept(monkeypatch):
    """In a job of two ranks."""
    monkeypatch.setattr(bad_elements, "ranks", lambda: 2)
    return bad_elements.KeptSummands(is_on=True)


def total(*index):
    """A sum with a bad element, of the shape of `own`."""
    tensor = torch.ones(2, 3)
    tensor[index] = math.inf
    return tensor


def own(number=4e4):
    tensor = torch.ones(2, 3)
    tensor[1, 2] = number
    return tensor


def test_the_ranks_own_number_at_the_first_bad_element(kept):
    holder = own()
    kept.keep(holder, holder)
    holder.copy_(total(1, 2))
    assert kept.first_bad(holder, holder) == ReducedElement([1, 2], 4e4)
    kept.keep(holder, own(5e4))
    assert kept.first_bad(holder, holder) == ReducedElement([1, 2], 5e4)


@pytest.mark.parametrize(
    ("summand", "most"),
    [(own(3e4), 1 << 30), (own(math.inf), 1 << 30), (own(), 23), (torch.full((3,), 4e4), 1 << 30)],
    ids=["small", "not finite", "too many bytes", "of another shape"],
)
def test_the_element_alone_where_its_own_number_is_not_kept(kept, monkeypatch, summand, most):
    monkeypatch.setattr(bad_elements, "_MOST_BYTES", most)
    holder = total(0, 1)
    kept.keep(holder, own(1e5))
    kept.keep(holder, summand)
    assert kept.first_bad(holder, holder) == ReducedElement([0, 1])


def test_another_tensor_in_its_place_has_no_number(kept):
    holder = own()
    kept.keep(holder, holder)
    other = total(0, 0)
    kept._kept[id(other)] = kept._kept[id(holder)]
    assert kept.first_bad(other, other) == ReducedElement([0, 0])


def test_nothing_is_looked_for_in_a_finite_sum_or_after_the_batch(kept):
    holder = own()
    kept.keep(holder, holder)
    assert kept.first_bad(holder, holder) is None
    kept.forget()
    assert kept.first_bad(holder, total(0, 0)) is None


@pytest.mark.parametrize("explain", ["auto", 0])
def test_the_bad_elements_of_what_goes_in_and_comes_out_are_told_once(watch, alone_in_a_group, explain):
    watched = watch(explain=explain)
    tanh_net()(torch.ones(3, 4))  # the batch
    for _ in range(2):
        dist.all_reduce(total(0, 1))
    assert watched.faults == []
    told = [(one.came_out, one.element, one.reduced) for one in watched.of(PassedTensor)]
    element = "one element of 6, at [0, 1]"
    assert told == [(False, element, None), (True, element, None), (False, "", None), (True, "", None)]


def test_the_rows_that_hold_nan_or_inf_are_told_where_they_are_few():
    masked = bad((4, 2), (1, 0))
    masked[2] = -math.inf
    arguments = [
        ("a", masked),
        ("b", bad((3,), (2,))),
        ("c", torch.full((2, 2), math.nan)),
        ("d", torch.zeros(3)),
        ("e", 1),
    ]
    arguments.append(("f", torch.full((40, 1), math.nan).index_fill(0, torch.arange(20), 0.0)))
    assert bad_rows(arguments) == {"a": [1], "b": [2]}
