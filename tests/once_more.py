"""Runs pytest, and then each test that failed once more, alone: so .ci/run runs all its tests.

A test that passes alone is flaky. The run is good with at most three of them, of all targets together. They are kept
in build/once-more/flaky.json, and `make flaky` runs each of them thirty times.

    python tests/once_more.py run -m 'not slow' --numprocesses 2      with pytest's own options, from the root
    python tests/once_more.py flaky 30
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

import pytest

MOST_FLAKY = 3
"""In one `.ci/run`, which empties the folder first."""
MOST_FAILED = 10
"""If more fail, something is broken: nothing is run again."""

FOLDER = Path("build", "once-more")
ENDING = FOLDER / "ending.json"
FLAKY = FOLDER / "flaky.json"
SLOWEST = FOLDER / "slowest.txt"
"""A line for each of the slowest tests, for .ci/run: `12.3 s  tests/test_command.py::test_help`."""


# -- in pytest's process --------------------------------------------------------------------------------------------


@dataclass
class Ending:
    """What a run of pytest says of its tests as it ends."""

    failed: dict[str, str] = field(default_factory=dict)
    """The output of each test that failed, also in a fixture's setup or teardown."""
    passed: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)
    """Why there may be more that is wrong than the tests in `failed`."""


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpuwatch")
    group.addoption("--ending", metavar="FILE", help="write there how each test ended (tests/once_more.py)")
    group.addoption("--only", metavar="ID", help="run this test alone, whatever a sample would leave out")


def configure(config: pytest.Config) -> None:
    """With xdist the reports of all workers reach the process that started them, which writes the file."""
    if config.getoption("ending") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(EndingWriter(Path(config.getoption("ending")).absolute()))


def keep_only(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Comes before a sample is taken: the one member that is left of a family is in each sample of it."""
    only = config.getoption("only")
    if only:
        without_group = only.rpartition("@")[0]  # the report of a test in an xdist_group may end with the group's name
        items[:] = [i for i in items if i.nodeid == only] or [i for i in items if i.nodeid == without_group]


class EndingWriter:
    """A pytest plugin: notes what becomes of the tests, and writes it as pytest ends."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._ending = Ending()
        self._ended: set[str] = set()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._doubt(f"{report.nodeid} could not be collected")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        ending, test = self._ending, report.nodeid
        ending.seconds[test] = ending.seconds.get(test, 0.0) + report.duration
        if report.failed:
            ending.failed[test] = ending.failed.get(test, "") + shown(report)
        elif report.when == "call" and report.passed:
            ending.passed.append(test)
        if report.when == "teardown":
            self._ended.add(test)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, error: object) -> None:
        """A worker that died fails the run, although xdist starts another one and reports a mere failure of the test
        that ran. The cause may be an earlier test: C code that writes to a wrong address ends its process later. The
        test that ran would then pass alone. The worker's fixtures were not torn down either."""
        if error:
            self._doubt("a worker of xdist died")

    def pytest_internalerror(self) -> None:
        self._doubt("pytest, or a plugin of it, has raised an error")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if len(self._ended) < session.testscollected:  # as with --exitfirst
            self._doubt(f"only {len(self._ended)} of {session.testscollected} tests ran to their end")

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Without this file the run has no ending: pytest itself has failed."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(asdict(self._ending)))

    def _doubt(self, why: str) -> None:
        if why not in self._ending.doubts:
            self._ending.doubts.append(why)


def shown(report: pytest.TestReport) -> str:
    parts = [report.longreprtext, *(f"-- {title}\n{text}" for title, text in report.sections)]
    return "".join(f"{shortened(part.rstrip())}\n" for part in parts)


def shortened(text: str, most: int = 4000) -> str:
    """The end tells more of an error than the beginning does."""
    if len(text) <= most:
        return text
    return f"{text[: most // 4]}\n... {len(text) - most} characters are left out ...\n{text[-3 * most // 4 :]}"


# -- in the process that runs pytest ----------------------------------------------------------------------------------


@dataclass
class FlakyTest:
    """A test that failed, and passed alone."""

    test: str
    output: str
    """Of its first failure."""
    options: list[str]
    """Pytest's, of the run in which it failed."""
    python: str
    """The interpreter of that run: `make matrix` and `make cuda-stub` have environments of their own."""


def run(options: list[str]) -> int:
    """Returns pytest's exit code, or 0 where only flaky tests failed, and few of them."""
    code, ending = run_pytest(options)
    slowest = sorted(ending.seconds.items(), key=lambda item: -item[1])[:10]
    with SLOWEST.open("a") as file:
        file.writelines(f"{seconds:8.1f} s  {test}\n" for test, seconds in slowest)
    if code == 0:
        tell_flaky()
        return 0
    reason = why_final(code, ending)
    if reason:
        print(f"\n==== nothing is run again: {reason}", flush=True)
        return code

    twice = []
    for test, output in ending.failed.items():
        print(f"\n==== once more, alone: {test}", flush=True)
        code_alone, alone = run_alone(test, options)
        if code_alone not in (0, 1):
            print(f"\n==== pytest ended with {code_alone}: nothing else is run again", flush=True)
            return code
        if has_passed(code_alone, alone):
            add(FlakyTest(test, output, options, sys.executable))
        else:
            twice.append(test)
    tell_flaky()
    too_many = len(flaky_tests()) > MOST_FLAKY
    if too_many:
        print(f"\n==== more than {MOST_FLAKY} tests are flaky", flush=True)
    if twice:
        print("\n==== failed alone, too", *twice, sep="\n", flush=True)
    return code if twice or too_many else 0


def why_final(code: int, ending: Ending) -> str:
    """Why no second run of a test can make this run a good one; "" if one can.

    pytest ends with 1 where tests failed, with 2 to 5 where it was interrupted or could not run them, and with a
    negative number where a signal ended it.
    """
    if code != pytest.ExitCode.TESTS_FAILED:
        return f"pytest ended with {code}"
    if ending.doubts:
        return "; ".join(ending.doubts)
    if not ending.failed:
        return "pytest does not say which test has failed"
    if len(ending.failed) > MOST_FAILED:
        return f"more than {MOST_FAILED} tests have failed"
    return ""


def run_alone(test: str, options: list[str], quiet: bool = False) -> tuple[int, Ending]:
    """With the options of the run, but for those that leave tests out or start workers."""
    file = test.partition("::")[0]
    return run_pytest([*options, "-m", "", "--numprocesses", "0", f"--only={test}", file], quiet)


def has_passed(code: int, ending: Ending) -> bool:
    """A test that is skipped, or not there any more, has not."""
    return code == 0 and len(set(ending.passed)) == 1


def run_pytest(options: list[str], quiet: bool = False) -> tuple[int, Ending]:
    """A pytest that could not write its ending has none of the exit codes 0 and 1."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    ENDING.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", f"--ending={ENDING}", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL if quiet else None)

    def end(number: int, _: FrameType | None) -> None:
        process.terminate()
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C reaches pytest as well, which then ends with 2
    code = process.wait()
    if ENDING.exists():
        return code, Ending(**json.loads(ENDING.read_text()))
    return (int(pytest.ExitCode.INTERNAL_ERROR) if code in (0, 1) else code), Ending()


def flaky_tests() -> list[FlakyTest]:
    """All since the folder was emptied."""
    return [FlakyTest(**entry) for entry in json.loads(FLAKY.read_text())] if FLAKY.exists() else []


def add(flaky: FlakyTest) -> None:
    FLAKY.write_text(json.dumps([asdict(each) for each in [*flaky_tests(), flaky]], indent=1))


def tell_flaky() -> None:
    """Each target repeats those of the targets before it, so that the end of `.ci/run` shows all.

    ==== flaky: passed alone
    tests/test_command.py::test_help
        | AssertionError: assert 1 == 0
    """
    if flaky_tests():
        print("\n==== flaky: passed alone", flush=True)
    for flaky in flaky_tests():
        print(flaky.test, *quoted(flaky.output), sep="\n", flush=True)


def quoted(output: str) -> list[str]:
    """CI reads the last closing line of pytest's. That of a pytest which a test has started must not look like it."""
    return [f"    | {line.replace('===', '---')}" for line in output.splitlines()]


def run_many(times: int) -> int:
    """Run each flaky test so many times, one after the other, and print how often it failed.

    3 of 30 failed: tests/test_command.py::test_help
        | AssertionError: assert 1 == 0
    """
    if not flaky_tests():
        print(f"{FLAKY} has no flaky test: .ci/run writes it")
    for flaky in flaky_tests():
        if flaky.python != sys.executable:
            print(f"not run, it failed with another Python ({flaky.python}): {flaky.test}", flush=True)
            continue
        failures = []
        for _ in range(times):
            code, ending = run_alone(flaky.test, flaky.options, quiet=True)
            if code == pytest.ExitCode.INTERRUPTED:
                return code
            if not has_passed(code, ending):
                failures.append("\n".join(ending.failed.values()) or f"pytest ended with {code}")
        print(f"{len(failures)} of {times} failed: {flaky.test}", *quoted("".join(failures[:1])), sep="\n", flush=True)
    return 0


def main(arguments: list[str]) -> int:
    sys.stdout.reconfigure(errors="backslashreplace")  # a test's output may be in any encoding
    what, *options = arguments
    code = run(options) if what == "run" else run_many(int(options[0]))
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
