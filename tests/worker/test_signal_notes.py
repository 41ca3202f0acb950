"""A script with handlers of its own runs as without gpuwatch, and the signals that reach them are noted."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from gpuwatch.core.recorder.layout import file_name
from gpuwatch.core.recorder.reader import RecorderReader

pytest.importorskip("gpuwatch.worker.native.signals", reason="signals.c was not built")

SCRIPT = """
import json, os, signal, subprocess, sys, traceback
from pathlib import Path
if sys.argv[1] == "noted":
    from gpuwatch.core.recorder.layout import file_name
    from gpuwatch.core.recorder.writer import RecorderWriter
    from gpuwatch.worker.signal_notes import note_signals
    recorder = RecorderWriter(Path(sys.argv[2]) / file_name(0, 0), rank=0, local_rank=0, world_size=1, attempt=0)
    note_signals(recorder)
    note_signals(recorder)
from signal import signal as set_handler

seen = {}

def first(number, frame):
    seen.setdefault("first", []).append([number, frame.f_code.co_name, [f.name for f in traceback.extract_stack()]])

class Second:
    def __call__(self, number, frame):
        seen["second"] = [signal.Signals(number).name, [f.name for f in traceback.extract_stack()]]
        sys.exit(7)

def sent(name):
    number = getattr(signal, "SIG" + name)
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    subprocess.run(["sh", "-c", f"kill -{name} {os.getpid()}"], check=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])  # the handler runs here, in each run

seen["before"] = [repr(set_handler(signal.SIGTERM, first)), repr(signal.signal(signal.SIGUSR1, signal.SIG_IGN))]
seen["is first"] = signal.getsignal(signal.SIGTERM) is first
sent("TERM")
sent("USR1")
seen["was first"] = signal.signal(signal.SIGTERM, signal.SIG_IGN) is first
sent("TERM")
second = Second()
seen["ignored"] = repr(signal.signal(15, second))
seen["is second"] = signal.getsignal(signal.SIGTERM) is second
seen["names"] = [signal.signal.__name__, signal.signal.__doc__, signal.signal.__module__]
seen["at Ctrl-C"] = signal.getsignal(signal.SIGINT) is signal.default_int_handler
for number, handler in ((99, first), (15, "no handler"), (9, first)):
    try:
        signal.signal(number, handler)
    except Exception as error:
        seen.setdefault("errors", []).append(repr(error))
try:
    sent("TERM")
finally:
    print(json.dumps(seen))
"""


def run(tmp_path: Path, how: str) -> tuple[int, dict, str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), how, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.slow
@pytest.mark.sample(1)
def test_nothing_differs_for_the_script_and_its_signals_are_noted(tmp_path):
    plain, noted = run(tmp_path, "plain"), run(tmp_path, "noted")

    assert noted == plain
    assert plain[0] == 7
    assert plain[1]["second"][0] == "SIGTERM"
    with closing(RecorderReader(tmp_path / file_name(0, 0))) as reader:
        (heard,) = reader.heard()
    assert (heard.number, heard.batch) == (15, -1)
    assert heard.time_ns > 0
    assert heard.sender > 0
