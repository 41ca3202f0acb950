"""Writes docs/options.md from the parsers themselves: `python docs/make_options.py`. A test compares the two."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import click
from gpuwatch.cli.explain_log import explain_log
from gpuwatch.cli.export import diff, export
from gpuwatch.cli.jobs import collect, env
from gpuwatch.cli.live import runs, stacks, top
from gpuwatch.cli.replay import replay
from gpuwatch.cli.report import report
from gpuwatch.cli.submit import HELP
from gpuwatch.launcher.options import get_check_parser, get_parser, get_run_parser

PAGE = Path(__file__).parent / "options.md"
TOP = """\
# All options

This page is made from the parsers. Every command also has `--help`; that of `launch`, `run` and `check` has the common
options, and their `--help-all` has all. An option with dashes may be spelled with `_` too, as torchrun's may. A
duration is a number of seconds, or has a unit: `90s`, `5m`, `2h`.

## Saved settings

An option of gpuwatch that is not on the command line is taken from its variable (`GPUWATCH_EVERY` for `--every`), else
from `gpuwatch.toml`, or `[tool.gpuwatch]` of `pyproject.toml`:

    hang-timeout = "5m"
    trace-batches = [0, 100]
    sync = true

    [run]
    preflight = "quick"

Tables named `launch`, `run` and `check` are for that command alone. The file is that of the working folder, or of the
nearest folder above it that belongs to you. The launch says which settings it has taken, and
`gpuwatch launch --show-settings` prints each option with its value and where that is from. An unknown option, or a
value that the option would not take, ends the command with exit code 2; so does a variable that is nearly one, such as
`GPUWATCH_EVREY`. Options of torchrun have its own variables (`PET_NNODES`). On Python 3.10, a file needs the package
`tomli`.
"""


def page() -> str:
    """The whole page."""
    launch, check = own_options(get_parser()), own_options(get_check_parser())
    parts = [
        TOP,
        "## gpuwatch launch\n\nAll options of torchrun, and these. A default stands in parentheses.\n",
        table((flag(action), help_of(action)) for action in launch),
        "## gpuwatch run\n\n`gpuwatch run [options] -- COMMAND...`\n",
        table((flag(action), help_of(action)) for action in own_options(get_run_parser())),
        "## gpuwatch check\n\nAll options of torchrun, and these. It takes no script.\n",
        table((flag(action), help_of(action)) for action in check),
        "## gpuwatch env\n",
        table(click_rows(env)),
        "## gpuwatch submit\n",
        "".join(f"    {line}".rstrip() + "\n" for line in HELP.splitlines()),
        "## gpuwatch top\n",
        table(click_rows(top)),
        "## gpuwatch stacks\n",
        table(click_rows(stacks)),
        "## gpuwatch report\n",
        table(click_rows(report)),
        "## gpuwatch replay\n",
        table(click_rows(replay)),
        "## gpuwatch runs\n",
        table(click_rows(runs)),
        "## gpuwatch diff\n",
        table(click_rows(diff)),
        "## gpuwatch export\n",
        table(click_rows(export)),
        "## gpuwatch explain-log\n",
        table(click_rows(explain_log)),
        "## gpuwatch collect\n",
        table(click_rows(collect)),
    ]
    return "\n".join(parts)


def own_options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The options of the group "gpuwatch"."""
    (group,) = [group for group in parser._action_groups if group.title == "gpuwatch"]
    return list(group._group_actions)


def flag(action: argparse.Action) -> str:
    """`--every N`, `--on-overflow {abort,continue}`."""
    name = action.option_strings[0]
    if action.choices is not None:
        return f"{name} {{{','.join(map(str, action.choices))}}}"
    return name if action.nargs == 0 else f"{name} {action.metavar}"


def help_of(action: argparse.Action) -> str:
    """The help as argparse shows it."""
    return (action.help or "") % {**vars(action), "prog": ""}


def click_rows(command: click.Command) -> list[tuple[str, str]]:
    """Option and help, as click shows them."""
    context = click.Context(command)
    return [
        record
        for option in command.get_params(context)
        if isinstance(option, click.Option)
        and "--help" not in option.opts
        and (record := option.get_help_record(context))
    ]


def table(rows: Iterable[tuple[str, str]]) -> str:
    """A Markdown table."""
    lines = ["| option | meaning |", "|---|---|"]
    for option, meaning in rows:
        escaped = option.strip().replace("|", "\\|")
        lines.append(f"| `{escaped}` | {meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
