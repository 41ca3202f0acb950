"""In a process that gpuwatch and a script share, each finds its own module of a name."""

import os
import signal
import subprocess
import sys

import pytest
from gpuwatch.core.guest.own_imports import OWN_START

PROGRAM = """
import sys
started_with = frozenset(sys.modules)
own_path = list(sys.path[1:])
from gpuwatch.core.guest import own_imports
own_imports.began(None, own_path, started_with)
with own_imports.own_imports():
    import sched, xml.dom
ours = sched
assert not hasattr(ours, "MINE")
assert "xml.dom" in sys.modules  # nothing of that name is the script's
assert "sched" not in sys.modules
path = list(sys.path)

import sched
assert sched.MINE == 1
theirs = sched
with own_imports.own_imports():
    import sched, cmd  # and one more, which the script has as well
    assert sched is ours
    assert not hasattr(cmd, "MINE")
    assert sys.modules["sched"] is ours
assert sys.modules["sched"] is theirs and "cmd" not in sys.modules and sys.path == path

made = sys.modules["sched"] = type(sys)("sched")  # a script may put anything there
with own_imports.own_imports():
    import sched
    assert sched is ours
assert sys.modules["sched"] is made

import pathlib
(pathlib.Path(sys.path[0]) / "made_now.py").write_text("")
import made_now  # the folder is not remembered as it was when we looked
print("well")
"""


def test_each_finds_its_own(tmp_path):
    for name in ("sched", "cmd"):
        (tmp_path / f"{name}.py").write_text("MINE = 1\n")
    (tmp_path / "xml").mkdir()  # a folder without Python in it
    (tmp_path / "script.py").write_text(PROGRAM)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("well\n", "")


INTERRUPTED = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Interrupts(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "gpuwatch.worker.session":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
"""


@pytest.mark.parametrize("flags", [(), ("-u", "-B")], ids=["plain", "as torchrun starts it"])
def test_a_rank_that_is_interrupted_before_its_script_begins_shows_no_traceback_of_ours(tmp_path, flags):
    """Its end is that of an interrupted Python."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED)
    done = subprocess.run(
        [sys.executable, *flags, OWN_START, "-mgpuwatch.worker", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
