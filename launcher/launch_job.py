"""`gpuwatch launch` and `gpuwatch check` from their options to their exit codes.

torch is imported once the options are right, and while the collector starts.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import socket
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import psutil

from ..core.errors import ExitCode, UsageError
from ..core.host import loopback
from ..core.recorder.layout import file_name
from ..core.recorder.reader import NotReady, RecorderReader
from ..core.recorder.run_folder import RUN_VARIABLE, write_meeting_key
from ..core.recorder.scratch import KEPT_ATTEMPTS, keep_rescued, make_scratch, remove_scratch
from ..core.tell import flush_streams, tell
from ..core.threads import OneThread
from ..core.wire.keys import JobKeys, meeting_key
from ..core.wire.pipe import JobResult, LaunchDone, PreflightOver, StageLine, WorkersEnded, WorkersStarted
from .helpers import JobServices
from .live_lines import live_lines
from .option_types import is_number, parse_nnodes
from .options import check_together, get_check_parser, get_parser, worker_settings
from .plan import CollectorPlan, job_keys, limit_rendezvous, make_plan
from .say import PATIENCE_S as PATIENCE_LEFT_BEHIND_S
from .say import SeenOverflows, say, tell_left_behind, tell_of_torch, where_it_is
from .schedulers.environment import read_job
from .schedulers.fill_in import fill_in, given_options
from .schedulers.job import SchedulerFacts
from .signals import TimeLimitNear, signal_exceptions, signals_raise
from .stuck import PATIENCE_S, watch_torchrun

# What is found out before a launch starts anything: what is wrong in its options and its ranks.

_NAME_WAIT_S = 30.0
"""A node that was started for this job may be in the name service some seconds later."""


def fill_in_from_job(
    args: argparse.Namespace, parser: argparse.ArgumentParser, arguments: list[str]
) -> SchedulerFacts | None:
    """Complete the options from the job that this launch is part of, and say what came out. Returns the job, if any.

    `parser` is of no use afterwards, see `given_options`.
    """
    job = read_job(os.environ)
    if job is None:
        return None
    meets_there = fill_in(args, given_options(parser, arguments, os.environ), job, _count_gpus)
    if job.scheduler is not None and meets_there:
        assert job.head is not None
        if job.node_rank == 0:
            nodes = parse_nnodes(args.nnodes)[1]
            say(f"{job.name}: {nodes} nodes meet at {args.rdzv_endpoint or job.head}")
        expect_address(job.head, _NAME_WAIT_S)
    return job


def _count_gpus() -> int:
    import torch  # a scheduler has not said how many

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def expect_address(host: str, limit_s: float) -> None:
    """The name of the job's head must mean something here, soon. Raises UsageError if it does not."""
    ends = time.monotonic() + limit_s
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except socket.gaierror as error:
            if time.monotonic() >= ends:
                raise UsageError(
                    f"expected the name of the job's first node, {host!r}, to have an address on "
                    f"{socket.gethostname()}, found none ({error.strerror}); pass --rdzv-endpoint HOST:PORT with an "
                    "address that every node can reach, the same on every node"
                ) from error
        time.sleep(1)


def expect_script(args: argparse.Namespace) -> None:
    """What torchrun would only find out later, said in one sentence."""
    if args.no_python and args.module:
        raise UsageError("expected one of --no-python and -m/--module, found both; drop one of them")
    if not args.module and not args.no_python and not Path(args.training_script).exists():
        raise UsageError(f"expected a script to run, found no file {args.training_script!r} in {Path.cwd()}")


def _local_world_size(text: str) -> int:
    if is_number(text):
        return int(text)
    from torch.distributed.run import determine_local_world_size  # it counts GPUs

    return int(determine_local_world_size(text))


def number_of_ranks(args: argparse.Namespace) -> int:
    """Of this node."""
    if args.max_restarts < 0:
        raise UsageError(f"--max-restarts: expected 0 or more, found {args.max_restarts}")
    try:
        nproc = _local_world_size(str(args.nproc_per_node))
    except ValueError as error:
        raise UsageError(
            f"--nproc-per-node: expected a number, cpu, gpu or auto, found {args.nproc_per_node!r} ({error})"
        ) from error
    if nproc < 1:
        raise UsageError(f"--nproc-per-node: expected 1 or more, found {nproc}")
    return nproc


def launch(arguments: list[str]) -> int:
    """Run a job. Returns the exit code; raises UsageError when the options cannot work."""
    if os.environ.get(RUN_VARIABLE):
        raise UsageError(
            "expected gpuwatch launch outside of gpuwatch run, found one inside the other, and both would watch the "
            "ranks; write gpuwatch launch alone, or gpuwatch run -- torchrun with the same arguments"
        )
    parser = get_parser()
    args = parser.parse_args(arguments)
    job = fill_in_from_job(args, parser, arguments)
    plan = make_plan(args, _is_this_host, loopback())
    expect_script(args)
    check_together(args)
    return _run(args, plan, ["gpuwatch", "launch", *arguments], job)


def check(arguments: list[str]) -> int:
    """Run the preflight of a job, and nothing after it. Returns the exit code; raises UsageError as `launch` does."""
    parser = get_check_parser()
    args = parser.parse_args(arguments)
    job = fill_in_from_job(args, parser, arguments)
    plan = make_plan(args, _is_this_host, loopback())
    args.max_restarts = 0
    limit_rendezvous(args)
    logging.getLogger("torch.distributed.elastic.multiprocessing").setLevel(logging.CRITICAL)  # `failed (exitcode: 3)`
    return _run(args, plan, ["gpuwatch", "check", *arguments], job)


def _is_this_host(host: str) -> bool:
    """As torchrun decides it."""
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

    return _matches_machine_hostname(host)


def _run(args: argparse.Namespace, plan: CollectorPlan, command: list[str], job: SchedulerFacts | None) -> int:
    nproc = number_of_ranks(args)
    keys = job_keys(args, plan)
    with signals_raise() as signals:
        return _TorchrunLaunch(args, plan, keys, nproc, command, job, signals).run()


class _TorchrunLaunch:
    """One launch: its children, and what torchrun tells it (see elastic.Listener)."""

    def __init__(
        self,
        args: argparse.Namespace,
        plan: CollectorPlan,
        keys: JobKeys,
        nproc: int,
        command: list[str],
        job: SchedulerFacts | None,
        signals: signals_raise,
    ) -> None:
        self._signals = signals
        self._args = args
        self._plan = plan
        self._nproc = nproc
        self._job = job
        self._helpers = JobServices(args, plan, keys, nproc, command, job)
        self._meeting_key = meeting_key(keys)
        self._stop = threading.Event()
        self._end_attempt = threading.Event()
        self._any_started = False
        self._ranks: list[psutil.Process] = []
        self._unseen: list[psutil.Process] = []
        self._finishing = threading.Lock()
        self._live = live_lines(check_only=args.check_only)
        signals.unheard = self._leave_for_signal

    def run(self) -> int:
        """Children up, torchrun, children down, exit code."""
        attempts = 1 + min(self._args.max_restarts, KEPT_ATTEMPTS)
        self._scratch = make_scratch(self._nproc * attempts, say)
        self._overflows = SeenOverflows(self._scratch)
        try:
            outcome = self._until_it_ends()
            with self._finishing:
                return self._finish(outcome)
        finally:
            _ignore_signals()  # from here on it is a matter of seconds, and must be done
            self._clear_up()

    def _until_it_ends(self) -> LaunchDone:
        """Children up, and torchrun to its end. A signal ends both, and is told to the collector in every case."""
        try:
            with self._signals.held():  # an early one is in the report, too, and leaves no child behind
                address = self._start_collector()
                run_dir = self._helpers.run_dir
                logs = run_dir / "logs" if run_dir is not None else self._scratch
                self.settings = worker_settings(self._args, self._scratch, logs)
                with suppress(OSError):  # the ranks meet, and seal nothing
                    write_meeting_key(self._scratch, self._meeting_key)
                self._helpers.start_agent(address, self._scratch, self._stop_ranks)
            say(self._what_runs())
            tell_of_torch()
            return self._run_torchrun()
        except TimeLimitNear:
            return LaunchDone("signal", int(signal.SIGUSR2))
        except signal_exceptions() as error:
            return LaunchDone("signal", int(error.sigval))  # type: ignore[attr-defined]  # all of them have it
        except KeyboardInterrupt:
            return LaunchDone("signal", int(signal.SIGINT))

    def _start_collector(self) -> str:
        """And import torch meanwhile. Returns the collector's address."""
        beside = OneThread()
        address = beside.submit(lambda: self._helpers.start_collector(self._scratch, self._show))
        beside.close()
        from . import elastic  # noqa: F401  # imports torch

        return address.result()

    def _clear_up(self) -> None:
        self._live.close()
        self._kill_ranks()
        with suppress(Exception):  # it is only told
            tell_left_behind(self._scratch, say, 0.0 if self._helpers.hurry else PATIENCE_LEFT_BEHIND_S)
        self._helpers.end()
        keep_rescued(self._scratch, say)
        remove_scratch(self._scratch)

    def _leave_torchrun(self) -> None:
        """In a thread of its own, as torchrun does not come back."""
        say("the ranks of this node have ended, but torchrun waits for a rendezvous that is silent: leaving it")
        self._leave(LaunchDone("failed"), int(ExitCode.SCRIPT_FAILED))

    def _leave_for_signal(self, number: signal.Signals) -> None:
        """In a thread of its own, as torch does not come back, and Python hears no signal before it does."""
        if self._helpers.agent_started:  # else there is nobody to tell
            self._leave(LaunchDone("signal", int(number)), int(ExitCode.SIGNAL) + number)

    def _leave(self, done: LaunchDone, code: int) -> None:
        """All that is left to do, and the end."""
        with self._finishing:
            try:
                code = self._finish(done)
                self._clear_up()
            finally:
                flush_streams()
                os._exit(code)

    def _what_runs(self) -> str:
        args = self._args
        if args.check_only:
            ranks = f"{self._nproc} rank{'s' if self._nproc != 1 else ''}"
            return (
                f"checking {ranks} on each of {args.nnodes} nodes" if self._plan.max_nodes > 1 else f"checking {ranks}"
            )
        return f"running under torchrun: {shlex.join([args.training_script, *args.training_script_args])}"

    # -- the children -------------------------------------------------------------------------------------------

    def _show(self, line: StageLine | PreflightOver) -> None:
        """A line of the preflight."""
        if isinstance(line, StageLine):
            self._live.show(line)
        else:
            self._live.over(line)

    def _stop_ranks(self, reason: str, restart: bool) -> None:
        say(f"stopping the ranks of this node: {reason}")
        if restart:
            self._end_attempt.set()
        else:
            self._stop.set()

    def _kill_ranks(self) -> None:
        """Only after a second signal has torn torchrun out of its own shutdown is there anything to do."""
        for rank in self._ranks:
            try:
                rank.kill()
            except psutil.Error:
                pass

    # -- torchrun -----------------------------------------------------------------------------------------------

    def _run_torchrun(self) -> LaunchDone:
        """Run it to its end."""
        watch_torchrun(lambda: self._unseen, self._leave_torchrun, PATIENCE_S + 2 * self._args.monitor_interval)
        from .elastic import run_to_its_end

        return run_to_its_end(self._args, self, lambda: self._any_started)

    def started(self, attempt: int, pids: dict[int, int], local_ranks: dict[int, int]) -> None:
        """The ranks of this node run."""
        self._any_started = True
        self._end_attempt.clear()
        self._unseen = []
        for pid in pids.values():
            try:
                self._unseen.append(psutil.Process(pid))
            except psutil.Error:
                pass
        self._ranks += self._unseen
        self._tell(WorkersStarted(attempt, pids, local_ranks))

    def ended(self, attempt: int, codes: dict[int, int | None], failed: list[int]) -> None:
        """The ranks of this node have ended."""
        self._unseen = []
        self._overflows.look(attempt, codes)
        self._tell(WorkersEnded(attempt, codes, failed))

    def notice(self, text: str) -> None:
        """One sentence for the user."""
        say(text)

    def stop_requested(self) -> bool:
        """The job cannot go on elsewhere."""
        return self._stop.is_set()

    def attempt_is_over(self) -> bool:
        """The ranks stand still."""
        return self._end_attempt.is_set()

    def may_restart(self, attempt: int, ranks: list[int]) -> bool:
        """Not after an abort: the same overflow, or the same bad GPU, would only be met again."""
        return not any(_aborted(self._scratch / file_name(rank, attempt)) for rank in ranks)

    def _tell(self, message: msgspec.Struct) -> None:
        self._helpers.tell(message)

    # -- the end ------------------------------------------------------------------------------------------------

    def _finish(self, done: LaunchDone) -> int:
        """Wait for the verdict, print it, and say what to exit with."""
        # a scheduler repeats them, and once a node has ended ends the others
        _ignore_signals(signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
        if done.outcome == "signal":
            say(f"got {signal.Signals(done.signal).name}; writing the report (Ctrl-C: leave at once)")
            done = self._with_reason(done)
        self._tell(done)
        fallback = {"ok": int(ExitCode.UNKNOWN), "failed": int(ExitCode.SCRIPT_FAILED)}.get(
            done.outcome, int(ExitCode.SIGNAL) + done.signal
        )
        if not self._helpers.agent_started:  # a second signal came before it was
            self._helpers.hurry = True
            return fallback
        try:
            self._helpers.wait()
        except signal_exceptions(KeyboardInterrupt):
            if self._helpers.verdict is None:
                self._helpers.hurry = True
                return self._exit_code(fallback, "unknown")
        _ignore_signals()  # srun ends all others as soon as the first node has left with the answer that all have
        self._live.close()
        verdict = self._helpers.verdict
        if verdict is None:
            say("no verdict: the node agent ended without one")
            return self._exit_code(fallback, "unknown")
        self._print(verdict)
        return self._exit_code(verdict.exit_code, verdict.kind)

    def _with_reason(self, done: LaunchDone) -> LaunchDone:
        """With the scheduler's own word for a SIGTERM of its; one node is enough to ask."""
        if not self._plan.hosts or done.signal != signal.SIGTERM:
            return done
        if self._job is None or self._job.scheduler is None:
            return done
        end = self._job.scheduler.why_it_ends(self._job)
        return msgspec.structs.replace(done, reason=end.reason, down_nodes=list(end.down_nodes), told_by=end.told_by)

    def _exit_code(self, code: int, kind: str) -> int:
        """What a rank has said itself counts more than a verdict that knows nothing of it.

        A check has no script that could fail by itself: whatever went wrong, it has failed.
        """
        own = self._overflows.sentence
        if own and kind not in ("overflow", "preflight") and code < ExitCode.SIGNAL:
            say(f"{own}; {where_it_is(self._helpers.verdict)}")
            return int(ExitCode.OVERFLOW)
        failed = self._args.check_only and ExitCode.CLEAN < code < ExitCode.SIGNAL
        return int(ExitCode.PREFLIGHT_FAILED) if failed else code

    def _print(self, verdict: JobResult) -> None:
        """The report: beside the script's output on stderr, or as the answer of a check on stdout."""
        job = self._job
        if job is not None and job.scheduler is not None and job.in_step and job.node_rank:
            return  # a scheduler puts the output of all nodes into one file: once is enough
        if not self._args.check_only:
            tell(verdict.text)
        elif self._args.format == "text":
            print(verdict.text, flush=True)
        elif (
            self._helpers.run_dir is not None or self._args.collector is not None
        ):  # of several nodes one: for one reader
            try:
                print(Path(verdict.report).read_text(encoding="utf-8"), flush=True)
            except OSError:
                tell(verdict.text)


def _ignore_signals(*numbers: signal.Signals) -> None:
    """These, or by default all that end a launch. Beside a torchrun that does not come back, nobody can: it stays."""
    if threading.current_thread() is threading.main_thread():
        for number in numbers or (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)


def _aborted(recorder: Path) -> bool:
    with suppress(OSError, NotReady), closing(RecorderReader(recorder)) as reader:
        return reader.abort > 0
    return False
