"""Command lines of `gpuwatch launch` and `gpuwatch check`: torchrun's own parser, and a group of gpuwatch's options."""

from __future__ import annotations

import argparse
import shlex
from typing import NoReturn, get_args

from torch.distributed.run import get_args_parser

from ...core.errors import UsageError
from ...core.settings import Watched, WorkerSettings
from . import parsers
from .shared_options import add_collector_options, add_option, add_preflight_options

LAUNCH_TIMEOUT_S = 300.0
"""For the ranks to arrive: on a cold shared file system the import of torch alone can take minutes."""
HANG_TIMEOUT_S = 300.0
"""Below the watchdog of NCCL (480 s) and the timeouts of process groups, which end a job and name nobody."""
CHECK_TIMEOUT_S = 120.0
"""Somebody sits and waits for a check."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, where argparse prints two screens of usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (all options: {self.prog} --help)")


def check_together(args: argparse.Namespace) -> None:
    """Options that are right each by itself and make no sense together. Raises UsageError."""
    if args.measure_cost and args.every > 1:
        raise UsageError(
            "expected one of --measure-cost and --every, found both: --measure-cost leaves out every second batch by "
            "itself; drop one of them"
        )
    if args.sync and args.on_overflow == "continue":
        raise UsageError("expected --on-overflow abort with --sync, which raises where it finds one; found continue")
    last = args.abort_after_batch
    unreached = [batch for batch in args.trace_batches if last is not None and batch > last]
    if unreached:
        raise UsageError(
            f"expected --trace-batches up to --abort-after-batch {last}, found {','.join(map(str, unreached))}"
        )


def get_parser() -> argparse.ArgumentParser:
    """torchrun's parser with a group "gpuwatch" of our options."""
    parser = get_args_parser()
    parser.__class__ = _Parser
    parser.prog = "gpuwatch launch"
    parser.description = (
        "Runs a training script under torchrun's elastic agent, watches every rank, and names the first rank and "
        "module to overflow. Every option of torchrun works as it does there; gpuwatch's own are in the last group."
    )
    group = parser.add_argument_group("gpuwatch")
    add_option(
        group,
        "--on-overflow",
        choices=["abort", "continue"],
        default="abort",
        help="when a rank finds inf or nan: end the job (the default), or record it and train on",
    )
    add_option(
        group,
        "--watch",
        type=parsers.watched,
        default=get_args(Watched),
        metavar="WHAT,WHAT",
        help="what to look at: forward (inputs and outputs), grads, weights (all three)",
    )
    add_option(
        group,
        "--modules",
        action="append",
        type=parsers.module_pattern,
        default=[],
        metavar="PATTERN",
        help="give frames only to modules whose name matches, such as 'encoder.*'; may be given several times",
    )
    add_option(
        group,
        "--every",
        type=parsers.at_least(1, "a number of batches"),
        default=1,
        metavar="N",
        help="look at one batch of N (1); of the others only at what the model returns",
    )
    add_option(
        group,
        "--sync",
        action="store_true",
        help="look, and raise, in the failing module itself: the traceback shows the line; waits for the device",
    )
    add_option(
        group,
        "--guard-optimizer",
        action="store_true",
        help="look at all gradients before each optimizer step and let no non-finite one in; waits for the device",
    )
    add_option(
        group,
        "--ignore",
        action="append",
        type=parsers.row_pattern,
        default=[],
        metavar="PATTERN",
        help="no alarm for modules whose name matches, or 'MODULE:ROLE' for one row; counted in the report",
    )
    add_option(
        group,
        "--near-overflow",
        type=parsers.number(0, 64, "powers of two"),
        default=1.0,
        metavar="POWERS",
        help="warn of an output within so many powers of two of its dtype's largest number (1; 0: never)",
    )
    add_option(
        group,
        "--underflow-share",
        type=parsers.number(0, 1, "a share"),
        default=0.1,
        metavar="SHARE",
        help="warn of a tensor of low precision with so large a share of subnormal numbers (0.1; 1: never)",
    )
    add_option(
        group,
        "--scaler-skips",
        type=parsers.at_least(1, "a number of steps"),
        default=12,
        metavar="N",
        help="after so many steps in a row that a GradScaler skipped, inf in gradients is an overflow (12)",
    )
    add_option(
        group,
        "--measure-cost",
        action="store_true",
        help="leave out every second batch and report what watching the others costs",
    )
    add_option(
        group,
        "--max-frames",
        type=parsers.at_least(1, "a number of frames"),
        default=21,
        metavar="N",
        help="frames that the report shows of each rank (21)",
    )
    add_option(
        group,
        "--trace-batches",
        type=parsers.batches,
        default=[],
        metavar="N,N",
        help="keep all frames of these batches (the first is 0) in the report",
    )
    add_option(
        group,
        "--abort-after-batch",
        type=parsers.at_least(0, "a batch number"),
        default=None,
        metavar="N",
        help="end the job, as a clean one, after this batch",
    )
    add_option(
        group,
        "--hang-timeout",
        type=parsers.number(0, 1e6, "a number of seconds"),
        default=HANG_TIMEOUT_S,
        metavar="SECONDS",
        help=f"when a rank has not moved for so long ({HANG_TIMEOUT_S:.0f}; 0: never), ask all ranks where they stand "
        "and say which one the others wait for; four times as long before the first batch, and three times the longest "
        "rest that a rank has come back from",
    )
    add_option(
        group,
        "--on-hang",
        choices=["report", "abort"],
        default="abort",
        help="when no rank moves any more: say so and end the ranks, which --max-restarts may start again (the "
        "default), or only say so",
    )
    add_option(
        group,
        "--preflight",
        choices=["full", "quick", "off"],
        default="quick",
        help="before the script starts, test memory, consistency and communication of every rank (quick), as "
        "gpuwatch check does (full), or nothing (off)",
    )
    add_preflight_options(group, LAUNCH_TIMEOUT_S)
    add_option(
        group,
        "--on-preflight-failure",
        choices=["stop", "continue"],
        default="stop",
        help="end the job with exit code 3 (stop, the default), or record it and train",
    )
    add_collector_options(group)
    parser.set_defaults(check_only=False)
    return parser


def get_check_parser() -> argparse.ArgumentParser:
    """torchrun's parser without a script, and what of our options is about the preflight."""
    parser = get_args_parser()
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
    ours = parser.add_argument_group("gpuwatch")
    add_option(ours, "--quick", action="store_true", help="only what every launch tests: a few seconds")
    add_option(
        ours, "--slurm", action="store_true", help="as a job of SLURM, with sbatch's options (gpuwatch submit --help)"
    )
    add_option(
        ours, "--format", choices=["text", "json"], default="text", help="what to print on stdout: text, or report.json"
    )
    add_preflight_options(ours, CHECK_TIMEOUT_S)
    add_collector_options(ours)
    parser.set_defaults(
        check_only=True,
        training_script="--check",  # what the worker is told in place of a script
        training_script_args=[],
        max_frames=WorkerSettings("").max_frames,
        trace_batches=[],
        hang_timeout=0.0,
        on_hang="report",
    )
    return parser


class _CheckParser(_Parser):
    """Knows a script that was given by mistake."""

    def parse_args(  # type: ignore[override]  # the overloads of argparse are of no use here
        self, args: list[str], namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        parsed, rest = self.parse_known_args(args, namespace)
        if rest and not rest[0].startswith("-"):
            raise UsageError(
                f"check runs no script, found {rest[0]!r}; to train after the same test: "
                f"gpuwatch launch --preflight full [options] {shlex.join(rest)}"
            )
        if rest:
            self.error(f"unrecognized arguments: {shlex.join(rest)}")
        for name, given in (
            ("-m/--module", parsed.module),
            ("--no-python", parsed.no_python),
            ("--run-path", parsed.run_path),
        ):
            if given:
                raise UsageError(f"check runs no script, found {name}, which says how to run one; drop it")
        return parsed
