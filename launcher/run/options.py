"""Command line of `gpuwatch run`: options of its own kind, then the command as it stands. Imports no torch."""

from __future__ import annotations

import argparse

from ...core.errors import UsageError
from ..arguments.shared_options import (
    SentenceParser,
    add_collector_options,
    add_metrics_option,
    add_option,
    add_preflight_failure,
    add_preflight_options,
)
from ..arguments.watching_options import add_watching_options, check_together

RUN_TIMEOUT_S = 120.0
"""For the ranks to come to init_process_group: they have imported torch."""


def get_run_parser() -> argparse.ArgumentParser:
    """The options, and the command."""
    parser = SentenceParser(
        prog="gpuwatch run",
        usage="gpuwatch run [options] -- COMMAND...",
        description="Runs a command as it stands and watches every process below it that becomes a rank, whatever "
        "starts the ranks: accelerate, DeepSpeed, Lightning, Ray, mpirun, torchrun, torch.multiprocessing.spawn.",
    )
    group = parser.add_argument_group("gpuwatch")
    add_watching_options(group)
    add_option(
        group,
        "--nnodes",
        default=None,
        metavar="N",
        help="nodes of the job, each with a gpuwatch run (as the scheduler or MPI says; else 1)",
    )
    add_option(
        group,
        "--node-rank",
        type=int,
        default=None,
        metavar="N",
        help="which of them this is; the first, 0, has the report (as the scheduler or MPI says)",
    )
    add_option(
        group,
        "--head",
        default=None,
        metavar="HOST[:PORT]",
        help="the first node, by a name that all others reach it by (as the scheduler says, or MASTER_ADDR)",
    )
    add_option(
        group,
        "--other-hosts",
        action="store_true",
        help="let ranks of other hosts join, which the command itself reaches (Ray, DeepSpeed, mpirun, ssh): they "
        "need the variables that gpuwatch env prints; --head says by which name they reach this host",
    )
    add_option(
        group,
        "--preflight",
        choices=["full", "quick", "off"],
        default="off",
        help="when all ranks have come to their first init_process_group, and before it: test memory, consistency and "
        "communication (quick), as gpuwatch check does (full), or nothing (off, the default)",
    )
    add_preflight_options(group, RUN_TIMEOUT_S)
    add_preflight_failure(group)
    add_collector_options(group)
    add_metrics_option(group)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    parser.set_defaults(check_only=False)
    return parser


def parse_run(arguments: list[str]) -> argparse.Namespace:
    """The options, with the command in `command`. Raises UsageError where they make no sense, or without a command."""
    before, dashes, after = _split(arguments)
    args = get_run_parser().parse_args(before)
    args.command = [*args.command, *dashes, *after] if args.command else after
    if not args.command:
        raise UsageError("expected a command to run, found none: gpuwatch run [options] -- COMMAND...")
    check_together(args)
    return args


def _split(arguments: list[str]) -> tuple[list[str], list[str], list[str]]:
    """At the first `--`."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at : at + 1], arguments[at + 1 :]
