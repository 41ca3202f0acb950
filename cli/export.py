"""`gpuwatch export` and `gpuwatch diff`: the numbers of runs, for other tools and beside each other."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import click

from ..core.errors import UsageError
from ..core.text import ranks_text
from .report import RUNS_DIR, TEXT_OR_JSON, complete_runs, echo_json, find_run, format_option, text_width

if TYPE_CHECKING:
    from ..collector.assemble.frame_export import ExportRow
    from ..collector.facts.facts import RunFacts

_NEEDS = {"parquet": "pyarrow", "tensorboard": "tensorboard"}


@click.command(name="export")
@click.argument("run", required=False, shell_complete=complete_runs)
@RUNS_DIR
@format_option(
    *("jsonl", "csv", "parquet", "tensorboard", "perfetto"),
    text="perfetto: a trace of all ranks, for ui.perfetto.dev and chrome://tracing. parquet needs "
    "gpuwatch-cluster[parquet], tensorboard needs gpuwatch-cluster[tensorboard].",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Write it to this file; for tensorboard, into this new folder. jsonl, csv and perfetto are printed "
    "without it.",
)
@click.option(
    "--table",
    "tables",
    type=click.Choice(["verdict", "frames", "history"]),
    multiple=True,
    help="Only these rows. May be given several times.",
)
@click.option("--rank", type=click.IntRange(0), help="Only the numbers of this rank.")
def export(
    run: str | None, runs_dir: str, form: str, output: Path | None, tables: tuple[str, ...], rank: int | None
) -> int:
    """Write the numbers that the store of RUN holds as one table: frames, history and verdict.

    Without RUN: the latest one. What the columns mean is in docs/export.md.
    """
    from ..collector.assemble import frame_export, trace_export

    if form in _NEEDS:
        _expect_library(form)
        if output is None:
            what = "folder" if form == "tensorboard" else "file"
            raise UsageError(f"--format {form}: expected a {what} to write to, found none; add: -o {what.upper()}")
    path = find_run(run, Path(runs_dir))
    with _facts_of(path) as facts:
        known = sorted({each.rank for each in facts.ranks.values()})
        if rank is not None and rank not in known:
            there = ranks_text(known) if known else "it has none"
            raise UsageError(f"--rank: expected one of the ranks of this run ({there}), found {rank}")
        rows = frame_export.export_rows(facts, path.name, tables or frame_export.TABLES, rank)
        writers: dict[str, Callable[[Iterator[ExportRow], IO[str]], object]] = {
            "jsonl": frame_export.write_jsonl,
            "csv": frame_export.write_csv,
            "perfetto": lambda _, out: trace_export.write_trace(facts, path.name, out),
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
            elif form == "parquet":
                frame_export.write_parquet(rows, output)
            elif output.exists() and (not output.is_dir() or any(output.iterdir())):
                raise UsageError(f"--output: expected a new or an empty folder, found {output}, which is not empty")
            else:
                frame_export.write_tensorboard(rows, output)
        except OSError as error:
            what = f"expected a path that can be written, found {output}: {error.strerror}"
            raise UsageError(f"--output: {what}") from error
    return 0


@contextmanager
def _facts_of(run: Path) -> Iterator[RunFacts]:
    """All that the store of a run says. Raises UsageError if there is no store."""
    from ..collector.finish import fold_store
    from ..collector.run_files import RunPaths
    from ..collector.store import RunStore

    if run.is_file():
        raise UsageError(f"expected a run with its store, found the spool file {run}")
    with closing(RunStore(RunPaths(run).store)) as store:
        yield fold_store(store).facts([])


def _expect_library(form: str) -> None:
    """Raises UsageError, saying how to install what writes this format."""
    from importlib.util import find_spec

    if find_spec(_NEEDS[form]) is None:
        raise UsageError(
            f"--format {form}: expected {_NEEDS[form]}, which writes it, found it not installed; install it with: "
            f'pip install "gpuwatch-cluster[{form}]"'
        )


class _SideNumbers(NamedTuple):
    """A number for each side; None is not said."""

    a: int | None = None
    b: int | None = None


def _two(ctx: click.Context, param: click.Parameter, value: str | None) -> _SideNumbers:
    if value is None:
        return _SideNumbers()
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})?", value):
        raise UsageError(f"{param.opts[0]}: expected one number, or one for each side as 0,1, found {value!r}")
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

    Exit codes: 0 the same, 1 different, 2 wrong usage.
    """
    from ..collector.assemble.batch_diff import SideRequest, choose, difference, render_difference

    alike = ranks.a == ranks.b and batches.a == batches.b
    if not 1 <= len(runs) <= 2 or (len(runs) == 1 and alike):
        raise UsageError(
            f"expected two runs, or one with --rank A,B or --batch A,B, found {len(runs)} "
            f"run{'s' if len(runs) != 1 else ''}{' and one rank and batch of it' if len(runs) == 1 else ''}"
        )
    folders = [find_run(run, Path(runs_dir)) for run in runs]
    with ExitStack() as stores:
        facts = [stores.enter_context(_facts_of(folder)) for folder in folders]
        a = SideRequest(folders[0].name, facts[0], ranks.a, batches.a)
        b = SideRequest(folders[-1].name, facts[-1], ranks.b, batches.b)
        sides, frames = choose(a, b)
    found = difference(*frames)
    if not found.compared and not found.rows:
        raise UsageError("--batch: expected a batch with a tensor that was measured on both sides, found none")
    if form == "json":
        echo_json({"schema": 1, "a": sides[0], "b": sides[1], "difference": found})
    else:
        width, color = text_width(), sys.stdout.isatty()
        click.echo(render_difference(sides, found, factor=factor, width=width, color=color, every_row=every_row))
    return 1 if found.rows else 0
