"""Which members of a family of tests run: a seeded sample for CI, all of them in the soak."""

from __future__ import annotations

import hashlib
from collections import defaultdict

import pytest


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpuwatch")
    group.addoption(
        "--sample", metavar="SEED", help="of each family of tests run only so many members as its mark says"
    )
    group.addoption("--each", type=int, metavar="N", help="with --sample: of every other parametrized test N members")


def header(config: pytest.Config) -> list[str]:
    seed = config.getoption("sample")
    return [] if seed is None else [f"a sample of the tests: --sample={seed}; the soak runs all of them"]


def take_sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop what is not in the sample. The same seed takes the same tests, on any machine and in any order."""
    seed = config.getoption("sample")
    if seed is None:
        return
    families: dict[str, list[pytest.Item]] = defaultdict(list)
    sizes: dict[str, int] = {}
    for item in items:
        mark = item.get_closest_marker("sample")
        size = mark.args[0] if mark else config.getoption("each")
        if size is not None:
            family = (mark.kwargs.get("of") if mark else None) or item.nodeid.partition("[")[0]
            families[family].append(item)
            if sizes.setdefault(family, size) != size:
                raise pytest.UsageError(f"the marks of {family} differ: {sizes[family]} and {size} members")
    left_out = {
        member
        for family, members in families.items()
        for member in sorted(members, key=lambda item: _draw(seed, item.nodeid))[sizes[family] :]
    }
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _draw(seed: str, test: str) -> bytes:
    return hashlib.sha256(f"{seed} {test}".encode(errors="backslashreplace")).digest()
