"""What watches the ranks of a host that another host's launcher has brought into a run: `python -m` this, PATH.

    head:   gpuwatch run --other-hosts -- COMMAND --ssh, Ray, mpirun--> python train.py   (this host)
                                                                          | import torch
                                                                          `- this, the first time

Every Python there that imports torch, and has the run's variables, runs it. The first one becomes the host's watcher,
in the background: it has the scratch folder and the node agent. It stays as long as a rank runs here, or a process has
the variables while the run's command goes on. All others wait until the watcher has the folder ready. Each prints the
folder once ranks can be recorded there.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
from msgspec.structs import replace as with_fields

from ...core import host
from ...core.codes import Code, ExitCode, coded
from ...core.errors import GpuwatchError, UsageError
from ...core.guest.tell import tell
from ...core.host import host_name
from ...core.recorder.run_folder import JOIN_VARIABLE, write_settings
from ...core.settings import WorkerSettings
from ...core.wire.keys import RunInvitation, read_join, write_join
from ...core.wire.pipe import AgentConfig, LaunchDone
from ..agent.process_ends import GRACE_S, processes_with
from ..head_collector import first_that_answers
from ..helper_processes import NodeAgent
from ..life import JobLife, RankStarter
from ..option_types import bracketed
from ..plan import CollectorPlan, split_endpoint
from .run_ranks import HostRanks
from .tasks import HostTasks

_LOOK_S = 0.1
_ANY_LEFT_S = 1.0
_WELCOME_S = 10.0
"""How long the first rank waits for the collector's answer: a short job could end before it comes."""


def main() -> int:
    """Entry. Returns an exit code, and prints an error as one sentence on stderr."""
    try:
        path = Path(sys.argv[1])
        join = read_join(path)
        tasks = HostTasks(f"join {path} {host.host_name()}", 1)
        if tasks.is_owner:
            return _become_the_watcher(path, join, tasks)
        while (scratch := tasks.scratch()) is None and tasks.owner_lives():  # the watcher tells it
            time.sleep(_LOOK_S)
        tasks.close()
    except (GpuwatchError, OSError) as error:
        tell(str(error))
        return int(ExitCode.USAGE)
    return _answer(str(scratch or ""))


def _answer(scratch: str) -> int:
    if not scratch:
        tell(coded("the watcher of this host has ended", Code.AGENT_ENDED))
        return int(ExitCode.UNKNOWN)
    print(scratch, flush=True)
    return 0


def _become_the_watcher(path: Path, join: RunInvitation, tasks: HostTasks) -> int:
    """Become a process that is nobody's child: the process that imports torch may wait for all of its children."""
    told, tell = os.pipe()
    if os.fork():
        os.close(tell)
        with os.fdopen(told) as lines:
            scratch = lines.read()
        sys.stdout.flush()
        code = _answer(scratch)
        sys.stdout.flush()
        os._exit(code)
    os.close(told)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    def ready(scratch: Path) -> None:
        tasks.share_scratch(scratch)
        os.write(tell, str(scratch).encode())
        os.close(tell)

    try:
        with (path.parent / "logs" / f"joined-{host.host_name()}.log").open("a", buffering=1) as log:

            def say(sentence: str) -> None:
                log.write(f"{time.strftime('%H:%M:%S')} {sentence}\n")

            return JobLife(JoinedRanks(path, join, say, ready), join.meeting_key, say).run()
    finally:
        tasks.close()


class JoinedRanks(RankStarter):
    """What becomes a rank here until the run is over, or no process is left that has its variables."""

    def __init__(
        self, path: Path, join: RunInvitation, say: Callable[[str], object], ready: Callable[[Path], None]
    ) -> None:
        """`ready` is called with the scratch folder once ranks can be recorded there."""
        self._path = str(path)
        self._join = join
        self._say = say
        self._ready = ready
        self._stop = threading.Event()

    def run(self, life: JobLife) -> LaunchDone:
        """Run to the end of the last process here that has the variables, or of the run."""
        folder = str(life.scratch)
        self._ranks = HostRanks(life.scratch, life.send, lambda attempt, rank, code: None)
        write_settings(life.scratch, with_fields(self._join.settings, recorder_dir=folder))
        hello = with_fields(self._join.agent.hello, versions=host.versions(), job=None, starts_all=False)
        config = with_fields(
            self._join.agent, collector=self._address(), recorder_dir=folder, hello=hello, ends_ranks=False
        )
        agent = life.start_agent(config, self._end)
        agent.welcomed.wait(_WELCOME_S)
        self._ready(life.scratch)
        self._watch(agent)
        return LaunchDone("failed" if self._ranks.any_failed else "ok")

    def _address(self) -> str:
        keys, addresses = self._join.agent, self._join.addresses
        found = first_that_answers(addresses, keys.server_key, keys.public_key, keys.private_key)
        if found is None:
            self._say(coded(f"no collector answers at any of {', '.join(addresses)}", Code.COLLECTOR_ENDED))
        return found or addresses[0]

    def _watch(self, agent: NodeAgent) -> None:
        next_look = kill_at = 0.0
        while not agent.is_over:
            self._ranks.poll({})
            now = time.monotonic()
            if self._stop.wait(_LOOK_S):
                time.sleep(_LOOK_S)
                if not kill_at:
                    kill_at = now + GRACE_S
                    self._ranks.stopping = True
                    self._ranks.signal(signal.SIGTERM)
                elif now > kill_at:
                    self._ranks.signal(signal.SIGKILL)
            if now >= next_look:
                next_look = now + _ANY_LEFT_S
                # a process here may still become a rank of this run: none does once the command has ended
                if not self._ranks.running and not (
                    Path(self._path).exists() and any(processes_with(JOIN_VARIABLE, self._path.__eq__))
                ):
                    break
        self._ranks.last_look({})

    def _end(self, reason: str, restart: bool) -> None:
        self._say(f"stopping the ranks of this host: {reason}")
        self._stop.set()

    def close(self) -> None:
        """They go on by themselves."""
        self._ranks.close()


# `gpuwatch run --other-hosts`: a run of one host that others may join, once the command has brought them in.

_MOST_HOSTS = 100_000
_LINK_LOCAL = ("169.254.", "fe80:")


def open_plan(args: argparse.Namespace, plan: CollectorPlan) -> CollectorPlan:
    """The same, with a collector that listens on every address. Raises UsageError where it is not this run's alone."""
    if not plan.local:
        raise UsageError(
            Code.WRONG_TOGETHER,
            "--other-hosts: expected one gpuwatch run that has the collector, found --nnodes or --collector; "
            "leave out --other-hosts, and start gpuwatch run on each host",
        )
    port = str(args.collector_port) if args.collector_port is not None else "*"
    return replace(plan, max_nodes=_MOST_HOSTS, bind=f"tcp://*:{port}", starts_all=True)


def open_run(
    args: argparse.Namespace, folder: Path, address: str, agent: AgentConfig, settings: WorkerSettings, meeting_key: str
) -> Path:
    """Write the file by which others join. `address` is what the collector has bound. Raises OSError."""
    port = address.rpartition(":")[2]
    hosts = [split_endpoint(args.head, 0)[0]] if args.head is not None else [host_name(), *_addresses()]
    return write_join(
        folder, RunInvitation([f"tcp://{bracketed(host)}:{port}" for host in hosts], agent, settings, meeting_key)
    )


def close_run(join: Path) -> None:
    """Nobody joins any more."""
    with suppress(OSError):
        join.unlink()


def _addresses() -> list[str]:
    """This host's, as others may reach it: IPv4 first."""
    entries = [entry for name, found in psutil.net_if_addrs().items() if name != "lo" for entry in found]
    entries = [entry for entry in entries if not entry.address.startswith(_LINK_LOCAL)]
    families = (socket.AF_INET, socket.AF_INET6)
    return [entry.address for family in families for entry in entries if entry.family == family]
