"""The last words of .ci/run, which are printed after every step: they do not change what the steps have found."""

import pathlib
import subprocess

import pytest

GATE = pathlib.Path(__file__).parents[1] / ".ci" / "run"


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_is_that_of_the_steps(tmp_path, code):
    """A list of slow tests that is longer than a pipe holds, once ended one whole green run with 141, a SIGPIPE."""
    head, found, _ = GATE.read_text().partition("\nrm -rf build/once-more\n")
    assert found, ".ci/run begins with its summary, and then removes what earlier runs left"
    script = tmp_path / ".ci" / "run"
    script.parent.mkdir()
    script.write_text(f"{head}\nstep work\n(exit {code})\nresult='all passed'\n")
    slowest = tmp_path / "build" / "once-more" / "slowest.txt"
    slowest.parent.mkdir(parents=True)
    slowest.write_text("".join(f"{number:8}.1 s  tests/test_{number}.py::test\n" for number in range(5_000)))
    ended = subprocess.run(["bash", script], text=True, capture_output=True)
    assert (ended.returncode, ended.stderr) == (code, "")
    listed = [line for line in ended.stdout.splitlines() if "::test" in line]
    assert listed == slowest.read_text().splitlines()[:-11:-1]
    assert ("not all passed" in ended.stdout) is (code != 0)
