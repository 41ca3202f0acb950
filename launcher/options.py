"""Command lines of `gpuwatch launch`, `check` and `run`, and what they tell the workers. Imports no torch."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ..core.codes import Code
from ..core.errors import UsageError
from ..core.misspelled import expect_hyphens, with_hyphens
from ..core.settings import wrong_together
from .option_tables import (
    AGENT_OPTIONS,
    CHECK_OPTIONS,
    COLLECTOR_OPTIONS,
    LAST_OPTIONS,
    LAUNCH_OPTIONS,
    RUN_OPTIONS,
    SAVED_OPTIONS,
    options_of_workers,
)
from .option_types import torchrun_parser
from .saved_settings import parse_with_saved, unknown_variables
from .sentence_parser import CheckParser, SentenceParser, add_group

_PATIENCE_S = 120.0
"""Limit of the preflight for a check, where somebody sits and waits, and for a run, whose ranks have imported torch."""


def get_parser() -> argparse.ArgumentParser:
    """torchrun's parser with a group "gpuwatch" of our options."""
    parser = torchrun_parser()
    parser.__class__ = SentenceParser
    parser.prog = "gpuwatch launch"
    parser.description = (
        "Runs a training script under torchrun's elastic agent, watches every rank, and names the first rank and "
        "module to overflow. Every option of torchrun works as it does there; gpuwatch's own are in the last group."
    )
    before, after = options_of_workers("preflight"), options_of_workers("failure")
    add_group(parser, options_of_workers("watching"), AGENT_OPTIONS, LAUNCH_OPTIONS, before, after, *LAST_OPTIONS)
    parser.set_defaults(check_only=False)
    return parser


def get_check_parser() -> argparse.ArgumentParser:
    """torchrun's parser without a script, and what of our options is about the preflight."""
    parser = torchrun_parser()
    parser.__class__ = CheckParser
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
    add_group(parser, CHECK_OPTIONS, options_of_workers("preflight"), COLLECTOR_OPTIONS, SAVED_OPTIONS)
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
    before, after = options_of_workers("preflight"), options_of_workers("failure")
    add_group(parser, options_of_workers("watching"), AGENT_OPTIONS, RUN_OPTIONS, before, after, *LAST_OPTIONS)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    parser.set_defaults(check_only=False, preflight_timeout=_PATIENCE_S)
    return parser


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
    of_workers = map(options_of_workers, ("watching", "preflight", "failure"))
    tables = (*of_workers, AGENT_OPTIONS, *LAST_OPTIONS, LAUNCH_OPTIONS, CHECK_OPTIONS, RUN_OPTIONS)
    return {name[2:] for table in tables for name in table}


def expect_known_variables() -> None:
    """For a command that reads a few of them itself. Raises UsageError for one that is typed wrong."""
    unknown_variables(_known(), os.environ)


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
