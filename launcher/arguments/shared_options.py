"""What `gpuwatch launch` and `gpuwatch check` share: what the preflight tests, and where the report goes."""

from __future__ import annotations

import argparse

from . import parsers


def add_preflight_options(group: argparse._ArgumentGroup, timeout_s: float) -> None:
    """What is tested, how much of it, and for how long: `timeout_s` is the default."""
    group.add_argument(
        "--preflight-timeout",
        "--preflight_timeout",
        type=parsers.seconds,
        default=timeout_s,
        metavar="SECONDS",
        help=f"how long to wait for all ranks to arrive ({timeout_s:.0f}); no stage of the preflight gets more than "
        "this",
    )
    group.add_argument(
        "--alloc",
        type=parsers.amount,
        default=None,
        metavar="AMOUNT",
        help="memory to write and read back: a share of what is free, 80%%, or a size, 256MiB (full: 80%% on CUDA, "
        "256MiB on the CPU; quick: 10%%, at most 1GiB, and 64MiB)",
    )
    group.add_argument(
        "--bandwidth-size",
        "--bandwidth_size",
        type=parsers.size,
        default=0,
        metavar="SIZE",
        help="largest size of the bandwidth test (256MiB on CUDA, 16MiB on the CPU)",
    )
    group.add_argument(
        "--min-busbw",
        "--min_busbw",
        type=parsers.number(0, 1e6, "a bandwidth in GB/s"),
        default=0.0,
        metavar="GB/S",
        help="fail where the bus bandwidth at the largest size, as nccl-tests defines it, is below this (0: never)",
    )
    group.add_argument(
        "--slow-factor",
        "--slow_factor",
        type=parsers.number(1, 1e3, "a factor"),
        default=1.5,
        metavar="FACTOR",
        help="warn of a device that computes so many times slower than the median of its type (1.5)",
    )
    group.add_argument(
        "--nccl-debug",
        "--nccl_debug",
        action="store_true",
        help="write what NCCL says in the preflight to a file per rank, in the logs/ of the run's folder",
    )
    group.add_argument(
        "--health-thresholds",
        "--health_thresholds",
        type=parsers.thresholds,
        default=None,
        metavar="FILE",
        help="TOML or JSON file with limits of the GPUs' health, in place of the built-in ones",
    )


def add_collector_options(group: argparse._ArgumentGroup) -> None:
    """Where the report is made, and who may take part."""
    group.add_argument(
        "--runs-dir",
        "--runs_dir",
        default="gpuwatch-runs",
        metavar="DIR",
        help="folder for the runs' folders, on the head node (gpuwatch-runs)",
    )
    group.add_argument(
        "--run-name",
        "--run_name",
        type=parsers.run_name,
        default=None,
        metavar="NAME",
        help="name of the run's folder (the time and four random letters)",
    )
    group.add_argument(
        "--collector",
        type=parsers.address,
        default=None,
        metavar="tcp://HOST:PORT",
        help="use a collector that was started by hand (gpuwatch collect), instead of starting one on the head node",
    )
    group.add_argument(
        "--collector-port",
        "--collector_port",
        type=parsers.port,
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
