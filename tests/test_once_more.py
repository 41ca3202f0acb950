"""What failed runs once more, alone: real runs of pytest, each on a few small tests."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CONFTEST = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import once_more, pytest, sampling

def pytest_addoption(parser):
    sampling.add_options(parser)
    once_more.add_options(parser)

def pytest_configure(config):
    once_more.configure(config)

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    once_more.keep_only(config, items)
    sampling.mark_slow(config, items)
    yield
    sampling.take_sample(config, items)
"""
INI = "[pytest]\nmarkers =\n  slow:\n  quick:\n  sample:\n"
IMPORTS = """
import os, pathlib, signal, pytest

def is_first_time(name):
    file = pathlib.Path(f"{name}.has-run")
    is_first = not file.exists()
    file.touch()
    return is_first

"""
TABLE = "==== flaky: passed alone\n"


def flaky(*names: str) -> str:
    return "".join(f"def test_{name}(): assert not is_first_time({name!r}), 'the first time'\n" for name in names)


class Runs:
    """`tests/once_more.py` in a folder with a few tests. pytest loads no plugin but xdist, which saves a second."""

    output = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "conftest.py").write_text(CONFTEST)
        (folder / "pytest.ini").write_text(INI)

    def write(self, tests: str, name: str = "test_it.py") -> None:
        (self.folder / name).write_text(IMPORTS + tests)

    def run(self, *options: str) -> int:
        return self._start("run", "-p", "no:cacheprovider", "-p", "xdist", *options)

    def run_many(self, times: int) -> int:
        return self._start("flaky", str(times))

    def _start(self, *arguments: str) -> int:
        environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
        command = [sys.executable, str(HERE / "once_more.py"), *arguments]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        self.output = done.stdout + done.stderr
        return done.returncode

    @property
    def table(self) -> list[str]:
        """The tests that it names."""
        table = self.output.partition(TABLE)[2].partition("\n==== ")[0]
        return [line.removeprefix("test_it.py::") for line in table.splitlines() if line.startswith("test_it.py::")]

    @property
    def reruns(self) -> list[str]:
        start = "==== once more, alone: test_it.py::"
        return [line.removeprefix(start) for line in self.output.splitlines() if line.startswith(start)]

    @property
    def closing_line(self) -> str:
        """`1 passed in 0.01s`: what CI takes for the result."""
        return [line for line in self.output.splitlines() if line.startswith("===") and " in " in line][-1].strip("= ")


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.mark.slow
def test_what_passes_alone_is_in_the_table_with_its_first_output(runs):
    runs.write("def test_good(): pass\n" + flaky("now_and_then"))
    assert runs.run("--numprocesses", "1", "--dist", "worksteal") == 0
    assert runs.reruns == runs.table == ["test_now_and_then"]
    assert "    | E   AssertionError: the first time" in runs.output
    assert runs.closing_line.startswith("1 passed in")


@pytest.mark.slow
def test_what_fails_twice_fails_the_run(runs):
    runs.write("def test_bad(): assert 1 == 2\n" + flaky("now_and_then"))
    assert runs.run() == 1
    assert runs.reruns == ["test_bad", "test_now_and_then"]
    assert runs.table == ["test_now_and_then"]
    assert "==== failed alone, too\ntest_it.py::test_bad\n" in runs.output


@pytest.mark.slow
def test_three_may_be_flaky_of_all_runs_together(runs):
    """As of `make test` and `make slow`."""
    runs.write(flaky("one", "two", "three"))
    assert runs.run() == 0
    assert runs.table == ["test_one", "test_two", "test_three"]
    runs.write(flaky("four"))
    assert runs.run() == 1
    assert runs.table == ["test_one", "test_two", "test_three", "test_four"]
    assert "==== more than 3 tests are flaky" in runs.output


@pytest.mark.slow
def test_of_many_failures_none_runs_again(runs):
    runs.write(flaky(*(f"number_{number}" for number in range(11))))
    assert runs.run() == 1
    assert "nothing is run again: more than 10 tests have failed" in runs.output
    assert runs.reruns == []


@pytest.mark.slow
def test_a_worker_of_xdist_that_is_killed(runs):
    """xdist reports a failure of that test alone, and would pass its second run."""
    killed = "def test_killed():\n    if is_first_time('killed'): os.kill(os.getpid(), signal.SIGKILL)\n"
    runs.write(killed + "def test_good(): pass\n")
    assert runs.run("--numprocesses", "1") == 1
    assert "1 failed, 1 passed" in runs.closing_line
    assert "nothing is run again: a worker of xdist died" in runs.output
    assert runs.reruns == [] and TABLE not in runs.output


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize("options", [(), ("--continue-on-collection-errors",)])
def test_a_file_that_cannot_be_imported(runs, workers, options):
    runs.write(flaky("now_and_then"))
    runs.write("raise RuntimeError\n", "test_other.py")
    assert runs.run("--numprocesses", workers, *options) in (1, 2)
    assert "==== nothing is run again: " in runs.output
    assert runs.reruns == [] and TABLE not in runs.output


FIXTURE = """
@pytest.fixture
def fixture():
    assert {part!r} != "setup" or not is_first_time("setup")
    yield
    assert {part!r} != "teardown" or not is_first_time("teardown")

def test_with_a_fixture(fixture): pass

@pytest.fixture
def bad_fixture():
    yield
    assert {part!r} == "setup"

def test_with_a_bad_one(bad_fixture): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("part", ["setup", "teardown"])
def test_an_error_of_a_fixture_is_a_failure_of_its_test(runs, part):
    runs.write(FIXTURE.format(part=part))
    assert runs.run() == (0 if part == "setup" else 1)
    assert runs.reruns == ["test_with_a_fixture", *["test_with_a_bad_one"] * (part == "teardown")]
    assert runs.table == ["test_with_a_fixture"]


ODD = """
@pytest.mark.parametrize("name", ["a b", "x[0]::y", "p]@q", 'quo"te\\n\\u00e9$(date)', "fine"])
@pytest.mark.xdist_group("of one")
def test_odd(name):
    assert not is_first_time(name.encode().hex()) or name in ("fine", {passes!r})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dist", "passes", "others"),
    [("no", "p]@q", ["a b", "x[0]::y"]), ("loadgroup", "x[0]::y", ["a b", "p]@q"])],
)
def test_odd_names_of_tests(runs, dist, passes, others):
    """With loadgroup some releases of xdist put the name of the group behind them."""
    runs.write(ODD.format(passes=passes))
    assert runs.run("--numprocesses", "0" if dist == "no" else "1", "--dist", dist) == 0
    names = [f"test_odd[{name}]" for name in (*others, r'quo"te\n\xe9$(date)')]
    assert sorted(name.removesuffix("@of one") for name in runs.table) == sorted(names)


@pytest.mark.slow
def test_a_sample_and_a_mark_leave_out_nothing_that_runs_again(runs):
    """Two of the nine are quick, and of the seven slow ones the sample has three. All fail the first time."""
    runs.write("""
@pytest.mark.quick(2)
@pytest.mark.sample(3)
@pytest.mark.parametrize("number", range(9))
def test_family(number): assert not is_first_time(number)
""")
    assert runs.run("-m", "slow", "--sample", "--seed", "7") == 0
    assert len(runs.table) == 3


@pytest.mark.slow
def test_what_is_skipped_then_has_not_passed(runs):
    runs.write("def test_it():\n    assert not is_first_time('it')\n    pytest.skip('no more')\n")
    assert runs.run() == 1
    assert runs.reruns == ["test_it"] and runs.table == []


@pytest.mark.slow
def test_the_output_of_a_test_never_looks_like_pytests_last_line(runs):
    runs.write("""
def test_it():
    print("x" * 99_999)
    print("=" * 9, "3 failed in 1.0s", "=" * 9)
    assert not is_first_time("it")
""")
    assert runs.run() == 0
    assert "    | --------- 3 failed in 1.0s ---------\n" in runs.output
    assert runs.closing_line.startswith("1 passed in")
    [entry] = json.loads((runs.folder / "build" / "once-more" / "flaky.json").read_text())
    assert "characters are left out" in entry["output"] and len(entry["output"]) < 10_000

    assert runs.run() == 0
    assert runs.reruns == [] and runs.table == ["test_it"]  # as `make slow` repeats what `make test` found


@pytest.mark.slow
@pytest.mark.parametrize(("tests", "counts"), [("", {}), ("def test_bad(): assert 1 == 2\n", {"failed": 2})])
def test_with_another_torch_what_passes_alone_is_counted_as_flaky(runs, monkeypatch, tests, counts):
    spec = importlib.util.spec_from_file_location("matrix", HERE / "matrix.py")
    matrix = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "matrix", matrix)  # for its dataclass
    spec.loader.exec_module(matrix)
    runs.write("def test_good(): pass\n" + flaky("now_and_then") + tests)
    command = [sys.executable, str(HERE / "once_more.py"), "run", "-q", "-p", "no:cacheprovider"]
    assert matrix.test(Path(sys.prefix), command, runs.folder) == {"passed": 1, **(counts or {"flaky": 1})}


@pytest.mark.slow
def test_what_failed_with_another_python_is_not_run_with_this_one(runs):
    runs.write(flaky("now_and_then"))
    assert runs.run() == 0
    file = runs.folder / "build" / "once-more" / "flaky.json"
    [entry] = json.loads(file.read_text())
    assert entry["python"] == sys.executable
    file.write_text(json.dumps([{**entry, "python": "/no/such/python"}]))
    assert runs.run_many(2) == 0
    assert "not run, it failed with another Python (/no/such/python): test_it.py::test_now_and_then" in runs.output


# -- a run that no second one makes good ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + 9),
        ("os._exit(1)", 3),
        ("os._exit(0)", 3),
        ("raise KeyboardInterrupt", 2),
        ("pytest.exit('enough', 1)", 1),
    ],
)
def test_a_pytest_that_ends_in_the_middle(runs, end, code):
    runs.write(f"{flaky('now_and_then')}\ndef test_that_ends_pytest():\n    {end}\n")
    assert runs.run() == code
    assert "==== nothing is run again: " in runs.output
    assert runs.reruns == []


@pytest.mark.slow
def test_a_second_run_that_ends_in_the_middle(runs):
    runs.write(f"{flaky('now_and_then')}\ndef test_it():\n    assert not is_first_time('it')\n    os._exit(0)\n")
    assert runs.run() == 1
    assert runs.reruns == ["test_now_and_then", "test_it"]
    assert "pytest ended with 3: nothing else is run again" in runs.output


@pytest.mark.slow
def test_tests_that_have_not_run(runs):
    runs.write(flaky("now_and_then") + "def test_that_has_not_run(): assert False\n")
    assert runs.run("--exitfirst") == 1
    assert "nothing is run again: only 1 of 2 tests ran to their end" in runs.output


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "1"])
def test_an_error_of_pytests_own(runs, workers):
    runs.write(flaky("now_and_then"))
    with (runs.folder / "conftest.py").open("a") as conftest:
        conftest.write("\ndef pytest_runtest_logfinish(): raise RuntimeError\n")
    assert runs.run("--numprocesses", workers) == 3
    assert runs.reruns == []


@pytest.mark.slow
def test_an_option_that_pytest_does_not_know(runs):
    runs.write(flaky("now_and_then"))
    assert runs.run("--no-such-option") == 4
    assert runs.reruns == []


@pytest.mark.slow
def test_no_tests(runs):
    assert runs.run() == 5


# -- make flaky -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_flaky_test_runs_many_times(runs):
    runs.write(
        flaky("once")
        + """
def test_rare():
    number = len(list(pathlib.Path().glob("run-*")))
    pathlib.Path(f"run-{number}").touch()
    assert number not in (0, 2, 3)
"""
    )
    assert runs.run() == 0
    assert runs.run_many(3) == 0
    lines = [line for line in runs.output.splitlines() if " of 3 failed" in line]
    assert lines == ["0 of 3 failed: test_it.py::test_once", "2 of 3 failed: test_it.py::test_rare"]
    assert runs.output.count("    | E   ") == 1
    assert len(list(runs.folder.glob("run-*"))) == 2 + 3


def test_without_a_flaky_test_there_is_nothing_to_run(runs):
    assert runs.run_many(3) == 0
    assert "has no flaky test" in runs.output
