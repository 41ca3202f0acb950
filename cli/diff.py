"""`gpuwatch diff`: where the numbers of two runs, two ranks or two batches first differ."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import click

from ..core.errors import UsageError
from .completion import RUNS_DIR, complete_runs
from .report import find_run


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
def command(
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

    from ..collector.assemble.batch_diff import SideRequest, choose, difference, render_difference
    from ..collector.finish import fold_store
    from ..collector.run_files import RunPaths
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
        sides, frames = choose(a, b)
    finally:
        for store in stores:
            store.close()
    found = difference(*frames)
    if not found.compared and not found.rows:
        raise UsageError("--batch: expected a batch with a tensor that was measured on both sides, found none")
    if form == "json":
        made = {"schema": 1, "a": sides[0], "b": sides[1], "difference": found}
        click.echo(msgspec.json.format(msgspec.json.encode(made), indent=1).decode())
    else:
        width = max(80, min(160, shutil.get_terminal_size((110, 24)).columns))
        color = sys.stdout.isatty()
        click.echo(render_difference(sides, found, factor=factor, width=width, color=color, every_row=every_row))
    return 1 if found.rows else 0
