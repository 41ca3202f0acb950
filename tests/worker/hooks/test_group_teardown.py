"""What the recorder has of a script that takes its process group down while it handles an exception."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gpuwatch.core.events.script_events import GroupTeardown
from torch import distributed as dist


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone, which the test takes down."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    assert not dist.is_initialized()


@pytest.mark.parametrize("module", [dist, dist.distributed_c10d], ids=["torch.distributed", "distributed_c10d"])
@pytest.mark.parametrize("named", [False, True])
def test_the_exception_is_recorded_before_the_group_is_gone(watch, group, module, named):
    watched = watch()
    seen = []
    dist.all_reduce(torch.ones(1))
    with pytest.raises(SystemExit, match="loss is nan"):
        try:
            raise SystemExit("loss is nan")
        finally:
            module.destroy_process_group(*([dist.group.WORLD] if named else []))
            seen = watched.of(GroupTeardown)
    (teardown,) = seen
    assert (teardown.error, teardown.message, teardown.peer_failure) == ("SystemExit", "loss is nan", False)
    assert teardown.traceback.endswith("SystemExit: loss is nan\n")
    assert sum(teardown.where.clock.values()) == 1
    assert watched.faults == []


def test_the_end_of_a_group_of_some_ranks_or_without_an_exception_is_not_recorded(watch, group):
    watched = watch()
    with pytest.raises(KeyError):
        try:
            raise KeyError("x")
        finally:
            dist.destroy_process_group(dist.new_group([0]))
    dist.destroy_process_group()
    with pytest.raises((AssertionError, ValueError)):  # there is none any more: torch's own error
        try:
            raise KeyError("x")
        finally:
            dist.destroy_process_group()
    assert watched.of(GroupTeardown) == []


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_any_exception_is_recorded_and_the_group_is_taken_down(watch, group):
    watched = watch()
    with pytest.raises(Unprintable):
        try:
            raise Unprintable
        finally:
            dist.destroy_process_group()
    assert [(each.error, each.message) for each in watched.of(GroupTeardown)] == [("Unprintable", "")]
    assert watched.faults == []


def test_without_hooks_the_function_is_torchs_own(watch):
    before = dist.destroy_process_group
    watched = watch()
    assert dist.destroy_process_group is not before
    watched.hooks.detach()
    assert dist.destroy_process_group is before
