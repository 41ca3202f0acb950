"""What the commands that start a job share: their parser, what the preflight tests, and where the report goes."""

from __future__ import annotations

import argparse
from difflib import get_close_matches
from typing import Any, NoReturn

from ...core.errors import UsageError
from . import parsers


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
