"""`gpuwatch report`: show a run that is over. And how a user names ranks of it, for other commands too."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from ..collector.run_files import RunPaths
from ..collector.written_report import read_report
from ..core.codes import Code
from ..core.errors import GpuwatchError, UsageError
from ..core.text import command_for, ranks_text
from .run_names import RUNS_DIR, complete_runs, find_run_or_last

if TYPE_CHECKING:
    from ..collector.facts.run_facts import RunFacts
    from ..collector.report.model import RunReport


def format_option(*forms: str, text: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """`--format`, the first of `forms` by default; `text` is its help."""
    choice = click.Choice(forms)
    return click.option("--format", "form", type=choice, default=forms[0], show_default=True, help=text)


TEXT_OR_JSON = format_option("text", "json", text="What to print.")


# Which ranks a user means with `--rank`: one by its number, or those at a place in a DeviceMesh.

RankChoice = int | dict[str, int]
"""A number, or a coordinate by dimension."""


def parse_rank(ctx: click.Context, param: click.Parameter, value: str | None) -> RankChoice | None:
    """For an option of click. Raises UsageError."""
    if value is None or re.fullmatch(r"-?[0-9]{1,9}", value):
        return int(value) if value is not None else None
    if not re.fullmatch(r"[^=,\s]+=[0-9]{1,9}(,[^=,\s]+=[0-9]{1,9})*", value):
        raise UsageError(
            Code.WRONG_VALUE, f"--rank: expected a number, or a place in a DeviceMesh as tp=2,dp=0, found {value!r}"
        )
    return {name: int(number) for name, _, number in (part.partition("=") for part in value.split(","))}


def ranks_of(choice: RankChoice, facts: RunFacts) -> list[int]:
    """The numbers of these ranks, in order. Raises UsageError if the run has none."""
    known = sorted({each.rank for each in facts.ranks.values()})
    if isinstance(choice, int):
        expect_rank(choice, known)
        return [choice]
    places = {each.rank: each.coordinates for each in facts.of_attempt(facts.last_attempt)}
    found = sorted(rank for rank, place in places.items() if choice.items() <= place.items())
    if not found:
        sizes: dict[str, int] = {}
        for place in places.values():
            sizes.update({name: max(at + 1, sizes.get(name, 0)) for name, at in place.items()})
        dims = ", ".join(f"{name} of {size}" for name, size in sizes.items())
        meshes = f"its meshes have {dims}" if sizes else "no DeviceMesh with names was seen"
        asked = ",".join(f"{name}={at}" for name, at in choice.items())
        raise UsageError(
            Code.NOT_IN_RUN, f"--rank: expected a place in a DeviceMesh of this run ({meshes}), found {asked}"
        )
    return found


def one_rank(choice: RankChoice | None, run: Path) -> int | None:
    """The number of one rank; a number is not looked up. Raises UsageError if it is several."""
    if choice is None or isinstance(choice, int):
        return choice
    with facts_of(run) as facts:
        found = ranks_of(choice, facts)
    if len(found) > 1:
        raise UsageError(
            Code.NOT_IN_RUN,
            f"--rank: expected the place of one rank, found that of {ranks_text(found)}; add a dimension",
        )
    return found[0]


def expect_rank(rank: int, known: list[int]) -> None:
    """Raises UsageError, saying which ranks the run has."""
    if rank not in known:
        there = ranks_text(known) if known else "it has none"
        raise UsageError(Code.NOT_IN_RUN, f"--rank: expected one of the ranks of this run ({there}), found {rank}")


@contextmanager
def facts_of(run: Path) -> Iterator[RunFacts]:
    """All that the store of a run says. Raises UsageError if there is no store."""
    from ..collector.finish import fold_run
    from ..collector.run_files import RunPaths
    from ..collector.store import RunStore

    if run.is_file():
        raise UsageError(Code.NO_STORE, f"expected a run with its store, found the spool file {run}")
    paths = RunPaths(run)
    with closing(RunStore(paths.store)) as store:
        yield fold_run(store, paths).facts([])


# The report.


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
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write it to this file; without --format as its name says: .html, .json, else text.",
)
@click.option(
    "--all",
    "all_",
    is_flag=True,
    help="Print the whole text, as --rank, --batch, --module and --warnings do; else one screen with what bears the "
    "verdict out.",
)
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
    all_: bool,
    warnings: bool,
    open_: bool,
    again: bool,
    merge: bool,
) -> int:
    """Print the combined report of RUN: a run's folder, its name in the runs' folder, the number of its SLURM job, or a
    spool file.

    Without RUN: the latest one; in a folder without runs, that of your last launch.

    gpuwatch report --rank 3
    """
    if len(runs) > 1 and not merge:
        raise UsageError(
            Code.ARGUMENT_TOO_MANY,
            f"expected one RUN, found {len(runs)}; to make one report of them: gpuwatch report --merge",
        )
    form = _form_of(output, form)
    found = [find_run_or_last(run, Path(runs_dir)) for run in runs or (None,)]
    path = found[0]
    rank = one_rank(choice, path)
    is_spool = path.is_file()
    again = again or (not is_spool and _may_have_more(RunPaths(path)))
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
                f"to store it: gpuwatch launch --trace-batches {batch}",
            )
    if module is not None:
        report = _only_modules(report, module)
    form, color = "html" if open_ else form, output is None and sys.stdout.isatty()
    whole = all_ or warnings or rank is not None or batch is not None or module is not None
    try:
        data = _rendered(report, form, rank, whole=whole, warnings=warnings, color=color)
    except Exception as error:  # a report.json that was changed can hold anything that JSON can
        if merge or again or is_spool:
            raise
        raise GpuwatchError(
            Code.UNREADABLE,
            f"expected a report of gpuwatch in {path / 'report.json'}, found one that cannot be shown "
            f"({type(error).__name__}: {error}); to make it again from the store: "
            f"{command_for(path, does='report --again')}",
        ) from error
    if open_ and output is None:
        output = Path(tempfile.mkdtemp(prefix="gpuwatch-page-")) / "report.html"
    if output is None:
        click.echo(data)
        if form == "text" and not is_spool and is_open(path):
            said = "as far as its collector has said, this run has not ended: the report shows what has arrived so far"
            click.echo(f"gpuwatch: {said}; if it still runs: {command_for(path, does='top')}", err=True)
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


_FORMS = {".html": "html", ".htm": "html", ".json": "json"}
_NOT_WRITTEN = (".pdf", ".docx", ".png", ".svg")


def _form_of(output: Path | None, form: str) -> str:
    """What `--format` says, or where it says nothing the name of the file. Raises UsageError."""
    context = click.get_current_context()
    if output is None or context.get_parameter_source("form") is not ParameterSource.DEFAULT:
        return form
    suffix = output.suffix.lower()
    if suffix in _NOT_WRITTEN:
        raise UsageError(
            Code.WRONG_VALUE,
            f"--output: expected a file of text, .json or .html, found {str(output)!r}; to print the page from a "
            f"browser: --output {output.with_suffix('.html')}",
        )
    return _FORMS.get(suffix, form)


def is_open(path: Path) -> bool:
    """Whether no collector has said the run's end: it shows the run now, or was killed."""
    from ..core.wire.view import read_viewer_keys

    with suppress(GpuwatchError):
        return read_viewer_keys(path) is not None
    return False


def _may_have_more(paths: RunPaths) -> bool:
    """Whether the report made again may know of more nodes."""
    from ..collector.left_spools import has_new_spools

    return paths.store.exists() and has_new_spools(paths)


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
        frames = [frame for rank in report.ranks for frame in rank.frames]
        known = sorted({frame.module for frame in frames if frame.module})
        some = "they are of the root module alone" if frames else "it has none"
        if known:
            some = f"modules there: {', '.join(known[:5])}{', ...' if len(known) > 5 else ''}"
        wanted = "a pattern that matches a module in the report's frames"
        raise UsageError(Code.NOT_IN_RUN, f"--module: expected {wanted}, found {pattern!r} ({some})")
    return found


def _rendered(report: RunReport, form: str, rank: int | None, *, whole: bool, warnings: bool, color: bool) -> str:
    if form == "json":
        from ..collector.report.model import to_json

        return to_json(report).decode()
    if form == "html":
        from ..collector.report.html.page import render_html

        return render_html(report)
    width = text_width()
    # a file is read from its beginning: the answer does not come again at its end
    if not whole:
        from ..collector.report.one_screen import screen_text

        return screen_text(report, width=width, color=color, again=color)
    from ..collector.report.text_report import render_text, with_answer

    text = render_text(report, width=width, color=color, rank=rank, warnings=warnings)
    return with_answer(report, text, width=width, color=color) if color else text


def _is_in_store(report: RunReport, rank: int) -> bool:
    """Whether the store holds frames of a rank that the report has left out."""
    entry = next(entry for entry in report.ranks if entry.rank == rank)
    return entry.traces_left_out > 0 or (entry.pages > 0 and not entry.frames)


def echo_json(value: object) -> None:
    """Print it."""
    from ..collector.report.model import to_json

    click.echo(to_json(value).decode())


def text_width() -> int:
    """The terminal's width, as far as a report can use it."""
    return max(80, min(160, shutil.get_terminal_size((80, 24)).columns))
