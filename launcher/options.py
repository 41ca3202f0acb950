"""Command line of `gpuwatch launch`: torchrun's own parser, and a group of gpuwatch's options in it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn, get_args

from torch.distributed.run import get_args_parser

from ..core.errors import UsageError
from ..core.settings import Watched
from .plan import is_number


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, where argparse prints two screens of usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (all options: gpuwatch launch --help)")


def _batches(text: str) -> list[int]:
    try:
        batches = [int(part) for part in text.split(",")]
    except ValueError:
        batches = [-1]
    if min(batches) < 0:
        raise argparse.ArgumentTypeError(f"expected batch numbers such as 0,1,3, found {text!r}")
    return batches


def _at_least(least: int, what: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not is_number(text.removeprefix("-")) or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected {what} of {least} or more, found {text!r}")
        return int(text)

    return parse


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < 1e6:
        raise argparse.ArgumentTypeError(f"expected a number of seconds of 1 or more, found {text!r}")
    return seconds


def _number(least: float, most: float, what: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"expected {what} from {least:g} to {most:g}, found {text!r}")
        return number

    return parse


def _watched(text: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(","))
    if not set(parts) <= set(get_args(Watched)):
        raise argparse.ArgumentTypeError(f"expected some of {','.join(get_args(Watched))}, found {text!r}")
    return parts


def _module_pattern(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError(f"expected a module's name or a pattern such as 'encoder.*', found {text!r}")
    return text


def _row_pattern(text: str) -> str:
    module, colon, role = text.partition(":")
    if not module.strip() or (colon and not role.strip()):
        raise argparse.ArgumentTypeError(f"expected MODULE or MODULE:ROLE, such as 'mask.*:output', found {text!r}")
    return text


def _port(text: str) -> int:
    if not is_number(text) or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"expected a port from 1 to 65535, found {text!r}")
    return int(text)


def _address(text: str) -> str:
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    if not text.startswith("tcp://") or not host or not is_number(port) or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"expected tcp://HOST:PORT, found {text!r}")
    return text


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
    group.add_argument(
        "--on-overflow",
        "--on_overflow",
        choices=["abort", "continue"],
        default="abort",
        help="when a rank finds inf or nan: end the job (the default), or record it and train on",
    )
    group.add_argument(
        "--watch",
        type=_watched,
        default=get_args(Watched),
        metavar="WHAT,WHAT",
        help="what to look at: forward (inputs and outputs), grads, weights (all three)",
    )
    group.add_argument(
        "--modules",
        action="append",
        type=_module_pattern,
        default=[],
        metavar="PATTERN",
        help="give frames only to modules whose name matches, such as 'encoder.*'; may be given several times",
    )
    group.add_argument(
        "--every",
        type=_at_least(1, "a number of batches"),
        default=1,
        metavar="N",
        help="look at one batch of N (1); of the others only at what the model returns",
    )
    group.add_argument(
        "--sync",
        action="store_true",
        help="look, and raise, in the failing module itself: the traceback shows the line; waits for the device",
    )
    group.add_argument(
        "--guard-optimizer",
        "--guard_optimizer",
        action="store_true",
        help="look at all gradients before each optimizer step and let no non-finite one in; waits for the device",
    )
    group.add_argument(
        "--ignore",
        action="append",
        type=_row_pattern,
        default=[],
        metavar="PATTERN",
        help="no alarm for modules whose name matches, or 'MODULE:ROLE' for one row; counted in the report",
    )
    group.add_argument(
        "--near-overflow",
        "--near_overflow",
        type=_number(0, 64, "powers of two"),
        default=1.0,
        metavar="POWERS",
        help="warn of an output within so many powers of two of its dtype's largest number (1; 0: never)",
    )
    group.add_argument(
        "--underflow-share",
        "--underflow_share",
        type=_number(0, 1, "a share"),
        default=0.1,
        metavar="SHARE",
        help="warn of a tensor of low precision with so large a share of subnormal numbers (0.1; 1: never)",
    )
    group.add_argument(
        "--scaler-skips",
        "--scaler_skips",
        type=_at_least(1, "a number of steps"),
        default=12,
        metavar="N",
        help="after so many steps in a row that a GradScaler skipped, inf in gradients is an overflow (12)",
    )
    group.add_argument(
        "--measure-cost",
        "--measure_cost",
        action="store_true",
        help="leave out every second batch and report what watching the others costs",
    )
    group.add_argument(
        "--max-frames",
        "--max_frames",
        type=_at_least(1, "a number of frames"),
        default=21,
        metavar="N",
        help="frames that the report shows of each rank (21)",
    )
    group.add_argument(
        "--trace-batches",
        "--trace_batches",
        type=_batches,
        default=[],
        metavar="N,N",
        help="keep all frames of these batches (the first is 0) in the report",
    )
    group.add_argument(
        "--abort-after-batch",
        "--abort_after_batch",
        type=_at_least(0, "a batch number"),
        default=None,
        metavar="N",
        help="end the job, as a clean one, after this batch",
    )
    group.add_argument(
        "--preflight",
        choices=["quick", "off"],
        default="quick",
        help="test memory and communication of every rank before the script starts (quick), or do not (off)",
    )
    group.add_argument(
        "--preflight-timeout",
        "--preflight_timeout",
        type=_seconds,
        default=120.0,
        metavar="SECONDS",
        help="after which a preflight that hangs is a failed one (120)",
    )
    group.add_argument(
        "--on-preflight-failure",
        "--on_preflight_failure",
        choices=["stop", "continue"],
        default="stop",
        help="end the job with exit code 3 (stop, the default), or record it and train",
    )
    group.add_argument(
        "--runs-dir",
        "--runs_dir",
        default="gpuwatch-runs",
        metavar="DIR",
        help="folder for the runs' folders, on the head node (gpuwatch-runs)",
    )
    group.add_argument(
        "--collector",
        type=_address,
        default=None,
        metavar="tcp://HOST:PORT",
        help="use a collector that was started by hand (gpuwatch collect), instead of starting one on the head node",
    )
    group.add_argument(
        "--collector-port",
        "--collector_port",
        type=_port,
        default=None,
        metavar="PORT",
        help="port of the collector on the head node (several nodes: the rendezvous port + 1; one node: any free one)",
    )
    group.add_argument(
        "--secret-file",
        "--secret_file",
        default=None,
        metavar="FILE",
        help="file with a secret that all nodes share, for the encryption (or the variable GPUWATCH_SECRET)",
    )
    return parser
