"""A collector that no launch started: it waits for its nodes, and Ctrl-C ends it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType
from typing import TextIO

import zmq

from ..core.errors import GpuwatchError, UsageError
from ..core.wire.keys import derive_keys
from .finish import open_store
from .protocol import RunProtocol
from .report.text_report import render_text
from .report_file import exit_code
from .run_list import new_run
from .server import CollectorServer


def collect(
    bind: str, nodes: int, rdzv_id: str, secret: str, runs_dir: Path, max_frames: int, metrics: str | None, out: TextIO
) -> int:
    """Serve one job. Returns its exit code; raises UsageError when an address or the folder cannot be had.

    `metrics` is `HOST:PORT` where a Prometheus scrapes.
    """
    keys = derive_keys(secret, rdzv_id)
    try:
        server = CollectorServer(
            bind,
            keys.collector.public.decode(),
            keys.collector.private.decode(),
            keys.agent.public.decode(),
            keys.viewer.public.decode(),
            keys.viewer.private.decode(),
        )
    except zmq.ZMQError as error:
        raise UsageError(f"--bind: expected an address that is free, found {bind}: {error}") from error
    try:
        server.serve_metrics(metrics or "")
    except UsageError:
        server.close()
        raise
    try:
        paths = new_run(runs_dir.absolute())
        store = open_store(paths, max_frames)
    except (OSError, GpuwatchError) as error:
        server.close()
        raise UsageError(f"--runs-dir: expected a folder to write to, found {runs_dir}: {error}") from error
    print(
        f"gpuwatch: listening at {server.address} for {nodes} node(s); the report will be in {paths.folder}", file=out
    )
    if server.metrics is not None:
        print(f"gpuwatch: metrics for a Prometheus are at {server.metrics.url}", file=out)
    out.flush()
    read_end, write_end = os.pipe()

    def end(number: int, frame: FrameType | None) -> None:
        os.write(write_end, b"x")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    run_protocol = RunProtocol(paths.run_id, str(paths.folder), rdzv_id, expected_nodes=nodes, by_hand=True)
    try:
        report = server.run(paths, store, run_protocol, run_protocol.end_now, read_end)
    finally:
        server.close()
        store.close()
    print(render_text(report), file=out)
    return exit_code(report)
