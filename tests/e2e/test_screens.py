"""What stands on a terminal once a job has ended: its answer, and what to do, without scrolling."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import pytest

from .tmux import Terminal

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")]
ROOT = Path(__file__).resolve().parents[2]
HANG = ("--hang-timeout", "8", "--on-hang", "abort")


@pytest.mark.sample(1, of="a screen")
@pytest.mark.parametrize("lines", [24, 50])
@pytest.mark.parametrize(
    ("fault", "options", "verdict", "says"),
    [
        ("forward", (), "overflow, established", "Rank 1 on "),
        ("raise", (), "crash, established", "/data/00017.tar is empty"),
        ("kill", (), "lost, established", "was killed by SIGKILL"),
        ("loop", HANG, "hang, supported", "Rank 1 never reached"),
    ],
)
def test_the_answer_is_on_the_screen(bench, fault, options, verdict, says, lines):
    words = ("launch", "--nproc-per-node", "2", *options, str(ROOT / "examples" / "faults.py"), "--fault", fault)
    terminal = Terminal(bench.cwd, bench.environment, 80, lines)
    try:
        terminal.run(shlex.join([sys.executable, "-m", "gpuwatch.cli.main", *words]) + "; echo the end")
        screen = terminal.until(lambda screen: any(line.strip() == "the end" for line in screen))
    finally:
        terminal.close()
    text = "\n".join(screen)
    answer = text[text.rindex("VERDICT  ") :]
    assert answer.startswith(f"VERDICT  {verdict}")
    assert says in " ".join(answer.split())
    assert "\nNext: " in answer
