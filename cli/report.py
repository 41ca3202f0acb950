"""`gpuwatch report` and `runs`: show a run that is over, or the runs of a folder."""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from ..collector.run_files import ListedRun, RunPaths, list_runs, read_outcome, read_report, runs_by_time
from ..core.codes import Code
from ..core.errors import GpuwatchError, UsageError
from ..core.text import shown
from ..core.wire.spool import SUFFIX
from ..launcher.saved_settings import saved_runs_dir
from .rank_choice import RankChoice, expect_rank, one_rank, parse_rank

if TYPE_CHECKING:
    from ..collector.report.model import RunReport

_MOST_RUNS = 50
_MOST_TOLD = 5
RUNS_DIR = click.option(
    "--runs-dir",
    default=saved_runs_dir,
    show_default="gpuwatch-runs, or the saved setting",
    help="Folder with the runs' folders.",
)


def format_option(*forms: str, text: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """`--format`, the first of `forms` by default; `text` is its help."""
    choice = click.Choice(forms)
    return click.option("--format", "form", type=choice, default=forms[0], show_default=True, help=text)


TEXT_OR_JSON = format_option("text", "json", text="What to print.")


def complete_runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of runs in the runs' folder, the newest first."""
    folder = Path(ctx.params.get("runs_dir") or saved_runs_dir())
    try:
        runs = [paths.run_id for paths in reversed(runs_by_time(folder))]
    except OSError:
        return []
    return [CompletionItem(run) for run in runs if run.startswith(incomplete)][:_MOST_RUNS]


@click.command(name="report")
@click.argument("runs", nargs=-1, metavar="[RUN]", shell_complete=complete_runs)
@RUNS_DIR
@click.option(
    "--rank",
    "choice",
    callback=parse_rank,
    metavar="R",
    help="Show the frames of this rank, by its number or its place in a DeviceMesh of the script: tp=2,dp=0 (default: "
    "the one that the verdict names).",
)
@click.option("--batch", type=click.IntRange(0), help="Show the frames of this batch, if they were received.")
@click.option("--module", metavar="PATTERN", help="Show only the frames of modules whose name matches, such as `*.wo`.")
@format_option("text", "json", "html", text="What to print. html is one self-contained file.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write it to this file.")
@click.option("--warnings", is_flag=True, help="In the text report, list each value near overflow or in underflow.")
@click.option("--open", "open_", is_flag=True, help="Show the page in a browser.")
@click.option("--again", is_flag=True, help="Make report.json, report.txt and report.html again from the run's store.")
@click.option(
    "--merge", is_flag=True, help="Make one report of several spool files and runs of one job, given as RUN RUN..."
)
def report(
    runs: tuple[str, ...],
    runs_dir: str,
    choice: RankChoice | None,
    batch: int | None,
    module: str | None,
    form: str,
    output: Path | None,
    warnings: bool,
    open_: bool,
    again: bool,
    merge: bool,
) -> int:
    """Print the combined report of RUN: a run's folder, its name in the runs' folder, or a spool file.

    Without RUN: the latest one.
    """
    if len(runs) > 1 and not merge:
        raise UsageError(
            Code.ARGUMENT_TOO_MANY,
            f"expected one RUN, found {len(runs)}; to make one report of them: gpuwatch report --merge",
        )
    found = [find_run(run, Path(runs_dir)) for run in runs or (None,)]
    path = found[0]
    rank = one_rank(choice, path)
    is_spool = path.is_file()
    report = _made(found, rank, merge=merge) if again or merge or is_spool else read_report(RunPaths(path))
    if rank is not None:
        expect_rank(rank, [entry.rank for entry in report.ranks])
    if rank is not None and not merge and not is_spool and _is_in_store(report, rank):
        with suppress(GpuwatchError):  # without its store, what the report holds is shown
            report = _from_store(path, rank)
    if batch is not None:
        if merge or is_spool:
            raise UsageError(Code.NO_STORE, "--batch: expected a run with its store, found spool files; leave it out")
        report = _from_store(path, rank, batch)
        if not any(each.frames for each in report.ranks if rank is None or each.rank == rank):
            raise UsageError(
                Code.NOT_IN_RUN,
                f"--batch: expected a batch{'' if rank is None else f' of rank {rank}'} that is in the store, found "
                f"{batch}; by default a run stores the batch of an overflow, the one before it and each rank's last; "
                "to store more: gpuwatch launch --trace-batches N,N",
            )
    if module is not None:
        report = _only_modules(report, module)
    form, color = "html" if open_ else form, output is None and sys.stdout.isatty()
    try:
        data = _rendered(report, form, rank, warnings=warnings, color=color)
    except Exception as error:  # a report.json that was changed can hold anything that JSON can
        if merge or again or is_spool:
            raise
        raise GpuwatchError(
            Code.UNREADABLE,
            f"expected a report of gpuwatch in {path / 'report.json'}, found one that cannot be shown "
            f"({type(error).__name__}: {error}); to make it again from the store: gpuwatch report --again {path}",
        ) from error
    if open_ and output is None:
        output = Path(tempfile.mkdtemp(prefix="gpuwatch-page-")) / "report.html"
    if output is None:
        click.echo(data)
        if form == "text" and not is_spool and _is_open(path):
            said = "as far as its collector has said, this run has not ended: the report shows what has arrived so far"
            click.echo(f"gpuwatch: {said}; if it still runs: gpuwatch top {shlex.quote(str(path))}", err=True)
        return 0
    try:
        output.write_text(data + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            Code.NOT_WRITABLE, f"--output: expected a file that can be written, found {output}: {error.strerror}"
        ) from error
    page = output.absolute().as_uri() + (f"#rank={rank}" if rank is not None else "")
    if open_ and not webbrowser.open(page):
        click.echo(f"gpuwatch: no browser could be started here; the page is {output}", err=True)
    return 0


def _is_open(path: Path) -> bool:
    """Whether no collector has said the run's end: it shows the run now, or was killed."""
    from ..core.wire.view import read_viewer_keys

    with suppress(GpuwatchError):
        return read_viewer_keys(path) is not None
    return False


def _made(found: list[Path], rank: int | None, *, merge: bool) -> RunReport:
    """The report made again: of spool files and runs together, or of one run, in whose folder it is written."""
    from ..collector.finish import merged_report, report_from_store, write_page, write_report

    if merge or found[0].is_file():
        return merged_report(found, rank)
    paths = RunPaths(found[0])
    report = report_from_store(paths)
    for trouble in (write_report(paths, report), write_page(paths, report)):
        if trouble:
            click.echo(f"gpuwatch: {trouble}", err=True)
    return report


def _from_store(run: Path, rank: int | None, batch: int | None = None) -> RunReport:
    from ..collector.finish import report_from_store

    return report_from_store(RunPaths(run), rank, batch)


def _only_modules(report: RunReport, pattern: str) -> RunReport:
    from ..collector.report.side_by_side import only_modules

    found = only_modules(report, pattern)
    if found is None:
        known = sorted({frame.module for rank in report.ranks for frame in rank.frames if frame.module})
        some = f"modules there: {', '.join(known[:5])}{', ...' if len(known) > 5 else ''}" if known else "it has none"
        wanted = "a pattern that matches a module in the report's frames"
        raise UsageError(Code.NOT_IN_RUN, f"--module: expected {wanted}, found {pattern!r} ({some})")
    return found


def _rendered(report: RunReport, form: str, rank: int | None, *, warnings: bool, color: bool) -> str:
    if form == "json":
        from ..collector.report.model import to_json

        return to_json(report).decode()
    if form == "html":
        from ..collector.report.html.page import render_html

        return render_html(report)
    from ..collector.report.text_report import render_text

    return render_text(report, width=text_width(), color=color, rank=rank, warnings=warnings)


def _is_in_store(report: RunReport, rank: int) -> bool:
    """Whether the store holds frames of a rank that the report has left out."""
    entry = next(entry for entry in report.ranks if entry.rank == rank)
    return entry.traces_left_out > 0 or (entry.pages > 0 and not entry.frames)


def find_run(run: str | None, runs_dir: Path) -> Path:
    """The folder or spool file that the user means. Raises UsageError, saying what there is."""
    candidates = [Path(run), runs_dir / run] if run is not None else [runs_dir / "latest"]
    for candidate in candidates:
        if candidate.is_file() and candidate.suffix == SUFFIX:
            return candidate
        if candidate.is_dir() and ((candidate / "run.sqlite").exists() or (candidate / "report.json").exists()):
            return candidate.resolve()
    known = [paths.run_id for paths in runs_by_time(runs_dir)[-_MOST_TOLD:]]
    there = f"runs there, newest last: {', '.join(known)}" if known else f"there is no run in {runs_dir}"
    wanted = f"{run!r}" if run is not None else f"{runs_dir / 'latest'}"
    where = f"{wanted} ({there}; elsewhere: --runs-dir DIR)"
    raise UsageError(Code.NO_SUCH_RUN, f"expected a run's folder, its name, or a {SUFFIX} file, found none at {where}")


def echo_json(value: object) -> None:
    """Print it."""
    from ..collector.report.model import to_json

    click.echo(to_json(value).decode())


def text_width() -> int:
    """The terminal's width, as far as a report can use it."""
    return max(80, min(160, shutil.get_terminal_size((80, 24)).columns))


def _alike(runs: list[ListedRun], path: Path, folder: Path) -> list[ListedRun]:
    wanted = read_outcome(RunPaths(path))
    if wanted is None or not wanted.fingerprint:
        raise UsageError(Code.NOT_IN_RUN, f"--like: expected a run that ended with a fault, found {path.name}")
    outcomes = ((run, read_outcome(RunPaths(folder / run.id))) for run in runs)
    return [run for run, found in outcomes if found is not None and found.fingerprint == wanted.fingerprint]


@click.command(name="runs")
@RUNS_DIR
@click.option(
    "-n", "--last", type=click.IntRange(1), default=20, show_default=True, help="Show the last N runs, newest last."
)
@click.option("--like", metavar="RUN", shell_complete=complete_runs, help="Only runs with the same fault as this one.")
@TEXT_OR_JSON
def runs(runs_dir: str, last: int, like: str | None, form: str) -> int:
    """List the runs in a folder with their verdicts.

    A run without a report is still running, or its report could not be made: gpuwatch report --again RUN.
    """
    runs = list_runs(Path(runs_dir))
    if like is not None:
        runs = _alike(runs, find_run(like, Path(runs_dir)), Path(runs_dir))
    if form == "json":
        echo_json(runs[-last:])
        return 0
    if not runs:
        click.echo(f"there is no run in {runs_dir} (elsewhere: --runs-dir DIR)")
        return 0
    width = max(80, shutil.get_terminal_size((80, 24)).columns)
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
        click.echo(f"{len(runs) - last} older runs not shown: --last N")
    return 0
