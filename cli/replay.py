"""`gpuwatch replay`: runs the forward that `--capture` wrote again, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import click
import msgspec
from rich.table import Column, Table
from rich.text import Text

from ..collector.report.notices_text import PLAIN
from ..collector.report.sentence_parts import TextConsole
from ..collector.run_files import RunPaths
from ..collector.written_report import read_report
from ..core.codes import Code, ExitCode
from ..core.errors import GpuwatchError, UsageError
from ..core.frames import format_number
from ..core.guest.own_files import expect_regular
from ..core.guest.own_imports import own_command
from ..core.text import shown
from ..worker.explain.replaying import ReplayAnswer, ReplayRequest
from .report import TEXT_OR_JSON, echo_json, text_width
from .run_names import RUNS_DIR, complete_runs, find_run_or_last

CAPTURE = "overflow.pt"
_DTYPES = ("float32", "bfloat16", "float16")


@click.command(name="replay")
@click.argument("run", required=False, shell_complete=complete_runs)
@RUNS_DIR
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where to run it (default: as captured, else cpu).")
@click.option("--dtype", type=click.Choice(_DTYPES), help="Run it in this dtype alone, beside as captured.")
@click.option("--trust", is_flag=True, help="Import the module's class and unpickle its objects: that runs their code.")
@TEXT_OR_JSON
def replay(run: str | None, runs_dir: str, device: str | None, dtype: str | None, trust: bool, form: str) -> int:
    """Run the captured forward of RUN again, as it was and in each dtype, and show where it overflows.

    RUN is a run's folder or name, the folder of watch(capture=...), or an overflow.pt. Without RUN: the latest run. A
    capture is written by gpuwatch launch --capture.

    gpuwatch replay --dtype bfloat16

    Exit codes: 0 as captured it is not finite again, 1 it is finite or raises, 2 wrong usage.
    """
    path = _capture_of(run, Path(runs_dir))
    with tempfile.TemporaryDirectory(prefix="gpuwatch-replay-") as folder:
        out = Path(folder) / "answer.json"
        request = ReplayRequest(str(path), str(out), device or "", [dtype] if dtype else list(_DTYPES), trust)
        code = _run_apart(msgspec.json.encode(request).decode())
        if not out.exists():
            raise GpuwatchError(
                Code.NO_CAPTURE, f"the process that ran {path} ended without an answer, with code {code}"
            )
        answer = msgspec.json.decode(out.read_bytes(), type=ReplayAnswer)
    if answer.needs_trust:
        raise UsageError(
            Code.NO_CAPTURE, f"{path}: {shown(answer.refused)}, which may run any code; if you trust the file: --trust"
        )
    if answer.refused:
        raise UsageError(Code.NO_CAPTURE, f"{path}: {shown(answer.refused)}")
    if form == "json":
        echo_json(answer)
    else:
        _print(answer)
    return ExitCode.CLEAN if answer.rows[0].value not in ("", "finite") else ExitCode.SCRIPT_FAILED


def _capture_of(run: str | None, runs_dir: Path) -> Path:
    """The file of the verdict's rank, or the one that the user has named. Raises UsageError, saying what there is."""
    given = [Path(run), runs_dir / run] if run is not None else []
    folder = next((path for path in given if path.suffix == ".pt" or (path / CAPTURE).exists()), None)
    folder = folder or find_run_or_last(run, runs_dir)
    path, why = (folder, "") if folder.suffix == ".pt" else (folder / CAPTURE, "")
    if path is not folder and (folder / "report.json").exists():
        with suppress(GpuwatchError):
            file = read_report(RunPaths(folder)).verdict.capture
            path = folder / (Path(file.path).name if file is not None and file.path else CAPTURE)
            why = (file.refused or f"it was written to {file.path}") if file is not None else "launch with --capture"
    try:
        expect_regular(path)
    except OSError as error:
        tail = f" ({shown(why)})" if why else ""
        raise UsageError(
            Code.NO_CAPTURE, f"expected a capture that can be read, found {path}: {error.strerror}{tail}"
        ) from error
    return path


def _run_apart(request: str) -> int:
    """Run it, and return its exit code. What the forward prints goes to stderr."""
    try:
        return subprocess.run(
            own_command("gpuwatch.worker.explain.replaying", request), stdout=2, check=False
        ).returncode
    except OSError as error:
        raise GpuwatchError(Code.NO_CAPTURE, f"expected to start {sys.executable}, found: {error}") from error


def _print(answer: ReplayAnswer) -> None:
    console = TextConsole(text_width(), color=sys.stdout.isatty())
    console.print(Text(shown(answer.title), style="bold"))
    titles = "dtype", "output", "abs max", "first operation that made it", "line"
    table = Table(*(Column(title, overflow="fold") for title in titles), **PLAIN)
    for row in answer.rows:
        largest = format_number(row.abs_max).strip() if row.abs_max is not None else "-"
        texts = row.dtype, row.value or "-", largest, row.operation or row.note or "-", row.place or "-"
        table.add_row(*(Text(shown(text)) for text in texts), style="" if row.value == "finite" else "bold")
    console.print(table, *(Text(shown(note)) for note in answer.notes), sep="\n")
    click.echo(console.text())
