"""What a rank keeps of its own part of a sum over the ranks, and that it claims no other."""

from __future__ import annotations

import math

import pytest
import torch
from gpuwatch.core.events import PassedTensor, ReducedElement
from gpuwatch.worker.record import summands
from torch import distributed as dist

from ..models import tanh_net


@pytest.fixture
def kept(monkeypatch):
    """In a job of two ranks."""
    monkeypatch.setattr(summands, "ranks", lambda: 2)
    return summands.KeptSummands(is_on=True)


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
    monkeypatch.setattr(summands, "_MOST_BYTES", most)
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
