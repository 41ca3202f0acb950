"""How a process ends: threads first, as far as there is time, then exit functions and streams."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, sys, threading
from concurrent.futures import ThreadPoolExecutor
from gpuwatch.core.guest.tell import end_process

asked, done = threading.Event(), threading.Event()

def thread():
    asked.wait()
    done.wait()  # for ever, if nobody lets it end
    sys.stdout.write("thread\\n")

threading.Thread(target=thread).start()
pool = ThreadPoolExecutor(1)
pool.submit(sys.stdout.write, "pool\\n")
atexit.register(print, "exit function")
asked.set()
if sys.argv[1] == "ends":
    done.set()
end_process(7, float(sys.argv[2]) if sys.argv[2] else None)
"""


@pytest.mark.parametrize(
    ("thread", "longest", "last"),
    [
        ("ends", "", ["thread", "exit function"]),
        ("ends", "300", ["thread", "exit function"]),
        ("hangs", "0.5", ["exit function"]),
    ],
)
def test_a_process_waits_for_its_threads_but_not_for_ever(thread, longest, last):
    done = subprocess.run([sys.executable, "-c", SCRIPT, thread, longest], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (7, "")
    assert [line for line in done.stdout.splitlines() if line != "pool"] == last
    assert "pool" in done.stdout
