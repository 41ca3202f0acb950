from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

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
