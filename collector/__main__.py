"""The collector as a child of a launch: settings on the first line of stdin, JSON lines on stdout."""

from __future__ import annotations

import random
import signal
import sys
import time
from pathlib import Path

import zmq

from ..core.exits import ExitCode
from ..core.pipe import Bound, CannotBind, CollectorConfig, read_config, write_line
from .finish import open_store
from .paths import RunPaths, new_run
from .run_protocol import RunProtocol
from .server import Server
from .store import RunStore


def main() -> int:
    """Entry of `python -m gpuwatch.collector`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # it ends after the job, when the report is written
    config = read_config(0, CollectorConfig)
    if config is None:
        return int(ExitCode.USAGE)
    try:
        server = listen(config)
    except zmq.ZMQError as error:
        write_line(sys.stdout.buffer, CannotBind(error.errno == zmq.EADDRINUSE, str(error)))
        return int(ExitCode.USAGE)
    try:
        paths = new_run(Path(config.runs_dir), config.run_name)
        store = open_store(paths, config.max_frames)
    except OSError as error:
        write_line(sys.stdout.buffer, CannotBind(False, f"no folder for the run: {error}"))
        server.close()
        return int(ExitCode.USAGE)
    write_line(sys.stdout.buffer, Bound(server.address, str(paths.folder)))
    sys.stderr = (paths.logs / "collector.log").open("a", buffering=1)
    serve(server, paths, store, config.rdzv_id)
    return 0


def listen(config: CollectorConfig) -> Server:
    """Bind. Raises zmq.ZMQError when the address cannot be had.

    If two nodes on one host start their collectors at once, Linux can refuse both. So a refusal counts only after
    retries with pauses of random length.
    """
    for pause_s in (0.05, 0.1, 0.2, 0.4):
        try:
            return Server(config.bind, config.public_key, config.private_key, config.agent_public_key)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
            time.sleep(random.uniform(0.2, 1) * pause_s)
    return Server(config.bind, config.public_key, config.private_key, config.agent_public_key)


def serve(server: Server, paths: RunPaths, store: RunStore, rdzv_id: str) -> None:
    """Run to the end with the launch's pipe as stdin."""
    run_protocol = RunProtocol(paths.run_id, str(paths.folder), rdzv_id)
    try:
        server.run(
            paths,
            store,
            run_protocol,
            run_protocol.launch_gone,
            end_fd=0,
            tell=lambda line: write_line(sys.stdout.buffer, line),
        )
    finally:
        server.close()
        store.close()


if __name__ == "__main__":
    sys.exit(main())
