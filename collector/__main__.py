"""The collector as a child of a launch: settings on the first line of stdin, JSON lines on stdout. Or by hand."""

from __future__ import annotations

import errno
import os
import random
import signal
import sqlite3
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

import zmq

from ..core.codes import Code, ExitCode
from ..core.errors import GpuwatchError, UsageError
from ..core.wire.keys import derive_keys
from ..core.wire.pipe import CannotBind, CollectorBound, CollectorConfig, UserNotice, read_config, write_line
from .finish import fold_store, open_store
from .protocol import RunProtocol
from .report.one_screen import screen_text
from .run_files import RunPaths, exit_code, new_run
from .server import CollectorServer, ReportFailed
from .store import RunStore

_NAMES = ("EAGAIN", "EDQUOT", "EIO", "EMFILE", "ENFILE", "ENOBUFS", "ENOMEM", "ENOSPC")
_SHORT = frozenset(getattr(errno, name) for name in _NAMES)
"""Errors of a machine that has run out of a resource."""


def main() -> int:
    """Entry."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # it ends after the job, when the report is written
    config = read_config(0, CollectorConfig)
    if config is None:
        return int(ExitCode.USAGE)
    try:
        server = listen(config)
    except zmq.ZMQError as error:
        _refuse(CannotBind(error.errno == zmq.EADDRINUSE, str(error), may_pass=error.errno in _SHORT))
        return int(ExitCode.USAGE)
    try:
        server.viewers.serve_metrics(config.metrics)
    except UsageError as error:
        if not config.resume:
            _refuse(CannotBind(False, error.text, code=error.code))
            server.close()
            return int(ExitCode.USAGE)
        _tell(f"the run continues without metrics: {error}")
    try:
        paths = RunPaths(Path(config.resume)) if config.resume else new_run(Path(config.runs_dir), config.run_name)
        fallback = Path(config.fallback) if config.fallback else None
        store = open_store(paths, config.max_frames, fallback, _tell)
    except (OSError, GpuwatchError) as error:
        # the other folder was tried for the store, too
        may_pass = isinstance(error.__cause__, sqlite3.OperationalError) or getattr(error, "errno", 0) in _SHORT
        why = getattr(error, "strerror", None) or getattr(error, "text", error)
        sentence = f"expected a folder for runs that can be written, found {config.runs_dir}: {why}"
        code = None if may_pass else Code.NOT_WRITABLE
        _refuse(CannotBind(False, f"{sentence}; pass another --runs-dir DIR", code, may_pass))
        server.close()
        return int(ExitCode.USAGE)
    if config.notify:
        server.viewers.notify_at(config.notify)
    url = server.viewers.metrics.url if server.viewers.metrics is not None else ""
    if not write_line(sys.stdout.buffer, CollectorBound(server.address, str(paths.folder), url)):
        store.close()
        server.close()
        return int(ExitCode.UNKNOWN)  # the launch waits for this word, and starts another one
    with suppress(OSError):
        sys.stderr = (paths.logs / "collector.log").open("a", buffering=1)
    serve(server, paths, store, config)
    return 0


def _refuse(why: CannotBind) -> None:
    write_line(sys.stdout.buffer, why)


def _tell(sentence: str) -> None:
    write_line(sys.stdout.buffer, UserNotice(sentence))


def listen(config: CollectorConfig) -> CollectorServer:
    """Bind. Raises zmq.ZMQError if the address is not available.

    If two nodes on one host start their collectors at once, Linux can refuse both. So a refusal counts only after
    retries with pauses of random length.
    """
    viewer = config.viewer_public_key, config.viewer_private_key
    keys = config.public_key, config.private_key, config.agent_public_key, *viewer
    for pause_s in (0.05, 0.1, 0.2, 0.4):
        try:
            return CollectorServer(config.bind, *keys)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
            time.sleep(random.uniform(0.2, 1) * pause_s)
    return CollectorServer(config.bind, *keys)


def serve(server: CollectorServer, paths: RunPaths, store: RunStore, config: CollectorConfig) -> None:
    """Run to the end with the launch's pipe as stdin."""
    run_protocol = RunProtocol(paths.run_id, config.rdzv_id, on_hang=config.on_hang)
    run_protocol.ends_at_overflow = config.ends_at_overflow
    run_protocol.restore(store.messages(), 0.0)
    try:
        server.run(
            paths,
            store,
            run_protocol,
            run_protocol.launch_gone,
            end_fd=0,
            tell=lambda line: write_line(sys.stdout.buffer, line),
            folded=fold_store(store),
        )
    except ReportFailed:  # a restart would fail in the same way
        traceback.print_exc()
    finally:
        server.close()
        store.close()


def collect(
    bind: str,
    nodes: int,
    rdzv_id: str,
    secret: str,
    runs_dir: Path,
    max_frames: int,
    metrics: str | None,
    notify: Sequence[str],
    out: TextIO,
) -> int:
    """Serve one job without a launch: wait for its nodes, until Ctrl-C. Returns its exit code.

    Raises UsageError if an address or the folder is not available. `metrics` is the `HOST:PORT` for Prometheus,
    `notify` has addresses and commands (views/job_notifier.py).
    """
    keys = derive_keys(secret, rdzv_id)
    pairs = *keys.collector, keys.agent.public, *keys.viewer
    try:
        server = CollectorServer(bind, *(key.decode() for key in pairs))
    except zmq.ZMQError as error:
        raise UsageError(
            Code.ADDRESS_IN_USE, f"--bind: expected an address that is free, found {bind}: {error}"
        ) from error
    try:
        server.viewers.serve_metrics(metrics or "")
    except UsageError:
        server.close()
        raise
    if notify:
        server.viewers.notify_at(notify)
    try:
        paths = new_run(runs_dir.absolute())
        store = open_store(paths, max_frames)
    except (OSError, GpuwatchError) as error:
        server.close()
        raise UsageError(
            Code.NOT_WRITABLE,
            f"--runs-dir: expected a folder to write to, found {runs_dir}: {getattr(error, 'text', error)}",
        ) from error
    where = f"the report will be in {paths.folder}"
    print(f"gpuwatch: listening at {server.address} for {nodes} node(s); {where}", file=out)
    if server.viewers.metrics is not None:
        print(f"gpuwatch: Prometheus metrics are at {server.viewers.metrics.url}", file=out)
    out.flush()
    read_end, write_end = os.pipe()

    def end(number: int, frame: FrameType | None) -> None:
        os.write(write_end, b"x")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    run_protocol = RunProtocol(paths.run_id, rdzv_id, expected_nodes=nodes, by_hand=True)
    try:
        report = server.run(paths, store, run_protocol, run_protocol.end_now, read_end)
    finally:
        server.close()
        store.close()
    print(screen_text(report, again=False), file=out)
    return exit_code(report)
