"""`gpuwatch export` and `gpuwatch diff`: the numbers of runs, for other tools and beside each other."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import click

from ..core.errors import UsageError
from .report import RUNS_DIR, complete_runs, find_run

_NEEDS = {"parquet": "pyarrow", "tensorboard": "tensorboard"}


@click.command(name="export")
@click.argument("run", required=False, shell_complete=complete_runs)
@RUNS_DIR
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "csv", "parquet", "tensorboard"]),
    default="jsonl",
    show_default=True,
    help="parquet needs gpuwatch-cluster[parquet], tensorboard needs gpuwatch-cluster[tensorboard].",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=None,
    help="Write it to this file; for tensorboard, into this new folder. jsonl and csv are printed without it.",
)
@click.option(
    "--table",
    "tables",
    type=click.Choice(["verdict", "frames", "history"]),
    multiple=True,
    help="Only these rows. May be given several times.",
)
@click.option("--rank", type=click.IntRange(0), default=None, help="Only the numbers of this rank.")
def export(
    run: str | None, runs_dir: str, form: str, output: Path | None, tables: tuple[str, ...], rank: int | None
) -> int:
    """Write the numbers that the store of RUN holds as one table: frames, history and verdict.

    Without RUN: the latest one. What the columns mean is in docs/export.md.
    """
    from ..collector.assemble.frame_export import TABLES, export_rows, write_csv, write_jsonl
    from ..collector.finish import fold_store
    from ..collector.run_list import RunPaths
    from ..collector.store import RunStore

    if form in _NEEDS:
        _expect_library(form)
        if output is None:
            what = "folder" if form == "tensorboard" else "file"
            raise UsageError(f"--format {form}: expected a {what} to write to, found none; add: -o {what.upper()}")
    path = find_run(run, Path(runs_dir))
    if path.is_file():
        raise UsageError(f"expected a run with its store, found the spool file {path}")
    store = RunStore(RunPaths(path).store)
    try:
        facts = fold_store(store).facts([])
        if rank is not None and rank not in {each.rank for each in facts.ranks.values()}:
            known = sorted({each.rank for each in facts.ranks.values()}) or [-1]
            raise UsageError(f"--rank: expected one of the ranks of this run ({known[0]} to {known[-1]}), found {rank}")
        rows = export_rows(facts, path.name, tables or TABLES, rank)
        if form == "parquet":
            from ..collector.assemble.frame_export import write_parquet

            assert output is not None
            write_parquet(rows, output)
        elif form == "tensorboard":
            from ..collector.assemble.frame_export import write_tensorboard

            assert output is not None
            if output.exists() and (not output.is_dir() or any(output.iterdir())):
                raise UsageError(f"--output: expected a new or an empty folder, found {output} with something in it")
            write_tensorboard(rows, output)
        else:
            write = write_jsonl if form == "jsonl" else write_csv
            if output is None:
                write(rows, sys.stdout)
            else:
                with output.open("w", encoding="utf-8", newline="") as out:
                    write(rows, out)
    except OSError as error:
        if output is None:
            raise
        raise UsageError(f"--output: expected a place that can be written, found {output}: {error.strerror}") from error
    finally:
        store.close()
    return 0


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
    help="The first difference between two abs max by more than this is told, too.",
)
@click.option("--all", "every_row", is_flag=True, help="Show every tensor that differs.")
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="What to print."
)
def diff(
    runs: tuple[str, ...],
    runs_dir: str,
    ranks: _SideNumbers,
    batches: _SideNumbers,
    factor: float,
    every_row: bool,
    form: str,
) -> int:
    """Tell where the numbers of two runs first differ, in the order of the calls.

    With one RUN: two ranks of it (--rank 0,1), or two batches of it (--batch 4,5). Without --batch, the batch of
    RUN_A's overflow is taken if both have it, else the last that both have. To keep more batches: gpuwatch launch
    --trace-batches N,N

    Exit codes: 0 the same, 1 different, 2 wrong usage.
    """
    import msgspec

    from ..collector.assemble.batch_diff import SideRequest, choose, difference
    from ..collector.assemble.diff_text import render_difference
    from ..collector.finish import fold_store
    from ..collector.run_list import RunPaths
    from ..collector.store import RunStore

    alike = ranks.a == ranks.b and batches.a == batches.b
    if not 1 <= len(runs) <= 2 or (len(runs) == 1 and alike):
        raise UsageError(
            f"expected two runs, or one with --rank A,B or --batch A,B, found {len(runs)} "
            f"run{'s' if len(runs) != 1 else ''}{' and one rank and batch of it' if len(runs) == 1 else ''}"
        )
    folders = [find_run(run, Path(runs_dir)) for run in runs]
    for folder in folders:
        if folder.is_file():
            raise UsageError(f"expected runs with their stores, found the spool file {folder}")
    stores = [RunStore(RunPaths(folder).store) for folder in folders]
    try:
        facts = [fold_store(store).facts([]) for store in stores]
        a = SideRequest(folders[0].name, facts[0], ranks.a, batches.a)
        b = SideRequest(folders[-1].name, facts[-1], ranks.b, batches.b)
        chosen = choose(a, b)
    finally:
        for store in stores:
            store.close()
    found = difference(*chosen.frames)
    if not found.compared and not found.rows:
        raise UsageError("--batch: expected a batch with a tensor that was measured on both sides, found none")
    if form == "json":
        made = {"schema": 1, "a": chosen.sides[0], "b": chosen.sides[1], "difference": found}
        click.echo(msgspec.json.format(msgspec.json.encode(made), indent=1).decode())
    else:
        width = max(80, min(160, shutil.get_terminal_size((110, 24)).columns))
        color = sys.stdout.isatty()
        click.echo(render_difference(chosen.sides, found, factor=factor, width=width, color=color, every_row=every_row))
    return 1 if found.rows else 0
