"""`gpuwatch export` and `gpuwatch diff`: the numbers of runs, for other tools and beside each other."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from shlex import quote
from typing import IO, TYPE_CHECKING, NamedTuple

import click

from ..core.codes import Code
from ..core.errors import UsageError
from .report import (
    TEXT_OR_JSON,
    RankChoice,
    echo_json,
    facts_of,
    format_option,
    parse_rank,
    ranks_of,
    text_width,
)
from .run_names import RUNS_DIR, complete_runs, find_run_or_last

if TYPE_CHECKING:
    from ..collector.views.frame_export import ExportRow


@click.command(name="export")
@click.argument("run", required=False, shell_complete=complete_runs)
@RUNS_DIR
@format_option(
    *("jsonl", "csv", "parquet", "perfetto"),
    text="perfetto: a trace of all ranks, for ui.perfetto.dev and chrome://tracing. parquet needs pyarrow.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Write it to this file. jsonl, csv and perfetto are printed without it.",
)
@click.option(
    "--table",
    "tables",
    type=click.Choice(["verdict", "frames", "history"]),
    multiple=True,
    help="Only these rows. May be given several times.",
)
@click.option(
    "--rank",
    "choice",
    callback=parse_rank,
    metavar="R",
    help="Only the numbers of this rank, or of those at a place in a DeviceMesh of the script: tp=2,dp=0.",
)
def export(
    run: str | None,
    runs_dir: str,
    form: str,
    output: Path | None,
    tables: tuple[str, ...],
    choice: RankChoice | None,
) -> int:
    """Write the numbers that the store of RUN holds as one table: frames, history and verdict.

    Without RUN: the latest one, or that of your last launch. What the columns mean is in docs/export.md.

    gpuwatch export --format csv -o frames.csv
    """
    from ..collector.views import frame_export, trace_export

    if tables and form == "perfetto":
        raise UsageError(
            Code.WRONG_TOGETHER, "--table: expected a format with a table, found --format perfetto; leave --table out"
        )
    if form == "parquet":
        _expect_pyarrow()
    path = find_run_or_last(run, Path(runs_dir))
    if form == "parquet" and output is None:
        raise UsageError(
            Code.ARGUMENT_MISSING, "--format parquet: expected a file to write to, found none; add: -o FILE"
        )
    with facts_of(path) as facts:
        ranks = ranks_of(choice, facts) if choice is not None else None
        rows = frame_export.export_rows(facts, path.name, tables or frame_export.TABLES, ranks)
        writers: dict[str, Callable[[Iterator[ExportRow], IO[str]], object]] = {
            "jsonl": frame_export.write_jsonl,
            "csv": frame_export.write_csv,
            "perfetto": lambda _, out: trace_export.write_trace(facts, path.name, out, ranks),
        }
        write = writers.get(form)
        if output is None:
            assert write is not None
            write(rows, sys.stdout)
            return 0
        try:
            if write is not None:
                with output.open("w", encoding="utf-8", newline="") as out:
                    write(rows, out)
            else:
                frame_export.write_parquet(rows, output)
        except OSError as error:
            what = f"expected a path that can be written, found {output}: {error.strerror}"
            raise UsageError(Code.NOT_WRITABLE, f"--output: {what}") from error
    return 0


def _expect_pyarrow() -> None:
    """Raises UsageError, saying how to install it."""
    try:
        importlib.import_module("pyarrow")
    except ImportError as error:
        raise UsageError(
            Code.NOT_INSTALLED,
            "--format parquet: expected pyarrow, which writes it, found it not installed; install it with: "
            "pip install pyarrow",
        ) from error


class _SideNumbers(NamedTuple):
    """A number for each side; None is not said."""

    a: int | None = None
    b: int | None = None


def _two(ctx: click.Context, param: click.Parameter, value: str | None) -> _SideNumbers:
    if value is None:
        return _SideNumbers()
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})?", value):
        raise UsageError(
            Code.WRONG_VALUE, f"{param.opts[0]}: expected one number, or one for each side as 0,1, found {value!r}"
        )
    numbers = [int(number) for number in value.split(",")]
    return _SideNumbers(numbers[0], numbers[-1])


@click.command(name="diff")
@click.argument("runs", nargs=-1, metavar="RUN_A [RUN_B]", shell_complete=complete_runs)
@RUNS_DIR
@click.option("--rank", "ranks", callback=_two, metavar="R[,R]", help="Which rank, or which on each side.")
@click.option("--batch", "batches", callback=_two, metavar="N[,N]", help="Which batch, or which on each side.")
@click.option(
    "--factor",
    type=click.FloatRange(1.0),
    default=2.0,
    show_default=True,
    help="Also report the first tensor whose abs max differs by more than this factor.",
)
@click.option("--all", "every_row", is_flag=True, help="Show every tensor that differs.")
@TEXT_OR_JSON
def diff(
    runs: tuple[str, ...],
    runs_dir: str,
    ranks: _SideNumbers,
    batches: _SideNumbers,
    factor: float,
    every_row: bool,
    form: str,
) -> int:
    """Show where the numbers of two runs first differ, in the order of the calls.

    With one RUN: two ranks of it (--rank 0,1), or two batches of it (--batch 4,5). Without --batch, diff compares the
    batch of RUN_A's overflow if both have it, else the last batch that both have. To keep more batches: gpuwatch launch
    --trace-batches N,N

    gpuwatch diff latest --rank 0,1

    Exit codes: 0 the same, 1 different, 2 wrong usage.
    """
    from ..collector.views.batch_diff import SideRequest, choose, difference, render_difference

    alike = ranks.a == ranks.b and batches.a == batches.b
    folders = [find_run_or_last(run, Path(runs_dir)) for run in runs[:2]]
    if not 1 <= len(runs) <= 2 or (len(runs) == 1 and alike):
        were = f"{len(runs)} runs; as: gpuwatch diff RUN_A RUN_B"
        if len(runs) == 1:
            were = f"1 run and one rank and batch of it; as: gpuwatch diff {quote(runs[0])} --rank 0,1"
        raise UsageError(
            Code.ARGUMENT_MISSING, f"expected two runs, or one with --rank A,B or --batch A,B, found {were}"
        )
    with ExitStack() as stores:
        facts = [stores.enter_context(facts_of(folder)) for folder in folders]
        a = SideRequest(folders[0].name, facts[0], ranks.a, batches.a)
        b = SideRequest(folders[-1].name, facts[-1], ranks.b, batches.b)
        sides, frames = choose(a, b)
    found = difference(*frames)
    if not found.compared and not found.rows:
        raise UsageError(
            Code.NOT_IN_RUN, "--batch: expected a batch with a tensor that was measured on both sides, found none"
        )
    if form == "json":
        echo_json({"schema": 1, "a": sides[0], "b": sides[1], "difference": found})
    else:
        width, color = text_width(), sys.stdout.isatty()
        click.echo(render_difference(sides, found, factor=factor, width=width, color=color, every_row=every_row))
    return 1 if found.rows else 0
