from __future__ import annotations

from collections import ChainMap, OrderedDict, UserDict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
import torch
from gpuwatch.worker.record.names import leaves_of

X, Y = torch.zeros(1), torch.ones(1)
Pair = namedtuple("Pair", "left right")


class ModelOutput(OrderedDict):
    """As in transformers: a dict that is also a dataclass-like object and indexes by number."""

    def __getitem__(self, key):
        return dict(self.items())[key] if isinstance(key, str) else tuple(self.values())[key]


@dataclass
class Output:
    logits: Any
    cache: Any = None
    more: dict = field(default_factory=dict)


def roles(value, role="output") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    leaves_of(value, role, found)
    return found


def same(left, right) -> bool:
    return len(left) == len(right) and all(a[0] == b[0] and a[1] is b[1] for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (X, [("output", X)]),
        (None, [("output", None)]),
        ((X, Y), [("output[0]", X), ("output[1]", Y)]),
        ([X, (Y, None)], [("output[0]", X), ("output[1][0]", Y), ("output[1][1]", None)]),
        (Pair(X, [Y]), [("output.left", X), ("output.right[0]", Y)]),
        ({"logits": X, "a-b": Y, 3: X}, [("output.logits", X), ("output['a-b']", Y), ("output[3]", X)]),
        (Output(X, (Y,), {"k": X}), [("output.logits", X), ("output.cache[0]", Y), ("output.more.k", X)]),
        (ModelOutput(loss=X, hidden=(X, Y)), [("output.loss", X), ("output.hidden[0]", X), ("output.hidden[1]", Y)]),
        ((), []),
        ({}, []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_nested_values_are_opened(value, expected):
    assert same(roles(value), expected)


@pytest.mark.parametrize("value", [3, "text", b"x", 2.5, object(), Output, iter([X]), {1, 2}, torch.float32])
def test_anything_else_is_a_leaf(value):
    assert same(roles(value), [("output", value)])


def test_an_iterator_is_not_consumed():
    iterator = iter([X])
    roles((iterator,))
    assert next(iterator) is X


def test_what_pytree_knows_is_opened():
    maximum = torch.max(torch.eye(2), 0)
    assert [leaf is part for (_, leaf), part in zip(roles(maximum), maximum, strict=True)] == [True, True]
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    assert [role for role, _ in roles(packed)][:2] == ["output.data", "output.batch_sizes"]


class Asked:
    """Makes its items when they are asked for."""

    def _no(self, *_: Any) -> Any:
        raise AssertionError("it was asked")

    __getitem__ = __iter__ = __len__ = __contains__ = keys = values = items = __getattr__ = _no


class AskedDict(Asked, dict):
    pass


class AskedList(Asked, list):
    pass


class AskedMapping(Asked, Mapping):
    pass


class AskedUserDict(Asked, UserDict):
    def __init__(self, **data: Any) -> None:
        self.data = data


@dataclass
class AskedOutput:
    logits: Any

    def __getattribute__(self, name: str) -> Any:
        assert name == "__class__", "it was asked"
        return AskedOutput


@dataclass(slots=True)
class InSlots:
    logits: Any
    other: Any = field(init=False)
    cls: ClassVar[int] = 1


def test_no_code_of_the_script_runs():
    assert same(roles(AskedDict(a=X, b=[Y])), [("output.a", X), ("output.b[0]", Y)])
    assert same(roles(AskedList([X, Y])), [("output[0]", X), ("output[1]", Y)])
    assert same(roles(AskedUserDict(a=X)), [("output.a", X)])
    assert same(roles(AskedOutput(X)), [("output.logits", X)])
    assert same(roles(InSlots(X)), [("output.logits", X), ("output.other", None)])
    asked, unset = AskedMapping(), AskedUserDict.__new__(AskedUserDict)
    assert same(roles(asked), [("output", asked)])
    assert same(roles(unset), [("output", unset)])


def test_a_mapping_of_python_or_of_a_package_is_opened():
    assert same(roles(MappingProxyType({"a": X})), [("output.a", X)])
    assert same(roles(ChainMap({"a": X}, {"b": Y})), [("output.b", Y), ("output.a", X)])

    class OfPackage(Mapping):
        def __getitem__(self, key: str) -> Any:
            return {"a": X}[key]

        def __iter__(self) -> Any:
            return iter(["a"])

        def __len__(self) -> int:
            return 1

    OfPackage.__module__ = "torch.of_a_package"
    assert same(roles(OfPackage()), [("output.a", X)])


def test_a_value_that_holds_itself_ends():
    loop: list = [X]
    loop.append(loop)
    loop.append({"me": loop})
    found = roles(loop)
    assert found[0] == ("output[0]", X)
    assert len(found) < 10_000


@pytest.mark.parametrize("item", [7, "token", X, None], ids=["int", "str", "tensor", "None"])
def test_a_long_list_does_not_become_a_row_for_every_item(item):
    """Every role is a name in the recorder's log, which has room for some ten thousand of them."""
    assert len(roles([item] * 50_000)) <= 1000
    assert len(roles([[item] * 100 for _ in range(500)])) <= 1000
