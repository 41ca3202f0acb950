"""What `gpuwatch launch` and `gpuwatch run` share: what is looked at in a rank, and what follows. Imports no torch."""

from __future__ import annotations

import argparse
from typing import get_args

from ...core.errors import UsageError
from ...core.settings import OnHang, Watched
from . import parsers
from .shared_options import add_option


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
