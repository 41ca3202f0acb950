"""What `--help` prints for `launch`, `run` and `check`: the common options, a line each. `--help-all` has all.

Its texts are shorter than those of the parsers. A default stands in parentheses. A test looks for each option there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple


class ShortHelp(NamedTuple):
    """Of one command."""

    usage: str
    does: str
    """At most two lines."""
    example: str
    parts: Mapping[str, Mapping[str, str]]
    """Title -> option as it is typed -> what it does."""


_AT_AN_OVERFLOW = {
    "--on-overflow continue": "record it and train on (abort: end the job)",
    "--sync": "raise in the failing module, at its line",
    "--guard-optimizer": "let no step use a gradient that is not finite",
    "--explain N": "watch every operation of batch N",
    "--capture": "write the failing forward for gpuwatch replay",
}
_WATCHED = {
    "--every N": "inspect one batch in N, or auto",
    "--watch WHAT,WHAT": "some of forward, grads, weights, comms (all)",
    "--modules PATTERN": "record only modules whose name matches",
    "--ignore PATTERN": "raise no alarm for modules whose name matches",
    "--trace-batches N,N": "keep all frames of these batches",
}
_HANGS = {
    "--hang-timeout 5m": "how long without progress is a hang (auto)",
    "--on-hang report": "only report it (auto; abort: end the job)",
}
_REPORT = {
    "--runs-dir DIR": "folder of the runs (gpuwatch-runs)",
    "--run-name NAME": "name of the run's folder",
    "--notify URL|COMMAND": "where to send the verdict",
    "--show-settings": "print each option's value and where that is from",
}
_OF_TORCHRUN = {
    "--nproc-per-node N": "ranks on this node: a number, auto, gpu or cpu",
    "--nnodes N": "nodes, each with a launch of its own",
    "--rdzv-backend c10d": "how the nodes meet, with the next one",
    "--rdzv-endpoint HOST:PORT": "where they meet",
}
SHORT = {
    "gpuwatch launch": ShortHelp(
        "gpuwatch launch [options] train.py [the script's own options]",
        "Runs a training script under torchrun, watches every rank, and names the first\n"
        "rank and module to overflow. Every option of torchrun works as it does there.",
        "gpuwatch launch --nproc-per-node 8 train.py --lr 1e-4",
        {
            "Ranks and nodes": {
                **_OF_TORCHRUN,
                "--max-restarts N": "how often a failed job is started again",
                "-m": "the script is the name of a module",
            },
            "At an overflow": _AT_AN_OVERFLOW,
            "What is watched": _WATCHED,
            "Hangs, and the test before the script": {
                **_HANGS,
                "--preflight full": "test as gpuwatch check does (quick; off)",
            },
            "The report": _REPORT,
        },
    ),
    "gpuwatch run": ShortHelp(
        "gpuwatch run [options] -- COMMAND...",
        "Runs a command as it stands and watches every process below it that becomes a\n"
        "rank: under accelerate, DeepSpeed, Lightning, Ray, mpirun, torchrun.",
        "gpuwatch run -- accelerate launch train.py",
        {
            "Nodes": {
                "--nnodes N": "nodes, each with its own gpuwatch run",
                "--node-rank N": "rank of this node; node 0 has the report",
                "--head HOST[:PORT]": "the first node",
                "--other-hosts": "let ranks of other hosts join",
            },
            "At an overflow": _AT_AN_OVERFLOW,
            "What is watched": _WATCHED,
            "Hangs, and a test before the training": {
                **_HANGS,
                "--preflight quick": "test all ranks once they meet (off; full)",
            },
            "The report": _REPORT,
        },
    ),
    "gpuwatch check": ShortHelp(
        "gpuwatch check [options]",
        "Tests the ranks, GPUs, nodes and links of a job, and says which is to blame.\n"
        "Takes the options of torchrun as the job itself would, and no script.",
        "gpuwatch check --nproc-per-node 8",
        {
            "Ranks and nodes": {**_OF_TORCHRUN, "--slurm": "submit the check as a SLURM job"},
            "What is tested": {
                "--quick": "only what every launch tests: a few seconds",
                "--alloc AMOUNT": "memory to write and read back: 80%, 256MiB",
                "--bandwidth-size SIZE": "largest size of the bandwidth test",
                "--min-busbw GB/S": "fail below this bus bandwidth",
                "--slow-factor FACTOR": "warn about a device so many times slower (1.5)",
                "--preflight-timeout 90": "how long to wait for all ranks",
            },
            "The report": {
                "--format json": "print report.json (text, the default)",
                "--runs-dir DIR": "folder of the runs (gpuwatch-runs)",
                "--show-settings": "print each option's value and where that is from",
            },
        },
    ),
}
_WIDTH = 26
"""Of the options' column."""


def short_help(prog: str) -> str:
    """At most 40 lines of at most 80 characters; `prog` is `gpuwatch launch`."""
    found = SHORT[prog]
    lines = [f"usage: {found.usage}", "", found.does, "", f"  {found.example}", ""]
    for title, options in found.parts.items():
        lines += [f"{title}:", *(f"  {option:{_WIDTH}} {text}" for option, text in options.items())]
    return "\n".join([*lines, f"All options: {prog} --help-all"]) + "\n"


class WholeHelp(argparse.Action):
    """`--help-all`: what argparse prints for `--help`."""

    def __init__(self, **given: Any) -> None:
        super().__init__(nargs=0, default=argparse.SUPPRESS, help="show this whole help message and exit", **given)

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        """Print it, and end the process."""
        parser._print_message(parser.format_help(), sys.stdout)
        parser.exit()
