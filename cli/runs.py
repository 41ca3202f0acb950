"""`gpuwatch runs`: the runs of a folder with their verdicts."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from ..core.text import shown
from .completion import RUNS_DIR


@click.command(name="runs")
@RUNS_DIR
@click.option("-n", "--last", type=click.IntRange(1), default=20, show_default=True, help="So many, the newest last.")
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="What to print."
)
def command(runs_dir: str, last: int, form: str) -> int:
    """List the runs of a folder with what they came to.

    A run without a report is still going on, or its report could not be made: gpuwatch report --again RUN.
    """
    import msgspec

    from ..collector.run_files import list_runs

    runs = list_runs(Path(runs_dir))
    if form == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(runs[-last:]), indent=1).decode())
        return 0
    if not runs:
        click.echo(f"no run is in {runs_dir} (elsewhere: --runs-dir DIR)")
        return 0
    width = max(80, shutil.get_terminal_size((110, 24)).columns)
    names = max(len(run.id) for run in runs[-last:])
    for run in runs[-last:]:
        if run.verdict is None or run.run is None:
            line = f"{run.id:<{names}}  no report"
        else:
            ranks = f"{run.run.world_size} rank{'s' if run.run.world_size != 1 else ''}"
            line = f"{run.id:<{names}}  {ranks:>10}  {run.verdict.kind:<11}  {run.verdict.statement}"
        line = shown(line)
        click.echo(line if len(line) <= width else f"{line[: width - 3]}...")
    if len(runs) > last:
        click.echo(f"{len(runs) - last} older runs: --last N")
    return 0
