"""Command lines of `gpuwatch launch`, `check` and `run`, and what they tell the workers. Imports no torch."""

from __future__ import annotations

import argparse
import secrets
import shlex
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args, get_origin

import msgspec

from ..core.errors import Code, UsageError
from ..core.host import host_name
from ..core.misspelled import expect_hyphens, meant_option, with_hyphens
from ..core.secrets import masked_command, masked_text
from ..core.settings import OnHang, PreflightMode, WorkerOption, WorkerSettings, wrong_together
from . import option_types as parsers
from .option_types import torchrun_parser
from .refused_value import value_sentence
from .saved_settings import SHOW, parse_with_saved
from .short_help import WholeHelp, short_help

# The options: those of a worker stand in core/settings.py, those of the node agent and the collector here.

OptionTable = Mapping[str, Mapping[str, Any]]
"""By name, what argparse's `add_argument` takes."""

_AGENT: OptionTable = {
    "--max-frames": {
        "type": parsers.at_least(1, "a number of frames"),
        "default": 21,
        "metavar": "N",
        "help": "frames that the report shows for each rank (%(default)s)",
    },
    "--hang-timeout": {
        "type": parsers.hang_timeout,
        "metavar": "DURATION",
        "help": "when a rank has made no progress for this long, such as 120 or 2m (auto: ten times its slowest recent "
        "step, and at least 60; 300 until three steps are known; 0: never), ask all ranks for their positions and "
        "report which one the others wait for; the limit is four times as long before the first batch, and at least "
        "three times the longest pause after which the rank moved again",
    },
    "--on-hang": {
        "choices": get_args(OnHang),
        "default": "auto",
        "help": "when no rank makes progress any more: only report it, or end the ranks, too (--max-restarts can "
        "start them again); auto (the default) ends them only if no rank can go on by itself, as in a deadlock",
    },
    "--telemetry": {
        "type": parsers.telemetry,
        "default": 5.0,
        "metavar": "DURATION",
        "help": "how often to read each node's figures: processors, memory, network, disks, GPUs (%(default)g; 0: "
        "never); the report shows what stood out around the event",
    },
}
_COLLECTOR: OptionTable = {
    "--runs-dir": {
        "type": parsers.runs_folder,
        "default": "gpuwatch-runs",
        "metavar": "DIR",
        "help": "folder for the runs' folders, on the head node (%(default)s)",
    },
    "--run-name": {
        "type": parsers.run_name,
        "metavar": "NAME",
        "help": "name of the run's folder (the time and four random letters)",
    },
    "--collector": {
        "type": parsers.address,
        "metavar": "tcp://HOST:PORT",
        "help": "use a collector that was started by hand (gpuwatch collect), instead of starting one on the head node",
    },
    "--collector-port": {
        "type": parsers.port,
        "metavar": "PORT",
        "help": "port of the collector on the head node (several nodes: the rendezvous port + 1; one node: any free "
        "one)",
    },
    "--secret-file": {
        "metavar": "FILE",
        "help": "file with the secret for the encryption, the same on all nodes (or the variable GPUWATCH_SECRET)",
    },
}
_METRICS: OptionTable = {
    "--metrics-port": {
        "type": parsers.metrics_address,
        "metavar": "[HOST:]PORT",
        "help": "on the head node, serve Prometheus metrics on this port of 127.0.0.1, or of HOST, another address "
        "of that node (0.0.0.0: all); needs the extra `metrics`",
    },
}
_NOTIFY: OptionTable = {
    "--notify": {
        "type": parsers.notify_target,
        "action": "append",
        "default": None,
        "metavar": "URL|COMMAND",
        "help": "at the verdict, a stall and a forecast, post a small JSON to this address (Slack, Discord, any "
        "webhook) or run this command with the JSON on its stdin, on the head node; may be repeated (or the variable "
        "GPUWATCH_NOTIFY, which keeps an address out of command lines)",
    },
}
_SETTINGS: OptionTable = {
    SHOW: {
        "action": "store_true",
        "help": "print each option of gpuwatch with its value and where that is from, and end",
    },
}
_LAST = (_COLLECTOR, _METRICS, _NOTIFY, _SETTINGS)
_LAUNCH: OptionTable = {
    "--preflight": {
        "choices": get_args(PreflightMode),
        "default": "quick",
        "help": "before the script starts, test memory, consistency and communication of every rank (quick), as "
        "gpuwatch check does (full), or nothing (off)",
    },
}
_CHECK: OptionTable = {
    "--quick": {
        "action": "store_const",
        "const": "quick",
        "default": "full",
        "dest": "preflight",
        "help": "run only the tests that every launch runs: a few seconds",
    },
    "--force": {
        "action": "store_true",
        "help": "start more ranks than this host's cores and memory carry, too",
    },
    "--slurm": {
        "action": "store_true",
        "help": "submit the check as a SLURM job, with sbatch's options (gpuwatch submit --help)",
    },
    "--format": {
        "choices": ["text", "json"],
        "default": "text",
        "help": "what to print on stdout: text, or report.json",
    },
}
_RUN: OptionTable = {
    "--nnodes": {
        "metavar": "N",
        "help": "number of nodes, each with its own gpuwatch run (default: from the scheduler or MPI, else 1)",
    },
    "--node-rank": {
        "type": int,
        "metavar": "N",
        "help": "rank of this node; node 0 has the report (default: from the scheduler or MPI)",
    },
    "--head": {
        "metavar": "HOST[:PORT]",
        "help": "the first node, under a name by which all others reach it (default: from the scheduler, or "
        "MASTER_ADDR)",
    },
    "--other-hosts": {
        "action": "store_true",
        "help": "let ranks join that the command starts on other hosts (Ray, DeepSpeed, mpirun, ssh): they need the "
        "variables that gpuwatch env prints; --head gives the name by which they reach this host",
    },
    "--preflight": {
        "choices": get_args(PreflightMode),
        "default": "off",
        "help": "when all ranks have reached their first init_process_group, before it runs, test memory, consistency "
        "and communication (quick), as gpuwatch check does (full), or nothing (off, the default)",
    },
}
_PATIENCE_S = 120.0
"""Limit of the preflight for a check, where somebody sits and waits, and for a run, whose ranks have imported torch."""


def _worker_options(part: str | None = None) -> Iterator[tuple[str, str, WorkerOption, msgspec.structs.FieldInfo]]:
    """(field, destination, option, field info) of the options of a worker, or of a part of them."""
    for field in _worker_fields():
        if get_origin(field.type) is Annotated and (option := get_args(field.type)[1]).part == (part or option.part):
            yield field.name, field.name.removesuffix("_s"), option, field


@cache
def _worker_fields() -> tuple[msgspec.structs.FieldInfo, ...]:
    """Read from the annotations, which takes a millisecond."""
    return msgspec.structs.fields(WorkerSettings)


def _of_workers(part: str) -> OptionTable:
    table: dict[str, dict[str, Any]] = {}
    for _, name, option, field in _worker_options(part):
        default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        # argparse would read an empty text as if it had been typed
        settings = {"help": option.help, "default": default if default != "" else None}
        table["--" + name.replace("_", "-")] = settings
        kind = get_args(field.type)[0]
        if option.metavar is not None:
            settings |= {"metavar": option.metavar, "type": _reader(kind, option)}
            settings |= {"action": "append"} if option.repeats else {}
        else:
            settings |= {"choices": words} if (words := get_args(kind)) else {"action": "store_true"}
    return table


def _reader(kind: Any, option: WorkerOption) -> Any:
    if option.form:
        return getattr(parsers, option.form)
    if kind is float:
        return parsers.number(option.least, option.most, option.of)
    return parsers.at_least(option.least, option.of)


def worker_settings(args: argparse.Namespace, scratch: Path, logs: Path) -> WorkerSettings:
    """`scratch` holds the recorders of this launch, `logs` of the run's folder the files of `--nccl-debug`.

    `logs` is `scratch` on a node that does not know the run's folder: it has one of its own for `--capture`.
    """
    given: dict[str, Any] = {field: getattr(args, name, None) for field, name, _, _ in _worker_options()}
    given = {field: value for field, value in given.items() if value is not None}
    given["nccl_debug"] = str(logs) if args.nccl_debug else ""
    own = Path(args.runs_dir).absolute() / f"capture-{host_name()}-{secrets.token_hex(4)}"
    given["capture"] = str(logs.parent if logs != scratch else own) if getattr(args, "capture", False) else ""
    return WorkerSettings(str(scratch), check_only=args.check_only, preflight=args.preflight, **given)


# The parsers.

_HELP_ALL = "--help-all"
_VERSION = "--version"
"""An option of `gpuwatch` alone."""


class SentenceParser(argparse.ArgumentParser):
    """Reports an error in one sentence, where argparse prints two screens of usage."""

    def _get_option_tuples(self, option_string: str) -> Any:
        """What a shortened option may be. Two spellings of one option are no ambiguity, and `--hel` is `--help`."""
        meant = {id(found[0]): found for found in super()._get_option_tuples(option_string)}
        few = [found for found in meant.values() if not isinstance(found[0], WholeHelp)]
        return few or list(meant.values())

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Called by `parse_args`, too."""
        self._typed = list(args or ())
        return super().parse_known_args(args, namespace)

    def print_help(self, file: Any = None) -> None:
        """Called by argparse for `--help`: the common options."""
        self._print_message(short_help(self.prog), file if file is not None else sys.stdout)

    def _unknown_option(self) -> str:
        """The first word with two dashes that is none of the options, nor a shortened one."""
        words = (word.partition("=")[0] for word in self._typed if word.startswith("--") and word != "--")
        is_known = self._option_string_actions.__contains__
        return next((word for word in words if not is_known(word) and not self._get_option_tuples(word)), "")

    def _meant(self, option: str) -> str:
        if option == "-c":
            return "; to run code, write it to a file and launch that"
        known = {*self._option_string_actions, _VERSION}
        for name, action in self._option_string_actions.items():
            known |= {f"{name} {choice}" for choice in action.choices or ()}
        close = meant_option(option, known)
        if close in self._option_string_actions:  # as it is spelled with hyphens
            spellings = self._option_string_actions[close].option_strings
            close = next((spelled for spelled in spellings if spelled.startswith("--")), close)
        elif close == _VERSION:
            close = f"gpuwatch {_VERSION}"
        return f"; did you mean {close}?" if close else ""

    def error(self, message: str) -> NoReturn:
        """Called by argparse."""
        if message.endswith(("required: training_script", "required: training_script, training_script_args")):
            unknown = self._unknown_option()
            message = f"unrecognized arguments: {unknown}" if unknown else message
        code, (what, _, words) = Code.WRONG_VALUE, message.partition(": ")
        if what == "unrecognized arguments":
            option = next((word.partition("=")[0] for word in words.split() if word.startswith("-")), "")
            code, message = Code.NO_SUCH_OPTION if option else Code.ARGUMENT_TOO_MANY, masked_text(message)
            message += self._meant(option)
        elif what == "the following arguments are required" and words.startswith("training_script"):
            code, message = Code.NO_SCRIPT, "expected a training script, found none"
        elif words.startswith("expected ") and words.endswith(" argument"):
            code, message = Code.ARGUMENT_MISSING, value_sentence(message, self._option_string_actions)
        else:
            message = value_sentence(message, self._option_string_actions)
        raise UsageError(code, f"{message} (all options: {self.prog} {_HELP_ALL})")


def _add_group(parser: argparse.ArgumentParser, *tables: OptionTable) -> None:
    """gpuwatch's own options, `--min-busbw`, and `--min_busbw` as torchrun spells its own; and `--help-all`."""
    parser.add_argument(_HELP_ALL, "--help_all", dest="help_all", action=WholeHelp)
    group = parser.add_argument_group("gpuwatch")
    for name, settings in ((name, settings) for table in tables for name, settings in table.items()):
        group.add_argument(*dict.fromkeys((name, "--" + name[2:].replace("-", "_"))), **settings)


def get_parser() -> argparse.ArgumentParser:
    """torchrun's parser with a group "gpuwatch" of our options."""
    parser = torchrun_parser()
    parser.__class__ = SentenceParser
    parser.prog = "gpuwatch launch"
    parser.description = (
        "Runs a training script under torchrun's elastic agent, watches every rank, and names the first rank and "
        "module to overflow. Every option of torchrun works as it does there; gpuwatch's own are in the last group."
    )
    before, after = _of_workers("preflight"), _of_workers("failure")
    _add_group(parser, _of_workers("watching"), _AGENT, _LAUNCH, before, after, *_LAST)
    parser.set_defaults(check_only=False)
    return parser


def get_check_parser() -> argparse.ArgumentParser:
    """torchrun's parser without a script, and what of our options is about the preflight."""
    parser = torchrun_parser()
    parser.__class__ = _CheckParser
    parser.prog = "gpuwatch check"
    parser.usage = "gpuwatch check [options of torchrun] [--quick] [--format {text,json}] [options below]"
    parser.description = (
        "Tests the ranks, GPUs, nodes and links of a job, and says which one is to blame. Takes the options of "
        "torchrun as the job itself would, and no script."
    )
    for action in [action for action in parser._actions if not action.option_strings]:
        parser._remove_action(action)  # the script and its arguments
        for group in parser._action_groups:
            if action in group._group_actions:
                group._group_actions.remove(action)
    _add_group(parser, _CHECK, _of_workers("preflight"), _COLLECTOR, _SETTINGS)
    parser.set_defaults(
        check_only=True,
        preflight_timeout=_PATIENCE_S,
        training_script="--check",  # the worker gets this in place of a script
        training_script_args=[],
        max_frames=21,
        trace_batches=[],
        hang_timeout=0.0,
        on_hang="report",
        telemetry=0.0,
        metrics_port=None,
        notify=None,
    )
    return parser


def get_run_parser() -> argparse.ArgumentParser:
    """The options, and the command."""
    parser = SentenceParser(
        prog="gpuwatch run",
        usage="gpuwatch run [options] -- COMMAND...",
        description="Runs a command as it stands and watches every process below it that becomes a rank, whatever "
        "starts the ranks: accelerate, DeepSpeed, Lightning, Ray, mpirun, torchrun, torch.multiprocessing.spawn.",
    )
    before, after = _of_workers("preflight"), _of_workers("failure")
    _add_group(parser, _of_workers("watching"), _AGENT, _RUN, before, after, *_LAST)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    parser.set_defaults(check_only=False, preflight_timeout=_PATIENCE_S)
    return parser


class _CheckParser(SentenceParser):
    """Knows a script that was given by mistake."""

    def parse_args(  # type: ignore[override]  # the overloads of argparse are of no use here
        self, args: list[str], namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        mode = next((at for at, word in enumerate(args) if word.partition("=")[0] == "--preflight"), None)
        if mode is not None:
            found = shlex.join(args[mode : mode + 1 + ("=" not in args[mode])])
            raise UsageError(
                Code.NO_SUCH_OPTION,
                f"check is the full preflight, without --preflight, found {found}; for the quick one, which every "
                "launch runs: gpuwatch check --quick",
            )
        parsed: argparse.Namespace
        parsed, rest = self.parse_known_args(args, namespace)
        expect_hyphens(rest[:1], self._option_string_actions)
        if rest and not rest[0].startswith("-"):
            raise UsageError(
                Code.ARGUMENT_TOO_MANY,
                f"check runs no script, found {masked_text(rest[0])!r}; to train after the same test: "
                f"gpuwatch launch --preflight full [options] {shlex.join(masked_command(rest))}",
            )
        if rest:
            self.error(f"unrecognized arguments: {shlex.join(masked_command(rest))}")
        for name in ("-m/--module", "--no-python", "--run-path"):
            if getattr(parsed, name.rpartition("--")[2].replace("-", "_")):
                raise UsageError(
                    Code.WRONG_TOGETHER, f"check runs no script, found {name}, which says how to run one; drop it"
                )
        return parsed


def parse_launch(arguments: list[str]) -> argparse.Namespace:
    """The options and the script. Raises UsageError where they make no sense."""
    args = parse_with_saved(get_parser, arguments, _known())
    if with_hyphens(args.training_script) and not Path(args.training_script).exists():
        expect_hyphens([args.training_script], get_parser()._option_string_actions)
    check_together(args)
    args.notes += _misplaced(args.training_script, args.training_script_args)
    return args


def _misplaced(program: str, words: list[str]) -> list[str]:
    """Notes on options behind the script that are hardly its own: their names have several words."""
    names = dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--"))
    long = [name for name in names if len(name[2:].replace("_", "-").split("-")) > 1]
    ours = get_parser()._option_string_actions if long else {}  # torchrun's parser takes a while to make
    options = "options of gpuwatch and torchrun stand before it"
    return [f"{name} stands behind {program}, which gets it: {options}" for name in long if name in ours]


def parse_check(arguments: list[str]) -> argparse.Namespace:
    """The options. Raises UsageError where they make no sense."""
    return parse_with_saved(get_check_parser, arguments, _known())


def _known() -> set[str]:
    """The options of all commands, without dashes before them."""
    tables = (*map(_of_workers, ("watching", "preflight", "failure")), _AGENT, *_LAST, _LAUNCH, _CHECK, _RUN)
    return {name[2:] for table in tables for name in table}


def parse_run(arguments: list[str]) -> argparse.Namespace:
    """The options, with the command in `command`. Raises UsageError where they make no sense, or without a command."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    before, dashes, after = arguments[:at], arguments[at : at + 1], arguments[at + 1 :]
    args = parse_with_saved(get_run_parser, before, _known())
    args.command = [*args.command, *dashes, *after] if args.command else after
    if not args.command:
        raise UsageError(Code.NO_SCRIPT, "expected a command to run, found none: gpuwatch run [options] -- COMMAND...")
    expect_hyphens(args.command[:1], get_run_parser()._option_string_actions)
    check_together(args)
    return args


def check_together(args: argparse.Namespace) -> None:
    """Options that are right each by itself and make no sense together. Raises UsageError."""
    wrong = wrong_together(args)
    if wrong:
        raise UsageError(Code.WRONG_TOGETHER, wrong)
    if args.rank is not None and not isinstance(args.explain, int):
        raise UsageError(
            Code.WRONG_TOGETHER,
            f"expected --explain with a batch number beside --rank, found --explain {args.explain}: "
            f"--explain 17 --rank {args.rank}",
        )
    last = args.abort_after_batch
    unreached = [batch for batch in args.trace_batches if last is not None and batch > last]
    if unreached:
        raise UsageError(
            Code.WRONG_TOGETHER,
            f"expected --trace-batches up to --abort-after-batch {last}, found {','.join(map(str, unreached))}",
        )
