"""`gpuwatch collect`: the collector of a launch, started by hand."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import click

from ..core.errors import UsageError


def _metrics_address(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
    from ..launcher.option_types import metrics_address

    try:
        return metrics_address(text) if text is not None else None
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--metrics-port: {error}") from error


@click.command(name="collect")
@click.option("--bind", default="tcp://*:29401", show_default=True, help="Where to listen: tcp://ADDRESS:PORT.")
@click.option("--nodes", type=click.IntRange(min=1), default=1, show_default=True, help="Nodes of the job.")
@click.option("--rdzv-id", default="none", show_default=True, help="The job's rendezvous id, as its launches have it.")
@click.option(
    "--secret-file", default=None, help="File with the job's shared secret (or the variable GPUWATCH_SECRET)."
)
@click.option("--runs-dir", default="gpuwatch-runs", show_default=True, help="Folder for the runs' folders.")
@click.option("--max-frames", type=click.IntRange(min=1), default=21, show_default=True, help="Frames shown of a rank.")
@click.option(
    "--metrics-port",
    default=None,
    metavar="[HOST:]PORT",
    callback=_metrics_address,
    help="Serve metrics for a Prometheus at this port, of 127.0.0.1 unless HOST is another address of this host "
    "(0.0.0.0: all). It needs the extra `metrics`.",
)
def command(
    bind: str,
    nodes: int,
    rdzv_id: str,
    secret_file: str | None,
    runs_dir: str,
    max_frames: int,
    metrics_port: str | None,
) -> int:
    """Wait for the node agents of one job, write its report, and exit with its exit code.

    The launches of the job are given --collector tcp://THIS_HOST:PORT and the same secret. Ctrl-C ends it early, with
    the report of what has arrived.
    """
    from ..collector.__main__ import collect
    from ..launcher.plan import job_secret

    secret = job_secret(secret_file, rdzv_id, local=False)
    if not bind.startswith("tcp://"):
        raise UsageError(f"--bind: expected tcp://ADDRESS:PORT, found {bind!r}")
    return collect(bind, nodes, rdzv_id, secret, Path(runs_dir), max_frames, metrics_port, sys.stdout)
