"""`gpuwatch top` in a terminal waits for a job: a real process on a terminal of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import msgspec
import pytest
from gpuwatch.core.wire.view import FILE, ViewerKeys

from ..waiting import WAIT_S, until

pytest.importorskip("textual")
pytestmark = [pytest.mark.slow, pytest.mark.sample(1, of="top waits")]


class TopOnTerminal:
    """A `gpuwatch top` in a folder, and all that it has written on its terminal."""

    def __init__(self, folder, *options):
        self.terminal, theirs = os.openpty()
        command = [sys.executable, "-m", "gpuwatch.cli.main", "top", *options]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        self.process = subprocess.Popen(command, cwd=folder, env={**os.environ, "TERM": "xterm"}, **streams)
        os.close(theirs)
        self._written = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        with suppress(OSError):  # its process has ended
            while data := os.read(self.terminal, 1 << 16):
                self._written.extend(data)

    def until(self, text):
        until(lambda: self.process.poll() is not None or text in self.written, text, lambda: self.written)
        assert text in self.written

    @property
    def written(self):
        return self._written.decode(errors="replace")

    def close(self):
        self.process.kill()
        self.process.wait()
        self._reader.join()
        os.close(self.terminal)


@pytest.fixture
def top(tmp_path):
    made = TopOnTerminal(tmp_path, "--runs-dir", "runs")
    yield made
    made.close()


def begin(folder, *, is_shown):
    folder.mkdir(parents=True)
    (folder / "report.json").write_text("{}")
    (folder.parent / "latest").unlink(missing_ok=True)
    (folder.parent / "latest").symlink_to(folder.name)
    if is_shown:
        keys = ViewerKeys("tcp://127.0.0.1:9", "0" * 40, "0" * 40, "0" * 40)
        (folder / FILE).write_bytes(msgspec.json.encode(keys))


def test_it_says_that_no_job_has_begun_and_ctrl_c_ends_it(top):
    top.until("gpuwatch: no job has begun in runs yet; waiting, Ctrl-C ends\r\n")
    top.process.send_signal(signal.SIGINT)
    assert top.process.wait(WAIT_S) == 130
    assert "Traceback" not in top.written


def test_it_shows_the_job_that_begins(top, tmp_path):
    top.until("waiting, Ctrl-C ends")
    begin(tmp_path / "runs" / "over", is_shown=False)
    begin(tmp_path / "runs" / "next", is_shown=True)
    top.until("waiting for the first update")
    os.write(top.terminal, b"q")
    assert top.process.wait(WAIT_S) == 0


def test_in_another_folder_it_shows_the_last_launch(own_state_folder, tmp_path):
    run = tmp_path / "elsewhere" / "gpuwatch-runs" / "first"
    begin(run, is_shown=True)
    (own_state_folder / "gpuwatch").mkdir(parents=True)
    (own_state_folder / "gpuwatch" / "last-run").write_bytes(os.fsencode(run))
    top = TopOnTerminal(tmp_path)
    try:
        top.until("waiting for the first update")
        os.write(top.terminal, b"q")
        assert top.process.wait(WAIT_S) == 0
    finally:
        top.close()
