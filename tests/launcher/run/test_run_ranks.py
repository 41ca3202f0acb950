"""What becomes a rank below a command, and how it ended: real processes, their recorders written by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest
from gpuwatch.core.recorder import writer
from gpuwatch.core.recorder.run_folder import process_file
from gpuwatch.core.wire.pipe import WorkersEnded, WorkersStarted
from gpuwatch.launcher.run.ranks import Ranks


@pytest.mark.parametrize("code", [0, 3])
def test_a_command_that_had_a_model_and_no_optimizer_is_a_rank_whose_end_is_known(tmp_path, monkeypatch, code):
    """It is known to be a rank when it has ended: nobody watched its process, and the run has its code."""
    command = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])
    command.wait()
    monkeypatch.setattr(writer.os, "getpid", lambda: command.pid)
    recorder = writer.RecorderWriter(
        tmp_path / process_file(command.pid),
        rank=0,
        local_rank=0,
        world_size=1,
        attempt=0,
        log_bytes=1 << 16,
        segments=2,
    )
    recorder.close()
    told, ended = [], []
    ranks = Ranks(tmp_path, told.append, lambda *end: ended.append(end))

    ranks.last_look({command.pid: command.returncode})

    assert ended == [(0, 0, code)]
    assert [type(each) for each in told] == [WorkersStarted, WorkersEnded]
    assert told[1].codes == {0: code}
    ranks.close()
