"""Which members of a family of tests run where. A seed draws them, the same ones on every machine and in any order.

`quick(3)`: three members of this parametrized test are quick, the others slow.
`sample(3)`: three members of this family run in CI, which asks for a sample; the soak runs all.
`sample(3, turns=True)`: another seed draws them, `--turn`, which CI takes from the commit: in time all take their turn.
`--share 2`: one in two of the tests without a mark `sample`, drawn by `--turn`, too.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import pytest

Families = dict[str, tuple[int, list[pytest.Item]]]


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpuwatch")
    group.addoption("--seed", default="0", metavar="SEED", help="draws the members of families of tests (0)")
    group.addoption("--turn", metavar="SEED", help="draws the members of families that take turns (as --seed)")
    group.addoption("--sample", action="store_true", help="run as many members of a family as its mark `sample` says")
    group.addoption("--share", type=int, default=1, metavar="N", help="with --sample: one in N of the other tests")
    group.addoption("--each", type=int, metavar="N", help="with --sample: and N of each other parametrized test")


def header(config: pytest.Config) -> str:
    drawn = "a sample of the families of tests" if config.getoption("sample") else "the families' quick members"
    return f"drawn by --seed={config.getoption('seed')} --turn={_turn(config)}: {drawn}"


def mark_slow(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark all but the quick members of each family as slow. Runs before pytest applies -m."""

    def size(item: pytest.Item) -> int | None:
        mark = item.get_closest_marker("quick")
        return mark.args[0] if mark and not item.get_closest_marker("gpu") else None

    for item in _not_drawn(_families(items, size), config.getoption("seed")):
        item.add_marker(pytest.mark.slow)


def take_sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that are not in the sample. Runs after -m and -k."""
    if not config.getoption("sample"):
        return
    each = config.getoption("each")

    def size(item: pytest.Item) -> int | None:
        mark = item.get_closest_marker("sample")
        return mark.args[0] if mark else each

    in_turn = [item for item in items if _takes_turns(item)]
    others = [item for item in items if not _takes_turns(item)]
    left_out = _not_drawn(_families(others, size), config.getoption("seed"))
    left_out |= _not_drawn(_families(in_turn, size), _turn(config))
    share = config.getoption("share")
    alone = (item for item in others if size(item) is None)
    left_out |= {item for item in alone if int.from_bytes(_lot(_turn(config), item), "big") % share}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _turn(config: pytest.Config) -> str:
    return config.getoption("turn") or config.getoption("seed")


def _takes_turns(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("sample")
    return mark is not None and mark.kwargs.get("turns", False)


def _families(items: list[pytest.Item], size_of: Callable[[pytest.Item], int | None]) -> Families:
    families: dict[str, list[pytest.Item]] = defaultdict(list)
    sizes: dict[str, int] = {}
    for item in items:
        size = size_of(item)
        if size is not None:
            mark = item.get_closest_marker("sample")
            name = (mark.kwargs.get("of") if mark else None) or _id(item).partition("[")[0]
            families[name].append(item)
            if sizes.setdefault(name, size) != size:
                raise pytest.UsageError(f"the marks of {name} differ: {sizes[name]} and {size} members")
    return {name: (sizes[name], members) for name, members in families.items()}


def _lot(seed: str, item: pytest.Item) -> bytes:
    return hashlib.sha256(f"{seed} {_id(item)}".encode(errors="backslashreplace")).digest()


def _not_drawn(families: Families, seed: str) -> set[pytest.Item]:
    lot = partial(_lot, seed)
    return {item for size, members in families.values() for item in sorted(members, key=lot)[size:]}


def _id(item: pytest.Item) -> str:
    """Its node id without the name of its group, which pytest-xdist adds."""
    assert item.parent is not None
    return f"{item.parent.nodeid}::{item.name}"
