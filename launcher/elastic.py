"""torchrun's own elastic agent, with three places where gpuwatch listens in.

`torch.distributed.launcher.api.launch_agent` builds the agent, handles its signals and formats its errors; it finds
the agent's class by a name in its module. For the time of one launch that name means a subclass which reports when
the ranks start and end, which does not restart what gpuwatch itself has stopped, and which ends no rank that is yet to
say where its overflow was made. (torch 2.5 to 2.15)
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from threading import Event
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import psutil
from msgspec.structs import replace
from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server import api as agent_api
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher import api as launcher_api

from ..core.codes import RANK_OVERFLOW, Code, coded
from ..core.errors import UsageError
from ..core.guest.own_imports import OWN_START
from ..core.guest.tell import say
from ..core.host import host_name
from ..core.settings import VARIABLE, WorkerSettings
from ..core.signal_errors import from_outside, suppress_own
from ..core.text import error_text, ranks_text
from ..core.wire.pipe import LaunchDone
from .agent.process_ends import GRACE_S

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

# Which attempt this is, agreed by all nodes of a rendezvous.
#
# torchrun's own restart count is local to a node: the node whose worker failed counts up, the others see a change of
# membership and do not. So every node puts the number of its own starts into the rendezvous' store and takes the
# largest, which is also what the next start counts from. On the occasion they tell each other their hosts, so that a
# rank that never arrives can be given a place.


def agree_on_attempt(
    store: Store,
    starts: int,
    node: int,
    num_nodes: int,
    *,
    host: str = "",
    prefix: str = "round",
    timeout_s: float = 60.0,
) -> tuple[int, str, list[str]]:
    """(attempt, name of the round, hosts of all nodes), the same on all nodes.

    `starts` is how often this node has started its ranks.

    `prefix` tells rounds apart where the store does not: torchrun's c10d backend gives every round a store of its
    own, its static backend one for the whole job. Raises what the store raises when a node does not answer in time.
    """
    prefix = f"gpuwatch/{prefix}"
    store.set(f"{prefix}/starts/{node}", f"{starts} {host}")
    keys = [f"{prefix}/starts/{other}" for other in range(num_nodes)]
    store.wait(keys, timedelta(seconds=timeout_s))
    told = [store.get(key).decode().split(" ", 1) for key in keys]
    attempt = max(int(number) for number, _ in told)
    name = store.compare_set(f"{prefix}/name", "", uuid.uuid4().hex[:12]).decode()
    return attempt, f"{name}-{attempt}", [host for _, host in told]


# Clears what the process groups of an earlier attempt left in torchrun's store.
#
# torchrun's agent keeps one store over elastic restarts (torch 2.13 still), so the ranks of a new attempt can read the
# addresses of the old ones and then wait for each other until the process group's timeout, which is half an hour.

_GROUP_KEYS = "default_pg/"
_TIMEOUT = timedelta(seconds=20)


def purge_group_keys(master_addr: str, master_port: int) -> int:
    """Delete the keys of process groups that have ended; returns how many.

    To be called when no rank of any node runs. Raises what the store raises when it cannot be reached. A torch whose
    store cannot list its keys (2.5) keeps them.
    """
    import torch.distributed as dist

    store: Any = dist.TCPStore(  # type: ignore[attr-defined]  # torch re-exports it without saying so
        master_addr, master_port, world_size=None, is_master=False, timeout=_TIMEOUT, wait_for_workers=False
    )
    if not hasattr(store, "list_keys"):
        return 0
    stale = [key for key in store.list_keys() if key.removeprefix("/").startswith(_GROUP_KEYS)]
    for key in stale:
        store.delete_key(key.removeprefix("/"))
    return len(stale)


def _purge_together(worker_group: Any, attempt: int) -> None:
    """Every node has reached this call, so no rank runs: the first node clears the store, the others wait."""
    done = f"gpuwatch/purged/{attempt}"
    try:
        if worker_group.group_rank != 0:
            worker_group.store.wait([done], timedelta(seconds=30))
            return
        try:
            purge_group_keys(worker_group.master_addr, worker_group.master_port)
        finally:
            worker_group.store.set(done, "1")
    except Exception as error:
        if from_outside(error):
            raise
        text = f"the store of the last attempt could not be cleared ({type(error).__name__}: {error})"
        say(coded(text, Code.NO_RENDEZVOUS))


class RankListener(Protocol):
    """What is told of the ranks that torchrun starts here, and decides on them: TorchrunRanks of launch_job.py."""

    settings: WorkerSettings
    """Those of the next attempt's workers."""
    any_started: bool
    job_is_over: Event
    attempt_is_over: Event

    @property
    def saw_overflow(self) -> bool:
        """Whether a rank of this node has recorded one."""

    def started(self, settings: WorkerSettings, pids: dict[int, int]) -> None:
        """The ranks of an attempt were started with these settings: rank -> process id."""

    def ended(self, attempt: int, codes: dict[int, int | None], failed: list[int]) -> None:
        """They have ended: rank -> exit code, and the ranks that failed first."""

    def is_waited_for(self, attempt: int, running: list[int]) -> bool:
        """Whether a rank has failed, and the others get time for their own record."""

    def are_stopped(self, attempt: int, codes: dict[int, int | None]) -> None:
        """torchrun stops those that still run, whose code is None."""

    def may_restart(self, attempt: int, ranks: list[int]) -> bool:
        """Whether torchrun may start the ranks again."""


WORKER = (OWN_START, "-mgpuwatch.worker")
"""Words with a dash, so that torchrun takes the script for the entry point's name and its messages stay as they are."""


class WatchedElasticAgent(launcher_api.LocalElasticAgent):  # type: ignore[name-defined,misc]  # not exported
    """See the module's docstring. `listener` gets the events of this node's ranks, and decides on them."""

    def __init__(self, listener: RankListener, backend: str, **torchruns: Any) -> None:
        super().__init__(**torchruns)
        self._gpuwatch_listener = listener
        self._gpuwatch_backend = backend
        self._gpuwatch_starts = 0
        self._gpuwatch_attempt = 0
        self._gpuwatch_failed: list[int] = []
        self._gpuwatch_has_overflowed = False
        self._gpuwatch_running = False
        self._gpuwatch_told_to_stop = False
        self._gpuwatch_was_looked_at = False

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        settings = self._gpuwatch_agree(worker_group)
        self._gpuwatch_attempt = settings.attempt
        os.environ[VARIABLE] = settings.to_json()
        known = _children()
        try:
            pids: dict[int, Any] = super()._start_workers(worker_group)
        except BaseException:  # a signal: torchrun forgets the ranks that it had started until then
            _end_ranks([child for pid, child in _children().items() if pid not in known])
            raise
        finally:
            os.environ.pop(VARIABLE, None)
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        self._gpuwatch_failed = []
        self._gpuwatch_running = True
        self._gpuwatch_told_to_stop = False
        self._gpuwatch_was_looked_at = False
        self._gpuwatch_listener.started(settings, {ranks[local]: pid for local, pid in pids.items()})
        return pids

    def _gpuwatch_agree(self, worker_group: Any) -> WorkerSettings:
        settings = self._gpuwatch_listener.settings
        restarts = worker_group.spec.max_restarts - self._remaining_restarts
        attempt, name = self._gpuwatch_starts, f"{os.getpid()}-{self._gpuwatch_starts}"
        hosts = [host_name()]
        if worker_group.group_world_size > 1:
            try:
                attempt, name, hosts = agree_on_attempt(
                    worker_group.store,
                    self._gpuwatch_starts,
                    worker_group.group_rank,
                    worker_group.group_world_size,
                    host=host_name(),
                    prefix=str(restarts) if self._gpuwatch_backend == "static" else "round",
                )
            except Exception as error:
                if settings.check_only or from_outside(error):
                    raise
                text = f"the nodes could not agree on this attempt ({error}); training without preflight"
                say(coded(text, Code.NO_RENDEZVOUS))
                settings = replace(settings, preflight="off")
        if attempt:
            _purge_together(worker_group, attempt)
        self._gpuwatch_starts = attempt + 1
        overflowed = self._gpuwatch_has_overflowed
        return replace(settings, attempt=attempt, round=name, node_hosts=hosts, after_overflow=overflowed)

    def _monitor_workers(self, worker_group: Any) -> Any:
        # the ranks end where the job cannot go on elsewhere, or this attempt stands still: then they may start again
        job_is_over = self._gpuwatch_listener.job_is_over.is_set()
        if job_is_over:
            self._remaining_restarts = 0
        if (job_is_over or self._gpuwatch_listener.attempt_is_over.is_set()) and not self._gpuwatch_told_to_stop:
            self._gpuwatch_look(worker_group)  # the ranks of another node have failed
            self._gpuwatch_told_to_stop = True
            for pid in self._pcontext.pids().values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        # torchrun's own list of failures also holds those that it stopped
        codes = self._gpuwatch_codes(worker_group)
        failed = [rank for rank, code in codes.items() if code]
        running = [rank for rank, code in codes.items() if code is None]
        waits = bool(failed) and not self._gpuwatch_told_to_stop
        if waits and self._gpuwatch_listener.is_waited_for(self._gpuwatch_attempt, running):
            return agent_api.RunResult(state=agent_api.WorkerState.HEALTHY)
        if failed:
            self._gpuwatch_look(worker_group)  # torchrun stops the others
            failed = [rank for rank, code in self._gpuwatch_codes(worker_group).items() if code]
        result = super()._monitor_workers(worker_group)
        if result.state in (agent_api.WorkerState.FAILED, agent_api.WorkerState.UNHEALTHY):
            if self._gpuwatch_told_to_stop:
                failed = []
            elif not failed:  # one failed between the two looks
                found = result.failures
                own = [rank for rank, failure in found.items() if failure.exitcode != -signal.SIGTERM]
                failed = own or (list(found) if len(found) == 1 else [])  # torchrun sends SIGTERM, too
            self._gpuwatch_failed = failed
            ranks = [worker.global_rank for worker in worker_group.workers]
            if not self._gpuwatch_listener.may_restart(self._gpuwatch_attempt, ranks):
                self._remaining_restarts = 0
        elif result.state is agent_api.WorkerState.SUCCEEDED:
            self._gpuwatch_ended(worker_group)
        return result

    def _stop_workers(self, worker_group: Any, *args: Any, **kwargs: Any) -> None:
        self._gpuwatch_look(worker_group)  # another node has failed
        super()._stop_workers(worker_group, *args, **kwargs)
        self._gpuwatch_ended(worker_group)

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        self._gpuwatch_look(self._worker_group)  # a signal has come
        super()._shutdown(*args, **kwargs)
        self._gpuwatch_ended(self._worker_group)

    def _gpuwatch_codes(self, worker_group: Any) -> dict[int, int | None]:
        """rank -> exit code, None while it runs"""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        return {ranks[local_rank]: handler.proc.poll() for local_rank, handler in handlers.items()}

    def _gpuwatch_look(self, worker_group: Any) -> None:
        """Tell that the ranks will be stopped, once for each start."""
        if self._gpuwatch_running and not self._gpuwatch_was_looked_at and self._pcontext is not None:
            self._gpuwatch_was_looked_at = True
            with suppress_own(Exception):  # a look is no reason to end a launch
                self._gpuwatch_listener.are_stopped(self._gpuwatch_attempt, self._gpuwatch_codes(worker_group))

    def _gpuwatch_ended(self, worker_group: Any) -> None:
        if self._gpuwatch_running and self._pcontext is not None:
            self._gpuwatch_running = False
            codes = self._gpuwatch_codes(worker_group)
            self._gpuwatch_has_overflowed |= RANK_OVERFLOW in codes.values()
            self._gpuwatch_listener.ended(self._gpuwatch_attempt, codes, self._gpuwatch_failed)


def _children() -> dict[int, psutil.Process]:
    """The processes that this one has started, by their ids; {} where nothing tells of them."""
    with suppress(psutil.Error, OSError):
        return {child.pid: child for child in psutil.Process().children()}
    return {}


def _end_ranks(ranks: list[psutil.Process]) -> None:
    """First in a way that they can hear."""
    try:
        for rank in ranks:
            with suppress(psutil.Error):
                rank.terminate()
        psutil.wait_procs(ranks, GRACE_S)
    finally:  # a second signal, too
        for rank in ranks:
            with suppress(psutil.Error):
                rank.kill()


@contextmanager
def _patched(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def worker_command(cmd: Any, cmd_args: list[str], args: argparse.Namespace) -> tuple[str, list[str]]:
    """The command of torchrun, with our worker in front of the script."""
    python = os.getenv("PYTHON_EXEC", sys.executable)
    if args.run_path:  # torchrun calls a function that runs the script; our worker is such a one
        return python, ["-u", *WORKER, *cmd_args]
    if args.no_python:
        return python, ["-u", *WORKER, "--exec", cmd, *cmd_args]
    return cmd, [cmd_args[0], *WORKER, *cmd_args[1:]]


@record
def run_torchrun(args: argparse.Namespace, listener: RankListener) -> None:
    """What `torchrun` runs, with the worker in front of the script. Raises what torchrun raises."""
    make_config = torchrun.config_from_args

    def config_with_worker(parsed: argparse.Namespace) -> tuple[Any, Any, list[str]]:
        config, cmd, cmd_args = make_config(parsed)
        return config, *worker_command(cmd, cmd_args, parsed)

    agent = partial(WatchedElasticAgent, listener, args.rdzv_backend)
    with _patched(torchrun, "config_from_args", config_with_worker):
        with _patched(launcher_api, "LocalElasticAgent", agent):
            torchrun.run(args)  # type: ignore[no-untyped-call]  # torch has no annotation there


def run_to_its_end(args: argparse.Namespace, listener: RankListener) -> LaunchDone:
    """Run torchrun; what it raises is printed as it prints it. Raises UsageError where it takes the options for wrong,
    and what signals raise."""
    try:
        run_torchrun(args, listener)
    except SignalException:
        raise
    except ChildFailedError as error:
        ended = sorted(rank for rank, failure in error.failures.items() if failure.exitcode == RANK_OVERFLOW)
        if ended and listener.saw_overflow:  # its block names whom it saw first, often a rank that only followed
            text = f"torchrun saw {ranks_text(ended)} end with {RANK_OVERFLOW}, as gpuwatch ends a rank at its overflow"
            say(coded(text, Code.OVERFLOW))
        elif not args.check_only:  # with it no script runs, and the report names the failure
            traceback.print_exception(type(error), error, _torch_frames(error.__traceback__))
        return LaunchDone("failed")
    except (ValueError, AssertionError) as error:
        if not listener.any_started:
            raise UsageError(Code.WRONG_TOGETHER, f"torchrun rejected these options: {error}") from error
        traceback.print_exc()
        return LaunchDone("failed")
    except Exception as error:
        if from_outside(error):
            raise
        if args.check_only and isinstance(error, RendezvousError | DistError):
            text = f"torchrun's rendezvous failed: {type(error).__name__}: {error}".rstrip(": ")
            say(coded(text, Code.NO_RENDEZVOUS))
        else:
            traceback.print_exc()
        return LaunchDone("failed", error=error_text(error))
    return LaunchDone("ok")


def _torch_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from torch's first frame on: what torchrun itself would print."""
    first = trace
    while first is not None and "torch" not in first.tb_frame.f_globals.get("__name__", "").split("."):
        first = first.tb_next
    return first or trace
