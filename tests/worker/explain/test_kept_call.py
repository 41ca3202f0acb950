from __future__ import annotations

import dataclasses
import weakref
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from gpuwatch.worker.explain.kept_call import is_kept_weakly, kept_object, still_there
from torch import nn


class Plain:
    def __init__(self, x: Any) -> None:
        self.x = x


class Own(dict[str, Any]):
    pass


class Closed:
    def __init__(self, x: Any) -> None:
        self.x = x

    def __del__(self) -> None:
        pass


class WithSlots:
    __slots__ = ("__weakref__", "x")

    def __init__(self, x: Any) -> None:
        self.x = x


class Asked(Own):
    """One that makes its items when they are asked for."""

    def _no(self, *_: Any) -> Any:
        raise AssertionError("gpuwatch has asked")

    __getitem__ = __iter__ = __len__ = keys = values = items = _no  # type: ignore[assignment]

    @property
    def later(self) -> Any:
        return self._no()


class Called(Asked):
    """One that can be called, and has any attribute."""

    def __call__(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return self._no()


@dataclasses.dataclass
class Fields:
    x: Any


def cyclic() -> Plain:
    found = Plain(torch.ones(2))
    found.itself = [found]  # type: ignore[attr-defined]
    return found


SMALL, LARGE = torch.ones(4), torch.ones(2 << 20)


@pytest.mark.parametrize("make", [Plain, lambda x: Own(x=x), lambda x: UserDict(x=x), Fields])
@pytest.mark.parametrize("inside", [lambda x: x, lambda x: [{"y": (x, 1, "text", None)}], Plain])
def test_an_object_is_kept_if_it_holds_little(make, inside):
    assert not is_kept_weakly(kept_object(make(inside(SMALL))))
    large = make(inside(LARGE))
    kept = kept_object(large)
    assert is_kept_weakly(kept)
    assert still_there(kept) is large
    gone = weakref.ref(large)
    del large
    assert gone() is None
    assert is_kept_weakly(still_there(kept))


@pytest.mark.parametrize(
    "value",
    [1, None, "text", slice(2), torch.float16, dataclasses.dataclass, Plain(np.ones(3)), cyclic, Asked(x=SMALL)],
)
def test_what_is_kept(value):
    assert kept_object(value) is value


@pytest.mark.parametrize(
    "value",
    [
        Plain(torch.ones(4, requires_grad=True)),
        Plain(np.ones(1 << 20)),
        Plain("x" * (5 << 20)),
        Plain([0] * 2000),
        Closed(SMALL),
        Plain([Closed(1)]),
        WithSlots(SMALL),
        cyclic(),
        (lambda x: lambda: x)(LARGE),
        iter([SMALL]),
        {1, 2}.__iter__(),
        nn.Linear(2, 2),
    ],
)
def test_what_is_kept_weakly(value):
    assert is_kept_weakly(kept_object(value))


def test_what_can_be_called_is_kept_weakly_and_not_asked():
    called = Called(x=SMALL)
    assert is_kept_weakly(kept_object(called))


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.inner(batch.x)


@pytest.mark.parametrize("cls", [Plain, Closed])
@pytest.mark.parametrize("rows", [2, 1 << 19])
def test_a_batch_dies_where_the_script_lets_go_of_it(watch, late, cls, rows):
    """A small one may be kept for a second run, unless its class wants to know."""
    watched = watch(on_overflow="abort")
    model = Reads()
    for _ in range(2):
        batch = cls(torch.ones(rows, 4))
        model(batch).sum().backward()
        gone = weakref.ref(batch)
        del batch
        assert (gone() is None) == (cls is Closed or rows > 2)
    assert watched.faults == []


def test_a_mode_of_the_script_does_not_see_that_arguments_are_kept(watch, late):
    class Noting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            calls.append(getattr(function, "__name__", str(function)))
            return function(*args, **(kwargs or {}))

    def run() -> list[str]:
        model, x = nn.Linear(4, 2), torch.ones(3, 4)
        model(x)
        calls.clear()
        with Noting():
            model(x)
        return list(calls)

    calls: list[str] = []
    plain = run()
    watch(on_overflow="abort")
    assert run() == plain == ["linear"]
