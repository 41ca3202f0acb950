"""A script may close every descriptor that it has not opened. Real processes, and what is in the script's file then."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import faulthandler, gc, os, resource, signal, sys
from pathlib import Path
from gpuwatch.core.recorder.layout import RankPhase
from gpuwatch.core.recorder.reader import RecorderReader
from gpuwatch.core.settings import WorkerSettings
from gpuwatch.worker import session as sessions
from gpuwatch.worker.session import open_session
folder = Path(sys.argv[1])
def watch():
    session = open_session(WorkerSettings(""), folder / "recorder", 0, 0, 1)
    session.answer_with_stacks()
    return session
def checkpoints():
    # under the first numbers that are free
    files = [open(folder / f"checkpoint-{number}", "wb", buffering=0) for number in range(8)]
    for file in files:
        file.write(b"16 bytes of ours")
    return files
def look():
    for file in files:
        assert os.fstat(file.fileno()).st_mode & 0o777 == 0o644
"""
CLOSES = "os.umask(0o22); os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0]); files = checkpoints(); "
DIES = "os.kill(os.getpid(), signal.SIGSEGV)"


def ran(tmp_path, script, **how):
    return subprocess.run(
        [sys.executable, "-c", BEGIN + script, str(tmp_path)], capture_output=True, text=True, timeout=120, **how
    )


def assert_untouched(tmp_path):
    written = [path.read_bytes() for path in tmp_path.glob("checkpoint-*")]
    assert written == [b"16 bytes of ours"] * 8


def stack_of(tmp_path):
    return (tmp_path / "rank-00000.attempt-000.stack").read_text()


def own_number(body):
    """The script has our file's own number: it took all lower ones, or asked for it."""
    return f"""
session = watch()
number = max(int(name) for name in os.listdir("/proc/self/fd"))
files = checkpoints()
os.dup2(files[0].fileno(), number)
{body}
"""


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("script", "code"),
    [
        (f"session = watch(); {CLOSES}{DIES}", -11),
        (f"session = watch(); {CLOSES}os.kill(os.getpid(), signal.SIGRTMAX - 3)", 0),
        (f"session = watch(); {CLOSES}os.kill(os.getpid(), signal.SIGRTMAX - 4)", 0),
        (f"session = watch(); {CLOSES}signal.signal(signal.SIGRTMAX - 3, print); look()", 0),
        (f"session = watch(); {CLOSES}session.recorder.close(); look()", 0),
        (f"session = watch(); {CLOSES}del session; sessions._current = None; gc.collect(); look()", 0),
        (f"watch(); reader = RecorderReader(folder / 'recorder'); {CLOSES}reader.close(); look()", 0),
        (own_number(f"from gpuwatch.worker.answers import look_at_stack_file; look_at_stack_file(); {DIES}"), -11),
        (own_number(f"child = os.fork()\nif not child: {DIES}\nprint(os.waitpid(child, 0)[1] & 127)"), 0),
        ("resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)); session = watch(); " + CLOSES + DIES, -11),
    ],
    ids=[
        "dies",
        "is asked in C",
        "is asked",
        "has a handler",
        "closes",
        "collects",
        "reader",
        "same number",
        "fork",
        "few files",
    ],
)
def test_nothing_of_ours_reaches_a_file_of_the_script(tmp_path, script, code):
    done = ran(tmp_path, script)
    assert done.returncode == code, done.stderr
    assert_untouched(tmp_path)


def test_a_fatal_signal_is_told_although_the_script_has_closed_what_it_knows(tmp_path):
    assert ran(tmp_path, f"session = watch(); os.closerange(3, 1024); files = checkpoints(); {DIES}").returncode == -11
    assert "Segmentation fault" in stack_of(tmp_path)


def test_a_recorder_holds_no_descriptor(tmp_path):
    assert ran(tmp_path, "session = watch(); print(checkpoints()[0].fileno())").stdout == "3\n"


def test_a_recorder_is_never_a_closed_stderr(tmp_path):
    script = f"""
for stream in (0, 1, 2): os.close(stream)
session = watch()
header = RecorderReader(folder / "recorder").header()
try: os.write(2, b"a warning of a C library " * 100)
except OSError: os.close(os.open(folder / "none there", os.O_CREAT | os.O_WRONLY))
files = checkpoints()
assert files[0].fileno() == 0
session.recorder.close()
assert RecorderReader(folder / "recorder").header() == header
(folder / "well").touch()
{DIES}
"""
    assert ran(tmp_path, script).returncode == -11
    assert (tmp_path / "well").exists()
    assert (tmp_path / "none there").exists()
    assert_untouched(tmp_path)
