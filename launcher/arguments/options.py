"""Command lines of `gpuwatch launch` and `gpuwatch check`: torchrun's own parser, and a group of gpuwatch's options."""

from __future__ import annotations

import argparse
import shlex

from ...core.errors import UsageError
from .shared_options import (
    SentenceParser,
    add_collector_options,
    add_metrics_option,
    add_option,
    add_preflight_failure,
    add_preflight_options,
)
from .torchrun_parser import torchrun_parser
from .watching_options import add_watching_options

LAUNCH_TIMEOUT_S = 300.0
"""For the ranks to arrive: on a cold shared file system the import of torch alone can take minutes."""
CHECK_TIMEOUT_S = 120.0
"""Somebody sits and waits for a check."""


def get_parser() -> argparse.ArgumentParser:
    """torchrun's parser with a group "gpuwatch" of our options."""
    parser = torchrun_parser()
    parser.__class__ = SentenceParser
    parser.prog = "gpuwatch launch"
    parser.description = (
        "Runs a training script under torchrun's elastic agent, watches every rank, and names the first rank and "
        "module to overflow. Every option of torchrun works as it does there; gpuwatch's own are in the last group."
    )
    group = parser.add_argument_group("gpuwatch")
    add_watching_options(group)
    add_option(
        group,
        "--preflight",
        choices=["full", "quick", "off"],
        default="quick",
        help="before the script starts, test memory, consistency and communication of every rank (quick), as "
        "gpuwatch check does (full), or nothing (off)",
    )
    add_preflight_options(group, LAUNCH_TIMEOUT_S)
    add_preflight_failure(group)
    add_collector_options(group)
    add_metrics_option(group)
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
        max_frames=21,
        trace_batches=[],
        hang_timeout=0.0,
        on_hang="report",
        telemetry=0.0,
        metrics_port=None,
    )
    return parser


class _CheckParser(SentenceParser):
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
