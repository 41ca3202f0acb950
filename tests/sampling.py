"""Which members of a family of tests run where. A seed draws them, the same ones on every machine and in any order.

`quick(3)`: three members of this parametrized test are quick, the others slow.
`quick_here(9)`: nine of the tests of this file that would be quick are, the others slow (as `pytestmark`).
`sample(3)`: three members of this family run in CI, which asks for a sample; the soak runs all.
`sample(3, turns=True)`: another seed draws them, `--turn`, which CI takes from the commit: in time all take their turn.
`--minutes 10`: in an order that `--turn` draws, those that can begin within ten minutes. CI takes as long on a slow
machine as on a fast one, and in time all take their turn. The end says how many did not begin.
A file whose `pytestmark` has a mark that -m excludes is not imported: transformers alone takes seconds.
`comes_first`: before the others, with --minutes and among the members of a family: one of each kind of run.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

_OF_THE_FILE = re.compile(r"^pytestmark = (?:\[[^\]]*\]|.*)", re.MULTILINE)
Families = dict[str, tuple[int, list[pytest.Item]]]


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpuwatch")
    group.addoption("--seed", default="0", metavar="SEED", help="draws the members of families of tests (0)")
    group.addoption("--turn", metavar="SEED", help="draws the members of families that take turns (as --seed)")
    group.addoption("--sample", action="store_true", help="run as many members of a family as its mark `sample` says")
    group.addoption(
        "--each", type=int, metavar="N", help="with --sample: and N of each other parametrized test, drawn by --turn"
    )
    group.addoption("--minutes", type=float, metavar="N", help="begin no test later, and take them in a drawn order")


def is_left_out(config: pytest.Config, file: Path) -> bool:
    """Whether each test of a file has a mark that -m excludes by `not MARK`."""
    excluded = re.findall(r"\bnot (\w+)", config.getoption("markexpr"))
    if not excluded or file.suffix != ".py":
        return False
    of_the_file = _OF_THE_FILE.search(file.read_text(errors="replace"))
    return bool(of_the_file and re.search(rf"\bmark\.(?:{'|'.join(excluded)})\b", of_the_file[0]))


def header(config: pytest.Config) -> str:
    drawn = "a sample of the families of tests" if config.getoption("sample") else "the families' quick members"
    return f"drawn by --seed={config.getoption('seed')} --turn={_turn(config)}: {drawn}"


def mark_slow(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark all but the quick members of each family, and of a file, as slow. Runs before pytest applies -m."""

    def size(item: pytest.Item) -> int | None:
        mark = item.get_closest_marker("quick")
        return mark.args[0] if mark and not item.get_closest_marker("gpu") else None

    for item in _not_drawn(_families(items, size), config.getoption("seed")):
        item.add_marker(pytest.mark.slow)
    files: Families = {}
    for item in items:
        mark = item.get_closest_marker("quick_here")
        if mark and not any(item.get_closest_marker(other) for other in ("slow", "soak", "gpu")):
            files.setdefault(str(item.path), (mark.args[0], []))[1].append(item)
    for item in _not_drawn(files, config.getoption("seed")):
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
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def limit_time(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --minutes: draw the order, and register what skips the tests that would begin too late."""
    minutes = config.getoption("minutes")
    if minutes is not None:
        items.sort(key=partial(_order, _turn(config)))
        config.pluginmanager.register(TimeLimit(minutes))


class TimeLimit:
    """A pytest plugin. With xdist each worker has one, and the process that started them tells the number."""

    def __init__(self, minutes: float) -> None:
        self._reason = _not_begun(minutes)
        self.end = time.monotonic() + 60 * minutes

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Comes before the test's fixtures."""
        if time.monotonic() > self.end:
            pytest.skip(self._reason)


def tell_not_begun(config: pytest.Config, reporter: pytest.TerminalReporter) -> None:
    """`57 of 412 tests: not begun within 10 minutes (--minutes)`"""
    minutes = config.getoption("minutes")
    if minutes is None:
        return
    reason = _not_begun(minutes)
    skipped = reporter.stats.get("skipped", [])
    number = sum(reason in report.longreprtext for report in skipped)
    ended = sum(len(reporter.stats.get(how, [])) for how in ("passed", "failed", "error", "skipped"))
    reporter.write_line(f"{number} of {ended} tests: {reason}")


def _not_begun(minutes: float) -> str:
    return f"not begun within {minutes:g} minutes (--minutes)"


def _turn(config: pytest.Config) -> str:
    return config.getoption("turn") or config.getoption("seed")


def _takes_turns(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("sample")
    return mark is None or mark.kwargs.get("turns", False)


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
    order = partial(_order, seed)
    return {item for size, members in families.values() for item in sorted(members, key=order)[size:]}


def _order(seed: str, item: pytest.Item) -> tuple[bool, bytes]:
    return item.get_closest_marker("comes_first") is None, _lot(seed, item)


def _id(item: pytest.Item) -> str:
    """Its node id without the name of its group, which pytest-xdist adds."""
    assert item.parent is not None
    return f"{item.parent.nodeid}::{item.name}"
