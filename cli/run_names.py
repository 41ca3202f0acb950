"""How a user names a run: its folder, its name, the number of a SLURM job, a spool file, or nothing: the latest one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from ..collector.run_files import LATEST, runs_by_time
from ..core.codes import Code
from ..core.errors import UsageError
from ..core.misspelled import did_you_mean
from ..core.recorder.run_folder import runs_of_job
from ..core.text import command_for, plain_text
from ..core.wire.spool import SUFFIX
from ..launcher.last_run import remembered_run
from ..launcher.saved_settings import saved_runs_dir

_MOST_RUNS = 50
_MOST_TOLD = 5
_ALIKE = 0.75
"""Names of runs have much in common."""
_TAKE_A_RUN = ("top", "stacks", "export", "replay")
"""Commands that may be typed with a run alone, as `gpuwatch report`."""


def _expect_folder(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if not value:
        raise UsageError(Code.WRONG_VALUE, "--runs-dir: expected a folder with the folders of runs, found ''")
    if Path(value).is_file():
        raise UsageError(
            Code.WRONG_VALUE, f"--runs-dir: expected a folder with the folders of runs, found the file {value!r}"
        )
    return value


RUNS_DIR = click.option(
    "--runs-dir",
    default=saved_runs_dir,
    callback=_expect_folder,
    show_default="gpuwatch-runs, or the saved setting",
    help="Folder with the runs' folders.",
)


def complete_runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of runs, the newest first: of the runs' folder, or where it has none, of the last launch's."""
    folder = Path(ctx.params.get("runs_dir") or saved_runs_dir())
    try:
        runs = _names(folder)
        last = remembered_run() if not runs and _is_by_default(ctx) else None
        runs = _names(last.parent) if last is not None else runs
    except OSError:
        return []
    runs.reverse()
    return [CompletionItem(run) for run in runs if run.startswith(incomplete)][:_MOST_RUNS]


def find_run(run: str | None, runs_dir: Path) -> Path:
    """The folder or spool file that the user means. Raises UsageError, saying what there is."""
    candidates = [Path(run), runs_dir / run] if run is not None else [runs_dir / LATEST]
    for candidate in candidates:
        if candidate.is_file() and candidate.suffix == SUFFIX:
            return candidate
        if _is_run(candidate):
            return candidate.resolve()
        if run is not None and (runs := runs_by_time(candidate)):
            raise UsageError(
                Code.NO_SUCH_RUN,
                f"expected a run, found {run!r}, a folder of runs; its newest one: {typed_command(runs[-1].folder)}",
            )
        if candidate.is_file() and _is_run(candidate.parent):
            raise UsageError(
                Code.NO_SUCH_RUN,
                f"expected a run, found {run!r}, a file of one; did you mean {typed_command(candidate.parent)}?",
            )
    known = _names(runs_dir)
    if run is not None and (lives := runs_of_job(known, run)):
        return (runs_dir / lives[-1].name).resolve()
    there = f"there is no run in {runs_dir}"
    if known:
        there = f"runs there, newest last: {', '.join(known[-_MOST_TOLD:])}"
    found = f"none at {str(runs_dir / LATEST) if run is None else repr(run)}"
    if run is not None and Path(run).exists():
        found = f"the {'folder' if Path(run).is_dir() else 'file'} {run!r}, which is none of them"
    meant = did_you_mean(run, known, alike=_ALIKE) if run is not None else ""
    raise UsageError(
        Code.NO_SUCH_RUN,
        f"expected a run's folder, its name, the number of its SLURM job, or a {SUFFIX} file, found {found}{meant} "
        f"({there}; elsewhere: --runs-dir DIR)",
    )


def find_run_or_last(run: str | None, runs_dir: Path, *, by_default: bool | None = None) -> Path:
    """As `find_run`. Where the folder by default has no run, the one that this user's last launch has written.

    `by_default`: whether `runs_dir` is that folder, for a command that click has not parsed.
    A run's name and the number of a job are looked for beside that one, too. A line on stderr says what is shown.
    """
    try:
        return find_run(run, runs_dir)
    except UsageError:
        found = last_launched(runs_dir, run, by_default=by_default)
        if found is None:
            raise
    text = f"gpuwatch: {runs_dir} here has no such run; this is {found}, of your last launch"
    click.echo(plain_text(text), err=True)
    return found


def runs_dir_or_last(runs_dir: Path) -> Path:
    """The folder by default, or where it has no run, the one of this user's last launch. A line on stderr says so."""
    last = last_launched(runs_dir)
    if last is None:
        return runs_dir
    text = f"gpuwatch: {runs_dir} here has no run; these are the runs in {last.parent}, of your last launch"
    click.echo(plain_text(text), err=True)
    return last.parent


def last_launched(runs_dir: Path, run: str | None = None, *, by_default: bool | None = None) -> Path | None:
    """The last launch's run, or the one of this name or job beside it. None where `--runs-dir` was given."""
    if not (_is_by_default(click.get_current_context()) if by_default is None else by_default):
        return None
    last = remembered_run()
    with suppress(OSError):
        if last is not None and run not in (None, LATEST):
            known = _names(last.parent)
            lives = runs_of_job(known, run)
            name = run if run in known else lives[-1].name if lives else None
            return last.parent / name if name is not None else None
        if last is not None and _is_run(last) and not _names(runs_dir):
            return last
    return None


def _is_by_default(context: click.Context) -> bool:
    return context.get_parameter_source("runs_dir") is ParameterSource.DEFAULT


def _names(runs_dir: Path) -> list[str]:
    return [paths.run_id for paths in runs_by_time(runs_dir)]


def latest_run(runs_dir: Path) -> Path | None:
    """Its folder; None where no run has begun."""
    latest = runs_dir / LATEST
    return latest.resolve() if _is_run(latest) else None


def _is_run(folder: Path) -> bool:
    return folder.is_dir() and ((folder / "run.sqlite").exists() or (folder / "report.json").exists())


def typed_command(run: Path) -> str:
    """The command that the user has typed, or `report`, with this run."""
    context = click.get_current_context(silent=True)
    command = context.info_name if context is not None else None
    return command_for(run, does=command if command in _TAKE_A_RUN else "report")
