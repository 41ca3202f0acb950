"""Command lines of `gpuwatch launch` and `gpuwatch check`: torchrun's own parser, and a group of gpuwatch's options."""

from __future__ import annotations

import argparse
import shlex
from difflib import get_close_matches
from typing import Any, NoReturn, get_args

from ..core.errors import UsageError
from ..core.settings import OnHang, Watched
from . import option_types as parsers
from .torchrun_parser import torchrun_parser

# What the commands that start a job share: their parser, what the preflight tests, and where the report goes.


class SentenceParser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, where argparse prints two screens of usage."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse."""
        what, _, words = message.partition(": ")
        if what == "unrecognized arguments":
            option = next((word.partition("=")[0] for word in words.split() if word.startswith("-")), "")
            close = get_close_matches(option, self._option_string_actions, n=1)
            message += f"; did you mean {close[0]}?" if close else ""
        elif what == "the following arguments are required" and words.startswith("training_script"):
            message = "expected a training script, found none"
        raise UsageError(f"{message} (all options: {self.prog} --help)")


def add_option(group: argparse._ArgumentGroup, name: str, **settings: Any) -> None:
    """Add an option to `group`: `--min-busbw`, and `--min_busbw` as torchrun spells its own.

    `settings` are those of argparse's `add_argument`.
    """
    group.add_argument(*dict.fromkeys((name, "--" + name[2:].replace("-", "_"))), **settings)


def add_preflight_options(group: argparse._ArgumentGroup, timeout_s: float) -> None:
    """What is tested, how much of it, and for how long: `timeout_s` is the default."""
    add_option(
        group,
        "--preflight-timeout",
        type=parsers.seconds,
        default=timeout_s,
        metavar="SECONDS",
        help=f"how long to wait for all ranks to arrive ({timeout_s:.0f}); no stage of the preflight gets more than "
        "this",
    )
    add_option(
        group,
        "--alloc",
        type=parsers.amount,
        default=None,
        metavar="AMOUNT",
        help="memory to write and read back: a share of what is free, 80%%, or a size, 256MiB (full: 80%% on CUDA, "
        "256MiB on the CPU; quick: 10%%, at most 1GiB, and 64MiB)",
    )
    add_option(
        group,
        "--bandwidth-size",
        type=parsers.size,
        default=0,
        metavar="SIZE",
        help="largest size of the bandwidth test (256MiB on CUDA, 16MiB on the CPU)",
    )
    add_option(
        group,
        "--min-busbw",
        type=parsers.number(0, 1e6, "a bandwidth in GB/s"),
        default=0.0,
        metavar="GB/S",
        help="fail where the bus bandwidth at the largest size, as nccl-tests defines it, is below this (0: never)",
    )
    add_option(
        group,
        "--slow-factor",
        type=parsers.number(1, 1e3, "a factor"),
        default=1.5,
        metavar="FACTOR",
        help="warn of a device that computes so many times slower than the median of its type (1.5)",
    )
    add_option(
        group,
        "--nccl-debug",
        action="store_true",
        help="write what NCCL says in the preflight to a file per rank, in the logs/ of the run's folder",
    )
    add_option(
        group,
        "--health-thresholds",
        type=parsers.thresholds,
        default=None,
        metavar="FILE",
        help="TOML or JSON file with limits of the GPUs' health, in place of the built-in ones",
    )


def add_metrics_option(group: argparse._ArgumentGroup) -> None:
    """Where a Prometheus scrapes."""
    add_option(
        group,
        "--metrics-port",
        type=parsers.metrics_address,
        default=None,
        metavar="[HOST:]PORT",
        help="on the head node, serve metrics for a Prometheus at this port, of 127.0.0.1 unless HOST is another "
        "address of that node (0.0.0.0: all); it needs the extra `metrics`",
    )


def add_preflight_failure(group: argparse._ArgumentGroup) -> None:
    """What follows where a script was to run after it."""
    add_option(
        group,
        "--on-preflight-failure",
        choices=["stop", "continue"],
        default="stop",
        help="end the job with exit code 3 (stop, the default), or record it and train",
    )


def add_collector_options(group: argparse._ArgumentGroup) -> None:
    """Where the report is made, and who may take part."""
    add_option(
        group,
        "--runs-dir",
        default="gpuwatch-runs",
        metavar="DIR",
        help="folder for the runs' folders, on the head node (gpuwatch-runs)",
    )
    add_option(
        group,
        "--run-name",
        type=parsers.run_name,
        default=None,
        metavar="NAME",
        help="name of the run's folder (the time and four random letters)",
    )
    add_option(
        group,
        "--collector",
        type=parsers.address,
        default=None,
        metavar="tcp://HOST:PORT",
        help="use a collector that was started by hand (gpuwatch collect), instead of starting one on the head node",
    )
    add_option(
        group,
        "--collector-port",
        type=parsers.port,
        default=None,
        metavar="PORT",
        help="port of the collector on the head node (several nodes: the rendezvous port + 1; one node: any free one)",
    )
    add_option(
        group,
        "--secret-file",
        default=None,
        metavar="FILE",
        help="file with a secret that all nodes share, for the encryption (or the variable GPUWATCH_SECRET)",
    )


# What `gpuwatch launch` and `gpuwatch run` share: what is looked at in a rank, and what follows. Imports no torch.


def add_watching_options(group: argparse._ArgumentGroup) -> None:
    """What is looked at, what is an alarm, what is kept, and when a rank hangs."""
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
        help="what to look at: forward (inputs and outputs), grads, weights, comms (what passes between ranks); all",
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
        "--state-every",
        type=parsers.at_least(0, "a number of steps"),
        default=50,
        metavar="N",
        help="after an optimizer's first step and one in N of the others (50; 0: never), look at what it keeps in 16 "
        "bits or less: inf there ends all updates",
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
        type=parsers.hang_timeout,
        default=None,
        metavar="SECONDS",
        help="when a rank has not moved for so long (auto: ten times the slowest of its last steps, and at least 60; "
        "300 until three steps are known; 0: never), ask all ranks where they stand and say which one the others wait "
        "for; four times as long before the first batch, and three times the longest rest that a rank has come back "
        "from",
    )
    add_option(
        group,
        "--on-hang",
        choices=get_args(OnHang),
        default="auto",
        help="when no rank moves any more: only say so, or end the ranks, too, which --max-restarts may start again; "
        "auto (the default) ends them only where no rank can go on by itself, as in a deadlock",
    )
    add_option(
        group,
        "--telemetry",
        type=parsers.telemetry,
        default=5.0,
        metavar="SECONDS",
        help="how often to read the figures of each node: processors, memory, network, disks, GPUs (5; 0: never); the "
        "report says what stood out around the event",
    )


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


# Command line of `gpuwatch run`: options of its own kind, then the command as it stands. Imports no torch.

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
