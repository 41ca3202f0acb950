"""What a shell is offered when a user presses Tab: names of runs, and the options of commands that argparse parses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

_MOST_RUNS = 50
RUNS_DIR = click.option("--runs-dir", default="gpuwatch-runs", show_default=True, help="Folder with the runs' folders.")


class ParsedByArgparse(click.Command):
    """A command whose options are those of a parser of argparse's."""

    def __init__(self, *given: Any, parser: str, **more: Any) -> None:
        super().__init__(*given, **more)
        self._parser = parser

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Its options that begin so, as they are spelled with dashes."""
        from ..launcher import options

        known = {
            option: (action.help or "") % {**vars(action), "prog": ""}
            for action in getattr(options, self._parser)()._actions
            for option in action.option_strings[:1]
            if option.startswith("--")
        }
        return [CompletionItem(option, help=text) for option, text in known.items() if option.startswith(incomplete)]


def handed_over(name: str, parser: str) -> Callable[[Callable[[tuple[str, ...]], int]], click.Command]:
    """A command whose options are those of `parser` in launcher/options.py: click hands all that follows its name over
    untouched."""

    def decorate(function: Callable[[tuple[str, ...]], int]) -> click.Command:
        made = click.command(
            name=name,
            cls=ParsedByArgparse,
            parser=parser,
            context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
            add_help_option=False,
        )
        return made(
            click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_files)(function)
        )

    return decorate


def complete_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The shell's own names of files: a script."""
    return [CompletionItem(incomplete, type="file")]


def complete_runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of runs in the runs' folder, the newest first."""
    folder = Path(ctx.params.get("runs_dir") or "gpuwatch-runs")
    try:
        runs = sorted((path.parent.name for path in folder.glob("*/run.sqlite")), reverse=True)
    except OSError:
        return []
    return [CompletionItem(run) for run in runs if run.startswith(incomplete)][:_MOST_RUNS]
