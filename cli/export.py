"""`gpuwatch export`: the numbers of a run for other tools."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ..core.errors import UsageError
from .completion import RUNS_DIR, complete_runs
from .report import find_run

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
def command(
    run: str | None, runs_dir: str, form: str, output: Path | None, tables: tuple[str, ...], rank: int | None
) -> int:
    """Write the numbers that the store of RUN holds as one table: frames, history and verdict.

    Without RUN: the latest one. What the columns mean is in docs/export.md.
    """
    from ..collector.assemble.frame_export import TABLES, export_rows, write_csv, write_jsonl
    from ..collector.finish import fold_store
    from ..collector.run_files import RunPaths
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
