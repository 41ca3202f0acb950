"""What stands on a terminal once a job has ended: its answer, and what to do, without scrolling."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import pytest
from gpuwatch.collector.report.one_screen import MOST_LINES

from .tmux import Terminal

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")]
ROOT = Path(__file__).resolve().parents[2]
FAULTS, BAD_ENDS = ("examples/faults.py", "--fault"), "tests/e2e/scripts/bad_ends.py"
HANG = ("--hang-timeout", "8", "--on-hang", "abort")


@pytest.mark.sample(1, of="a screen")
@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (120, 50)])
@pytest.mark.parametrize(
    ("script", "options", "verdict", "says", "shows"),
    [
        ((*FAULTS, "forward"), (), "overflow, established", "Rank 1 on ", "more: --rank 1"),
        (
            (*FAULTS, "raise"),
            (),
            "crash, established",
            "/data/00017.tar is empty",
            "Traceback (most recent call last):",
        ),
        (
            (*FAULTS, "kill"),
            ("--telemetry", "1"),
            "lost, established",
            "was killed by SIGKILL",
            "resident memory of rank 1",
        ),
        ((*FAULTS, "loop"), HANG, "hang, supported", "Rank 1 is at faults.py:", "Stack of rank 1, innermost call last"),
        ((BAD_ENDS, "preempted: launch", "1"), (), "interrupted, established", "by SIGTERM", "ended with exit code 7"),
        ((BAD_ENDS, "fault, sleeps", "1"), (), "hang, supported", "Rank 1 was at bad_ends.py:", "killed by SIGSEGV"),
    ],
    ids=["overflow", "crash", "lost", "hang", "interrupted", "fault in a wait"],
)
def test_the_answer_is_on_the_screen(bench, script, options, verdict, says, shows, columns, lines):
    """On a small one the verdict and what to do, on a large one all that was printed at the end."""
    words = ("launch", "--nproc-per-node", "2", *options, str(ROOT / script[0]), *script[1:])
    terminal = Terminal(bench.cwd, bench.environment, columns, lines)
    try:
        terminal.run(shlex.join([sys.executable, "-m", "gpuwatch.cli.main", *words]) + "; echo the end")
        screen = terminal.until(lambda screen: any(line.strip() == "the end" for line in screen))
    finally:
        terminal.close()
    text = "\n".join(screen)
    answer = text[text.rindex("VERDICT  ") :]
    assert answer.startswith(f"VERDICT  {verdict}")
    assert says in " ".join(answer.split())
    is_short = verdict.startswith("interrupted")  # all of it fits on the small screen, and is there once
    assert ("\nNext\n" if is_short else "\nNext: ") in answer
    if lines > MOST_LINES:
        report = text[text.index("gpuwatch report: run ") : text.rindex("the end")]
        assert shows in report
        assert report.count("VERDICT  ") == 1 + (not is_short)


def test_a_rank_that_only_lost_another_one_prints_one_line_on_a_terminal_and_the_report_has_its_traceback(bench):
    """Rank 0 waits in all_reduce while rank 1 ends. What goes into a file or a pipe is as it was."""
    script = bench.cwd / "loses.py"
    script.write_text(LOSES_A_PEER)
    words = ("launch", "--nproc-per-node", "2", "--preflight", "off", str(script))
    terminal = Terminal(bench.cwd, bench.environment, 120, 120)
    try:
        terminal.run(shlex.join([sys.executable, "-m", "gpuwatch.cli.main", *words]) + "; echo the end")
        screen = "\n".join(terminal.until(lambda screen: any(line.strip() == "the end" for line in screen)))
    finally:
        terminal.close()
    report = bench.gpuwatch("report", "--rank", "0").stdout
    piped = bench.gpuwatch(*words)

    assert "[rank0]" not in screen
    assert "gpuwatch: rank 0: connection " in screen
    assert "by peer (its traceback: gpuwatch report --rank 0)" in screen
    assert "[rank1]: ValueError: the data of rank 1 is broken" in screen
    assert "Traceback of rank 0\nTraceback (most recent call last):" in report
    assert "dist.all_reduce(torch.ones(1))" in report
    assert "[rank0]: Traceback (most recent call last):" in piped.stderr


LOSES_A_PEER = """
import signal
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    raise ValueError("the data of rank 1 is broken")
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's: the error of this rank comes first
dist.all_reduce(torch.ones(1))
"""
