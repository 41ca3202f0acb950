"""The preflight's lines, on a terminal (a real one, of the kernel's) and in a file."""

from __future__ import annotations

import io
import os
import pty
import re
import threading

import pytest
from gpuwatch.core.wire.pipe import PreflightOver, StageLine
from gpuwatch.launcher.live_lines import live_lines

BEGAN = StageLine("arrive", 1, 2)
OVER = StageLine("arrive", 2, 2, "ok", 0.34)
LAST = PreflightOver("ok", "preflight ok: 2 ranks on 1 node in 2.5 s", ["  health, warn: hot"])


def on_file(*messages, check_only):
    out = io.StringIO()
    lines = live_lines(check_only=check_only, out=out)
    for message in messages:
        lines.show(message)
    lines.close()
    return out.getvalue().splitlines()


@pytest.fixture
def terminal(monkeypatch):
    """What is left to be seen on a terminal that is 100 characters wide."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()

    def show(*messages, check_only):
        with os.fdopen(slave, "w") as out:
            lines = live_lines(check_only=check_only, out=out)
            for message in messages:
                lines.show(message)
            lines.close()
            lines.close()
        written = b""
        try:
            while data := os.read(master, 1 << 16):
                written += data
        except OSError:  # what a terminal says at its end
            pass
        return screen_of(written.decode())

    yield show
    os.close(master)


def screen_of(written: str) -> list[str]:
    """The lines that are left: of the control sequences, those that rich moves and erases with."""
    screen, row = [""], 0
    for piece in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|\r\n|\n|\r)", written):
        if piece in ("\n", "\r\n"):
            row += 1
            screen += [""] * (row + 1 - len(screen))
        elif piece == "\x1b[1A":
            row -= 1
        elif piece == "\x1b[2K":
            screen[row] = ""
        elif piece and not piece.startswith(("\x1b", "\r")):
            screen[row] += piece
    return [line.rstrip() for line in screen if line.strip()]


def test_a_check_writes_a_line_per_finished_stage():
    assert on_file(BEGAN, OVER, PreflightOver("ok"), check_only=True) == [
        "gpuwatch: preflight arrive       ok       2 of 2 ranks       0.3 s"
    ]


def test_a_stage_that_turns_out_to_have_failed_is_said_again():
    assert len(on_file(OVER, StageLine("arrive", 2, 2, "warn", 0.34), check_only=True)) == 1
    lines = on_file(OVER, StageLine("arrive", 2, 2, "fail", 0.34), check_only=True)
    assert [line.split()[3] for line in lines] == ["ok", "fail"]


def test_a_launch_writes_one_line_at_the_end_and_its_warnings():
    assert on_file(BEGAN, OVER, LAST, check_only=False) == [
        "gpuwatch: preflight ok: 2 ranks on 1 node in 2.5 s",
        "gpuwatch:   health, warn: hot",
    ]


def test_a_launch_without_a_preflight_writes_nothing():
    assert on_file(PreflightOver(), check_only=False) == []


@pytest.mark.parametrize("check_only", [False, True])
@pytest.mark.parametrize("patience_s", [0.01, 0.0])
def test_a_stage_that_takes_long_is_told_before_it_is_over(check_only, patience_s):
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w") as out, os.fdopen(read_end) as told:
        lines = live_lines(check_only=check_only, out=out, patience_s=patience_s)
        lines.show(StageLine("arrive", 7, 8))
        assert told.readline() == "gpuwatch: preflight arrive: 7 of 8 ranks so far, still waiting\n"
        lines.close()


def test_a_stage_that_is_over_keeps_nobody_waiting():
    out = io.StringIO()
    before = set(threading.enumerate())
    lines = live_lines(check_only=False, out=out, patience_s=0.01)
    lines.show(OVER)
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert out.getvalue() == ""


def test_on_a_terminal_the_stages_of_a_check_stay(terminal):
    lines = terminal(BEGAN, OVER, StageLine("compute", 1, 2), PreflightOver("ok"), check_only=True)
    assert len(lines) == 2
    assert re.fullmatch(r"preflight arrive +ok +━+ 2 of 2 ranks 0\.3 s", lines[0])
    assert re.fullmatch(r"preflight compute +\.\.\. +━+[╸╺]?━* 1 of 2 ranks \d+\.\d s", lines[1])


def test_on_a_terminal_a_launch_leaves_its_one_line(terminal):
    lines = terminal(BEGAN, OVER, LAST, check_only=False)
    assert lines == ["gpuwatch: preflight ok: 2 ranks on 1 node in 2.5 s", "gpuwatch:   health, warn: hot"]


def test_what_comes_after_the_end_is_not_shown(terminal):
    assert terminal(PreflightOver("fail"), OVER, check_only=True) == []
