"""The command `gpuwatch`. Subcommands are imported when they are called, so that `gpuwatch --help` is quick."""

from __future__ import annotations

import re
import sys
import textwrap
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from ..core.guest.own_imports import theirs_last

theirs_last()

import click  # noqa: E402

from ..core.codes import Code, code_texts, coded  # noqa: E402
from ..core.errors import GpuwatchError, OutputLost, UsageError  # noqa: E402
from ..core.guest.tell import end_process, expect_answer, guard_streams, say  # noqa: E402
from ..core.host import gpuwatch_version  # noqa: E402
from ..core.misspelled import closest, expect_hyphens, with_hyphens  # noqa: E402

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

COMMANDS = {
    "launch": "Run a training script under torchrun and name the first rank and module to overflow.",
    "run": "Run a command as it stands, whatever starts its ranks, and watch the ranks as launch does.",
    "env": "Print the variables that ranks need, for launchers that start ranks in an environment of their own.",
    "top": "Watch a running job in the terminal.",
    "stacks": "Show where all ranks of a running job stand now, with their stacks.",
    "submit": "Submit a training script to SLURM, with all of sbatch's options.",
    "check": "Test the ranks, GPUs, nodes and links of a job, and say which one is to blame.",
    "report": "Print the combined report of a run.",
    "replay": "Run the forward that --capture wrote again, as it was and in each dtype.",
    "runs": "List the runs of a folder with their verdicts.",
    "diff": "Show where the numbers of two runs, ranks or batches first differ.",
    "export": "Write the numbers of a run as JSON lines, CSV, Parquet or a trace for Perfetto.",
    "explain": "Say what the code at the end of a message means, and what to do.",
    "explain-log": "Say from a job's own logs who failed first, what it means, and what to do.",
    "collect": "Run a collector by hand, for launches with --collector.",
}
_BESIDE = {"launch": "jobs", "run": "jobs", "check": "jobs", "env": "jobs", "collect": "jobs"}
_BESIDE |= {"runs": "live", "top": "live", "stacks": "live", "diff": "export", "explain": "main"}
"""Commands that are not in a file of their own name."""
_GO_ON = {"launch", "run", "check", "submit", "collect"}
"""What these do is not what they print."""
_OTHERS = {
    "launch": ("start", "train", "exec", "torchrun", "python"),
    "report": ("show", "view", "open", "result", "results", "summary"),
    "runs": ("list", "ls", "history"),
    "top": ("status", "ps", "monitor", "watch", "attach"),
    "stacks": ("stack", "py-spy", "dump", "bt"),
    "check": ("doctor", "preflight", "test", "health", "diagnose"),
    "explain-log": ("log", "logs"),
    "submit": ("sbatch", "srun"),
    "diff": ("compare",),
    "--help": ("help", "man", "usage"),
    "--version": ("version",),
}
"""Ours -> what other programs call it."""


class _LazyGroup(click.Group):
    """Lists the subcommands from a table and imports the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        expect_answer(drops=cmd_name in _GO_ON)
        name = cmd_name.replace("-", "_")
        command = getattr(import_module(f"..cli.{_BESIDE.get(name, name)}", __package__), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS:
            text = f"expected one of {', '.join(COMMANDS)}, found {args[0]!r}; {_meant(args[0], args[1:])}"
            raise UsageError(Code.NO_SUCH_COMMAND, text)
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None:
            expect_hyphens(rest, {option for param in command.params for option in param.opts})
        return name, command, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _meant(word: str, rest: list[str]) -> str:
    if word == "help" and rest and rest[0] in COMMANDS:
        return f"did you mean gpuwatch {rest[0]} --help?"
    if word == "gpuwatch" and rest:
        return f"leave it out: gpuwatch {rest[0]}"
    if other := next((ours for ours, others in _OTHERS.items() if word.lower() in others), ""):
        return f"did you mean gpuwatch {other}?"
    if close := closest(word, COMMANDS):
        return f"did you mean gpuwatch {close}?"
    if option := with_hyphens(word):
        return f"did you mean {option}, with hyphens?"
    if word.endswith(".py"):
        return f"to watch a script: gpuwatch launch {word}"
    return "all commands: gpuwatch --help"


@click.group(
    cls=_LazyGroup,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(gpuwatch_version(), prog_name="gpuwatch")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Wraps torchrun: starts an unmodified training script, watches every rank, and names the first rank and module
    to overflow in one combined report.

    gpuwatch launch --nproc-per-node 8 train.py --lr 1e-4

    gpuwatch check --nproc-per-node 8

    Exit codes: 0 clean; 1 the script failed by itself; 2 wrong usage; 3 preflight failed; 4 overflow found; 5 a rank
    hung or was lost; 6 unknown: records that could show an overflow did not arrive; 128 + N ended by signal N.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)


# `gpuwatch explain`: what the code of a message means.

_MOST_NEAR = 3


def _complete_codes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    texts = code_texts()
    return [CompletionItem(code, help=texts[code].title) for code in Code if code.startswith(incomplete.upper())]


@click.command(name="explain")
@click.argument("code", required=False, shell_complete=_complete_codes)
def explain(code: str | None) -> int:
    """Print what the CODE at the end of a message means, why it comes, and what to do: gpuwatch explain GW205

    Without CODE: all codes. This command has nothing to do with gpuwatch.explain(module, ...) in Python or with
    gpuwatch launch --explain, which look for the operation that overflowed.
    """
    from .report import text_width

    texts, width = code_texts(), text_width()
    if code is None:
        for each, (title, _) in texts.items():
            click.echo(textwrap.fill(f"{each}  {title}", width, subsequent_indent=" " * 7))
        return 0
    found = _code_of(code)
    title, text = texts[found]
    click.echo(textwrap.fill(f"{found}  {title}", width, subsequent_indent=" " * 7))
    click.echo(f"\n{textwrap.fill(text, width, break_on_hyphens=False, break_long_words=False)}")
    return 0


def _code_of(word: str) -> Code:
    """`GW205`, `gw205`, `205` or `near_overflow`. Raises UsageError, with codes near it."""
    by_name = {str(code): code for code in Code} | {code.kind.upper(): code for code in Code}
    name = re.sub(r"^\[?(?:GW)?(\d+)\]?$", r"GW\1", word.strip().upper().replace("-", "_"))
    if name in by_name:
        return by_name[name]
    number = re.fullmatch(r"GW(\d{1,3})", name)
    if number is not None:
        near = sorted(Code, key=lambda code: abs(int(code[2:]) - int(number[1])))[:_MOST_NEAR]
    else:
        near = [by_name[close] for close in get_close_matches(name, by_name, n=_MOST_NEAR)] or _about(word)
    hint = f"near it: {', '.join(f'{code} ({code.kind})' for code in near)}; " if near else ""
    raise UsageError(Code.NO_SUCH_CODE, f"expected a code such as GW205, found {word!r}; {hint}all: gpuwatch explain")


def _about(word: str) -> list[Code]:
    """Codes whose title has the word."""
    wanted = re.compile(rf"\b{re.escape(word.strip())}", re.IGNORECASE)
    texts = code_texts()
    return [code for code in Code if word.strip() and wanted.search(texts[code].title)][:_MOST_NEAR]


# The process.


def main() -> NoReturn:
    """Runs a command. Raises SystemExit."""
    guard_streams()
    expect_answer()
    try:
        code = cli.main(standalone_mode=False)
    except OutputLost as error:
        expect_answer(drops=True)
        if error.is_wanted:
            say(str(error))
        code = int(error.exit_code)
    except GpuwatchError as error:
        say(str(error))
        code = int(error.exit_code)
    except click.ClickException as error:
        from .click_errors import sentence_of

        say(coded(*sentence_of(error)))
        code = 2
    except click.exceptions.Abort:
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


def entry() -> NoReturn:
    """The command's process. Once torch is there, Python takes a quarter of a second to take its modules down."""
    try:
        main()
    except SystemExit as end:
        if "torch" not in sys.modules:
            raise
        code = end.code
    end_process(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    entry()
