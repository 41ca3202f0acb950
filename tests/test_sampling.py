"""The gate takes some of each family of tests, the same ones for the same seed."""

import subprocess
import sys
from pathlib import Path

import pytest
import sampling

FAMILIES = """
import pytest

@pytest.mark.quick(2)
@pytest.mark.parametrize("number", range(9))
def test_mostly_slow(number): pass

@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("number", range(9))
def test_one(number): pass

@pytest.mark.slow
@pytest.mark.sample(1, of="two")
def test_two_a(): pass

@pytest.mark.slow
@pytest.mark.sample(1, of="two")
def test_two_b(): pass

@pytest.mark.slow
def test_alone(): pass

@pytest.mark.slow
@pytest.mark.sample(1, turns=True)
@pytest.mark.parametrize("number", range(9))
def test_in_turn(number): pass
"""


class Drawn:
    """A plugin that does what tests/conftest.py does, and notes which tests are left."""

    def pytest_addoption(self, parser):
        sampling.add_options(parser)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, config, items):
        sampling.mark_slow(config, items)
        yield
        sampling.take_sample(config, items)
        sampling.limit_time(config, items)

    def pytest_ignore_collect(self, collection_path, config):
        return sampling.is_left_out(config, collection_path) or None

    def pytest_collection_finish(self, session):
        self.names = [item.name for item in session.items]


OF_A_FILE = """
import pytest

pytestmark = pytest.mark.quick_here(3)

@pytest.mark.quick(2)
@pytest.mark.parametrize("number", range(9))
def test_mostly_slow(number): pass

@pytest.mark.slow
def test_alone(): pass

@pytest.mark.parametrize("number", range(4))
def test_one(number): pass
"""


@pytest.fixture
def chosen(tmp_path, monkeypatch):
    """`chosen("--seed", "7")`: the names of the tests that such a run has."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "test_families.py").write_text(FAMILIES)
    (tmp_path / "test_of_a_file.py").write_text(OF_A_FILE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow:\n  quick:\n  quick_here:\n  sample:\n")

    def chosen(*options: str, file: str = "test_families.py") -> list[str]:
        drawn = Drawn()
        # unraisableexception collects the garbage of this whole process five times, each time
        without = [f"-pno:{plugin}" for plugin in ("cacheprovider", "unraisableexception")]
        plain = ["-q", "--collect-only", "--import-mode=importlib", *without, f"--rootdir={tmp_path}"]
        assert pytest.main([*plain, f"--confcutdir={tmp_path}", *options, str(tmp_path / file)], plugins=[drawn]) == 0
        return drawn.names

    return chosen


def functions(names):
    return sorted(name.partition("[")[0] for name in names)


def test_the_quick_members_and_the_slow_ones_are_the_family(chosen):
    quick, slow = chosen("-m", "not slow"), chosen("-m", "slow")

    assert functions(quick) == ["test_mostly_slow"] * 2
    assert functions(slow).count("test_mostly_slow") == 7
    assert not set(quick) & set(slow)


def test_a_file_has_so_many_quick_ones_and_the_others_are_slow(chosen):
    quick, slow = (chosen("-m", mark, file="test_of_a_file.py") for mark in ("not slow", "slow"))

    assert len(quick) == 3 and functions(quick).count("test_mostly_slow") <= 2 and "test_alone" not in quick
    assert len(slow) == 9 + 1 + 4 - 3 and not set(quick) & set(slow)


@pytest.mark.parametrize(
    ("name", "marks"), [("one", "pytest.mark.slow"), ("two", "[pytest.mark.skip,\n    pytest.mark.slow]")]
)
def test_a_file_of_slow_tests_is_imported_only_for_slow_ones(chosen, tmp_path, name, marks):
    slow = tmp_path / f"test_{name}.py"
    slow.write_text(f"import pytest\npytestmark = {marks}\nraise RuntimeError('imported')\n")

    assert len(chosen("-m", "not slow", file="")) == 2 + 3
    with pytest.raises(AssertionError):
        chosen("-m", "slow", file="")
    slow.unlink()
    (tmp_path / f"test_also_{name}.py").write_text(f"import pytest\npytestmark = {marks}\ndef test_it(): pass\n")
    assert "test_it" in chosen("-m", "slow", file="") and "test_it" in chosen(file="")


def test_a_sample_has_every_kind_and_so_many_of_it_as_its_mark_says(chosen):
    names = chosen("-m", "slow", "--sample", "--each", "5")

    assert functions(names) == [
        "test_alone",
        "test_in_turn",
        *["test_mostly_slow"] * 5,
        *["test_one"] * 3,
        *[name for name in ("test_two_a", "test_two_b") if name in names],
    ]
    assert sum(name.startswith("test_two") for name in names) == 1


def test_a_seed_draws_the_same_ones_whatever_else_runs(chosen):
    first = chosen("--sample", "--seed", "7")

    assert chosen("--sample", "--seed", "7") == first
    only = [name for name in first if name.startswith("test_one")]
    assert chosen("--sample", "--seed", "7", "-k", "test_one") == only
    assert any(chosen("--sample", "--seed", str(seed)) != first for seed in range(9))


def test_a_turn_draws_other_members_of_what_takes_turns_and_of_nothing_else(chosen):
    """Without one the seed does."""
    turns = [chosen("--sample", "--turn", str(turn)) for turn in range(9)]

    drawn = [[name for name in names if name.startswith("test_in_turn")] for names in turns]
    assert all(len(names) == 1 for names in drawn) and len({names[0] for names in drawn}) > 1
    assert len({tuple(sorted(set(names) - set(of_turn))) for names, of_turn in zip(turns, drawn, strict=True)}) == 1
    assert chosen("--sample", "--seed", "7") == chosen("--sample", "--seed", "7", "--turn", "7")


def test_with_minutes_a_turn_draws_the_order_and_no_test(chosen):
    all_of_them = chosen("--sample", "--turn", "1")
    orders = [chosen("--sample", "--turn", "1", "--minutes", "9"), chosen("--sample", "--turn", "1", "--minutes", "9")]
    orders += [chosen("--sample", "--turn", "1", "--seed", "0", "--minutes", "1")]

    assert orders[0] == orders[1] == orders[2] != all_of_them
    assert sorted(orders[0]) == sorted(all_of_them)
    another = chosen("--sample", "--turn", "2", "--minutes", "9")
    assert [name for name in another if name in orders[0]] != [name for name in orders[0] if name in another]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("--numprocesses", "1")], ids=["alone", "with xdist"])
def test_no_test_begins_after_its_minutes_and_the_end_says_how_many(tmp_path, workers):
    """The first test waits until they are over, so that the others begin too late however fast the machine is."""
    folder = Path(__file__).parent
    (tmp_path / "conftest.py").write_text((folder / "conftest.py").read_text())
    for name in ("sampling.py", "once_more.py"):
        (tmp_path / name).write_text((folder / name).read_text())
    (tmp_path / "test_waits.py").write_text(
        "import time, pytest\n"
        "@pytest.mark.parametrize('number', range(4))\n"
        "def test_waits(request, number):\n"
        "    limit = next(p for p in request.config.pluginmanager.get_plugins() if type(p).__name__ == 'TimeLimit')\n"
        "    while time.monotonic() <= limit.end: time.sleep(0.01)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    options = ["-p", "no:cacheprovider", "--import-mode=importlib", "--minutes", "0.02", *workers]
    done = subprocess.run([sys.executable, "-m", "pytest", *options], cwd=tmp_path, capture_output=True, text=True)

    assert "1 passed, 3 skipped" in done.stdout, done.stdout + done.stderr
    assert "3 of 4 tests: not begun within 0.02 minutes (--minutes)" in done.stdout
    assert done.returncode == 0
