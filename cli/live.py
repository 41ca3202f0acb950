"""`gpuwatch top` and `stacks`: show a run that goes on; and `runs`: the runs of a folder."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, TypeVar

import click

from ..collector.run_files import ListedRun, RunPaths, list_runs, read_outcome, runs_by_time
from ..core.codes import Code
from ..core.errors import GpuwatchError, UsageError
from ..core.recorder.stalls import ANSWER_S
from ..core.text import command_for, shown
from .report import TEXT_OR_JSON, echo_json, is_open
from .run_names import (
    RUNS_DIR,
    complete_runs,
    find_run_or_last,
    last_launched,
    latest_run,
    runs_dir_or_last,
    typed_command,
)

if TYPE_CHECKING:
    from ..collector.views.publisher import ViewSubscriber
    from ..core.wire.view import JobView

T = TypeVar("T")
_SILENT = "the collector of {} has sent nothing for {:.0f} s; can this host reach it?"
_PATIENCE_S = 15.0
_LOOK_S = 0.5
_MORE, _MORE_S = 3, 1.5
"""How many pictures to take after the first, and how long to wait for each: they show the job's speed, and the modules
close to their limit."""


@click.command(name="top")
@click.argument("run", required=False, shell_complete=complete_runs)
@RUNS_DIR
@click.option(
    "--once",
    is_flag=True,
    help="Print one snapshot and exit, as where the output is no terminal. Does not need textual.",
)
@TEXT_OR_JSON
def top(run: str | None, runs_dir: str, once: bool, form: str) -> int:
    """Watch a running job: its ranks, which rank waits for which, which values come close to their limit, and its
    events.

    Without RUN: the latest one; in a terminal, top waits until it runs. top only reads: the job does not notice it and
    never waits for it. Keys: o orders the ranks, s shows their stacks, q quits.

    gpuwatch top --once
    """
    from ..collector.views.publisher import job_viewer

    if form == "json" and not once:
        raise UsageError(Code.WRONG_TOGETHER, "expected --once with --format json, found none; add: --once")
    once = once or not sys.stdout.isatty()  # in a pipe or a file, a screen is escape sequences, and no key ends it
    if not once:
        _expect_textual(run, Path(runs_dir))
    path = find_run_or_last(run, Path(runs_dir)) if once or run is not None else _next_job(Path(runs_dir))
    with _connected(job_viewer(path), path) as link:
        return _print_once(link, path.name, form) if once else _watch(link, path)


def _next_job(runs_dir: Path) -> Path:
    """The folder of the latest run, once its collector shows it. Without a run there, that of the last launch."""
    has_told = False
    while True:
        latest = latest_run(runs_dir) or last_launched(runs_dir)
        if latest is not None and is_open(latest):
            return latest
        if not has_told:
            found = f"no job has begun in {runs_dir} yet; waiting, Ctrl-C ends"
            if latest is not None:
                found = (
                    f"the latest run is over ({command_for(latest)}); waiting for the next in {runs_dir}, Ctrl-C ends"
                )
            click.echo(f"gpuwatch: {found}", err=True)
            has_told = True
        time.sleep(_LOOK_S)


@click.command(name="stacks")
@click.argument("run", required=False, shell_complete=complete_runs)
@RUNS_DIR
@TEXT_OR_JSON
def stacks(run: str | None, runs_dir: str, form: str) -> int:
    """Show where all ranks of a running job stand now: what each does, and its stack.

    Without RUN: the latest one; in a folder without runs, that of your last launch. The ranks go on meanwhile. A rank
    that does not answer is read from outside, with py-spy where that is installed.

    gpuwatch stacks --format json
    """
    from ..collector.views.publisher import stacks_viewer
    from ..collector.views.snapshot import view_text

    path = find_run_or_last(run, Path(runs_dir))
    with _connected(stacks_viewer(path), path) as link:
        view = link.newest(_PATIENCE_S + ANSWER_S)
    if view is None:
        raise GpuwatchError(Code.NOT_RUNNING, _SILENT.format(path.name, _PATIENCE_S + ANSWER_S))
    if form == "json":
        echo_json(view)
    else:
        click.echo("\n".join(view_text(view)))
    return 0


@contextmanager
def _connected(link: ViewSubscriber[T], path: Path) -> Iterator[ViewSubscriber[T]]:
    try:
        if not link.is_shown:
            found = f"no collector that shows {path.name}; for its result: {command_for(path)}"
            if read_outcome(RunPaths(path)) is not None:
                found = f"{path.name}, which has ended; its report: {command_for(path)}{_not_ended(path.parent)}"
            raise UsageError(Code.NOT_RUNNING, f"expected a run in progress, found {found}")
        yield link
    finally:
        link.close()


def _not_ended(runs_dir: Path) -> str:
    """`; 20261130-0637 has not ended: gpuwatch stacks gpuwatch-runs/20261130-0637`, of the last one there; else ""."""
    running = [paths.folder for paths in runs_by_time(runs_dir) if is_open(paths.folder)]
    return f"; {running[-1].name} has not ended: {typed_command(running[-1])}" if running else ""


def _print_once(link: ViewSubscriber[JobView], run: str, form: str) -> int:
    from msgspec.structs import asdict

    from ..collector.views.top_model import TopModel, plain

    view = link.newest(_PATIENCE_S)
    if view is None:
        raise GpuwatchError(Code.NOT_RUNNING, _SILENT.format(run, _PATIENCE_S))
    model = TopModel()
    model.see(view)
    until = time.monotonic() + ANSWER_S
    for more in itertools.count(1):
        view = link.newest(_MORE_S)
        if view is not None:
            model.see(view)
        asks = view is not None and view.asks and time.monotonic() < until
        # agents report the hottest modules once they hear that somebody watches
        if not asks and ((view is not None and view.hot) or more >= _MORE):
            break
    if form == "json":
        assert model.newest is not None
        of_ranks = {part: list(map(asdict, getattr(model.newest, part))) for part in ("ranks", "processes")}
        echo_json({**asdict(model.newest), **of_ranks})  # they travel without the names of their fields
        return 0
    size = shutil.get_terminal_size((80, 24))
    click.echo(plain(model.screen(size.columns), 64))
    return 0


def _expect_textual(run: str | None, runs_dir: Path) -> None:
    from importlib.util import find_spec

    if find_spec("textual") is None:
        raise UsageError(
            Code.NOT_INSTALLED,
            "expected textual, which draws the screen, found it not installed; install it with: pip install "
            f"textual, or print one snapshot: {command_for(find_run_or_last(run, runs_dir), does='top --once')}",
        )


def _watch(link: ViewSubscriber[JobView], path: Path) -> int:
    from ..collector.views.top_app import TopApp
    from ..collector.views.top_model import JobEnd

    def end() -> JobEnd:
        outcome = read_outcome(RunPaths(path))
        return JobEnd(outcome.kind, outcome.statement) if outcome is not None else JobEnd()

    for name in ("COLUMNS", "LINES"):  # where they are exported, textual believes them, and not the terminal
        os.environ.pop(name, None)
    app = TopApp(lambda: link.newest(0), lambda: not link.is_shown, command_for(path), lambda: _asked(path), end)
    return app.run() or 0


def _asked(path: Path) -> Callable[[], list[str] | None]:
    """Asks a job's ranks for their stacks; see TopApp."""
    from ..collector.views.publisher import stacks_viewer
    from ..collector.views.snapshot import view_text

    link, until = stacks_viewer(path), time.monotonic() + _PATIENCE_S + ANSWER_S

    def answer() -> list[str] | None:
        view = link.newest(0)
        if view is None and time.monotonic() < until:
            return None
        link.close()
        return list(view_text(view)) if view is not None else [_SILENT.format(path.name, _PATIENCE_S + ANSWER_S)]

    return answer


# `gpuwatch runs`


def _alike(runs: list[ListedRun], path: Path, folder: Path) -> list[ListedRun]:
    wanted = read_outcome(RunPaths(path))
    if wanted is None or not wanted.fingerprint:
        raise UsageError(Code.NOT_IN_RUN, f"--like: expected a run that ended with a fault, found {path.name}")
    outcomes = ((run, read_outcome(RunPaths(folder / run.id))) for run in runs)
    return [run for run, found in outcomes if found is not None and found.fingerprint == wanted.fingerprint]


_LEAST_COLUMNS = 30
"""Where fewer are left for a statement, it stands below its run."""


def folded(run: str, statement: str, width: int | None) -> str:
    """A line of `gpuwatch runs`; in a terminal of `width` columns, its statement goes on below itself."""
    line = f"{run}  {shown(statement)}"
    if width is None or len(line) <= width:
        return line
    beside = len(run) + 2
    indent = " " * (beside if width - beside >= _LEAST_COLUMNS else 4)
    lines = wrap(shown(statement), max(20, width - len(indent)), break_long_words=False, break_on_hyphens=False)
    first = f"{run}  {lines.pop(0)}" if len(indent) == beside else run.rstrip()
    return "\n".join([first, *(f"{indent}{text}" for text in lines)])


@click.command(name="runs")
@RUNS_DIR
@click.option(
    "-n", "--last", type=click.IntRange(1), default=20, show_default=True, help="Show the last N runs, newest last."
)
@click.option("--like", metavar="RUN", shell_complete=complete_runs, help="Only runs with the same fault as this one.")
@TEXT_OR_JSON
def runs(runs_dir: str, last: int, like: str | None, form: str) -> int:
    """List the runs in a folder with their verdicts; in a folder without runs, those beside your last launch.

    A run without a verdict is still running, or its report could not be made.

    gpuwatch runs --last 5
    """
    pattern = find_run_or_last(like, Path(runs_dir)) if like is not None else None
    folder = pattern.parent if pattern is not None else runs_dir_or_last(Path(runs_dir))
    runs = list_runs(folder)
    if pattern is not None:
        runs = _alike(runs, pattern, folder)
    if form == "json":
        echo_json(runs[-last:])
        return 0
    if not runs:
        click.echo(f"there is no run in {runs_dir} (elsewhere: --runs-dir DIR)")
        return 0
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    names = max(len(run.id) for run in runs[-last:])
    for run in runs[-last:]:
        if run.verdict is None:
            state, does = ("not ended", "top") if is_open(folder / run.id) else ("no report", "report --again")
            click.echo(shown(f"{run.id:<{names}}  {state}: {command_for(folder / run.id, does=does)}"))
            continue
        count = run.run.world_size if run.run is not None else None
        ranks = f"{count} rank{'s' if count != 1 else ''}" if count is not None else ""
        click.echo(
            folded(shown(f"{run.id:<{names}}  {ranks:>10}  {run.verdict.kind:<11}"), run.verdict.statement, width)
        )
    if len(runs) > last:
        click.echo(f"{len(runs) - last} older runs not shown: --last N")
    return 0
