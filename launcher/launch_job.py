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

from ..core.codes import RANK_OVERFLOW, Code, ExitCode, coded
from ..core.errors import UsageError
from ..core.events.alarm_evidence import SECOND_RUN_S
from ..core.guest.tell import flush_streams, say, tell
from ..core.guest.threads import OneThread
from ..core.host import loopback
from ..core.recorder.layout import file_name
from ..core.recorder.reader import NotReady, RecorderReader
from ..core.recorder.run_folder import KEPT_ATTEMPTS, RUN_VARIABLE
from ..core.secrets import masked_command
from ..core.settings import WorkerSettings
from ..core.wire.keys import meeting_key
from ..core.wire.pipe import JobResult, LastLook, LaunchDone, WorkersEnded, WorkersStarted
from .agent.last_looks import last_looks
from .agent.process_ends import PATIENCE_LEFT_BEHIND_S, tell_left_behind
from .expect import expect_place, expect_program, expect_room, expect_script, number_of_ranks
from .fill_in import fill_in_from_job
from .life import JobLife, JobTerms, RankStarter, say_signal, tell_of_torch
from .live_lines import live_lines
from .option_tables import worker_settings
from .options import get_check_parser, get_parser, parse_check, parse_launch
from .plan import CollectorPlan, job_keys, limit_rendezvous, make_plan
from .scheduler_job import SchedulerFacts
from .signals import STUCK_S, TimeLimitNear, signal_exceptions, signals_raise, watch_torchrun


def launch(arguments: list[str]) -> int:
    """Run a job. Returns the exit code; raises UsageError when the options cannot work."""
    if os.environ.get(RUN_VARIABLE):
        raise UsageError(
            Code.NESTED_RUN,
            "expected gpuwatch launch outside of gpuwatch run, found one inside the other, and both would watch the "
            "ranks; write gpuwatch launch alone, or gpuwatch run -- torchrun with the same arguments",
        )
    args = parse_launch(arguments)
    job = fill_in_from_job(args, get_parser, arguments)
    plan = make_plan(args, _is_this_host, loopback())
    expect_script(args)
    expect_program(args)
    expect_place(args, plan)
    return _run(args, plan, ["gpuwatch", "launch", *arguments], job, number_of_ranks(args))


def check(arguments: list[str]) -> int:
    """Run the preflight of a job, and nothing after it. Returns the exit code; raises UsageError as `launch` does."""
    args = parse_check(arguments)
    job = fill_in_from_job(args, get_check_parser, arguments)
    plan = make_plan(args, _is_this_host, loopback())
    expect_place(args, plan)
    nproc = number_of_ranks(args)
    if not args.force:
        expect_room(nproc)
    args.max_restarts = 0
    limit_rendezvous(args)
    logging.getLogger("torch.distributed.elastic.multiprocessing").setLevel(logging.CRITICAL)  # `failed (exitcode: 3)`
    return _run(args, plan, ["gpuwatch", "check", *arguments], job, nproc)


def _tell_of_unknown_host(plan: CollectorPlan) -> None:
    """Say at once that the rendezvous' name is not known here. In Kubernetes it may be so a moment later."""
    host = plan.connect.removeprefix("tcp://").rpartition(":")[0].strip("[]")

    def look_up() -> None:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            text = (
                f"the host name {host} is not known here ({error.strerror}): torchrun and gpuwatch go on asking "
                "for it; if it is wrong, correct --rdzv-endpoint, or MASTER_ADDR and --master-addr"
            )
            say(coded(text, Code.NO_RENDEZVOUS))

    if host and not plan.local:
        threading.Thread(target=look_up, daemon=True, name="gpuwatch-look-up").start()


def _is_this_host(host: str) -> bool:
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

    return _matches_machine_hostname(host)


def _run(
    args: argparse.Namespace, plan: CollectorPlan, command: list[str], job: SchedulerFacts | None, nproc: int
) -> int:
    _tell_of_unknown_host(plan)
    keys = job_keys(args, plan)
    with signals_raise() as signals:
        ranks = TorchrunRanks(JobTerms(args, plan, keys, command, job, nproc), signals)
        return JobLife(ranks, meeting_key(keys)).run()


class TorchrunRanks(RankStarter):
    """The ranks that torchrun starts here. elastic.py reports their starts and ends to it, and asks it what to do."""

    settings: WorkerSettings
    """What they get from the launch."""
    signals_first = True

    def __init__(self, terms: JobTerms, signals: signals_raise) -> None:
        self.recorders = terms.nproc * (1 + min(terms.args.max_restarts, KEPT_ATTEMPTS))
        self.any_started = False
        self.job_is_over = threading.Event()
        """They are to end, and no other attempt is to begin."""
        self.attempt_is_over = threading.Event()
        """They stand still: they are to end, and may be started again. Cleared by the next start."""
        self._terms = terms
        self._args = terms.args
        self._job = terms.job
        self._signals = signals
        self._ranks: list[psutil.Process] = []
        self._unseen: list[psutil.Process] = []
        self._pids: dict[int, int] = {}
        """rank -> process id"""
        self._looks: dict[int, LastLook] = {}
        self._waits_until = 0.0
        """See `is_waited_for`. 0: it does not wait."""
        self._live = live_lines(check_only=terms.args.check_only)
        signals.unheard = self._leave_for_signal

    def run(self, life: JobLife) -> LaunchDone:
        """Starts the helpers and runs torchrun to its end. Every signal that ends it is reported to the collector."""
        self._life = life
        try:
            with self._signals.held():  # an early one is in the report, too, and leaves no child behind
                address = self._start_collector()
                self.settings = worker_settings(self._args, life.scratch, life.logs)
                life.start_agent(self._terms.agent_config(address, life.scratch), self._stop)
            if not self._args.check_only:
                script = [self._args.training_script, *self._args.training_script_args]
                say(f"running under torchrun: {shlex.join(masked_command(script))}")
            else:
                several = f" on each of {self._args.nnodes} nodes" if self._terms.plan.max_nodes > 1 else ""
                say(f"checking {self._terms.nproc} rank{'s' if self._terms.nproc != 1 else ''}{several}")
            tell_of_torch()
            patience_s = STUCK_S + 2 * self._args.monitor_interval
            watch_torchrun(lambda: self._unseen, self._leave_torchrun, patience_s)
            from .elastic import run_to_its_end

            return run_to_its_end(self._args, self)
        except TimeLimitNear:
            return LaunchDone("signal", int(signal.SIGUSR2))
        except signal_exceptions() as error:
            return LaunchDone("signal", int(error.sigval))  # type: ignore[attr-defined]  # all of them have it
        except KeyboardInterrupt:
            return LaunchDone("signal", int(signal.SIGINT))

    def _start_collector(self) -> str:
        """And import torch meanwhile. Returns the collector's address."""
        beside = OneThread()
        address = beside.submit(lambda: self._life.start_collector(self._terms, self._live.show))
        beside.close()
        from . import elastic  # noqa: F401  # imports torch

        return address.result()

    def _stop(self, reason: str, restart: bool) -> None:
        say(f"stopping the ranks of this node: {reason}")
        (self.attempt_is_over if restart else self.job_is_over).set()

    # -- a torchrun that does not come back: in a thread of its own -----------------------------------------------

    def _leave_torchrun(self) -> None:
        say(
            "the ranks of this node have ended, but torchrun still waits for a rendezvous that does not answer: "
            f"leaving torchrun [{Code.NO_RENDEZVOUS}]"
        )
        self._leave(LaunchDone("failed"), int(ExitCode.SCRIPT_FAILED))

    def _leave_for_signal(self, number: signal.Signals) -> None:
        """Python hears no signal before torch comes back."""
        if self._life.agent is not None:  # else there is nobody to tell
            self._leave(LaunchDone("signal", int(number)), int(ExitCode.SIGNAL) + number)

    def _leave(self, done: LaunchDone, code: int) -> None:
        with self._life.finishing:
            try:
                code = self._life.finish(done)
                self._life.clear_up()
            finally:
                flush_streams()
                os._exit(code)

    @property
    def saw_overflow(self) -> bool:
        """Whether a rank of this node has recorded one."""
        return bool(self._life.overflows.sentence)

    # -- what torchrun's agent tells and asks ---------------------------------------------------------------------

    def started(self, settings: WorkerSettings, pids: dict[int, int]) -> None:
        """The ranks of this node run."""
        self.any_started = True
        self.attempt_is_over.clear()
        self._unseen = []
        self._waits_until = 0.0
        self._pids, self._looks = pids, {}
        for pid in pids.values():
            with suppress(psutil.Error):
                self._unseen.append(psutil.Process(pid))
        self._ranks += self._unseen
        self._life.send(WorkersStarted(settings.attempt, pids, settings.round, settings.node_hosts))

    def is_waited_for(self, attempt: int, running: list[int]) -> bool:
        """One has failed, for which torchrun ends the others: whether it waits, as one looks into its own overflow."""
        if not self._life.overflows.is_looked_into(attempt, running):
            return False
        self._waits_until = self._waits_until or time.monotonic() + SECOND_RUN_S
        return time.monotonic() < self._waits_until

    def are_stopped(self, attempt: int, codes: dict[int, int | None]) -> None:
        """torchrun stops those without a code: where do they stand? An overflow is known without it."""
        if RANK_OVERFLOW not in codes.values():
            running = {rank: pid for rank, pid in self._pids.items() if codes.get(rank, 0) is None}
            self._looks = last_looks(self._life.scratch, attempt, running)

    def ended(self, attempt: int, codes: dict[int, int | None], failed: list[int]) -> None:
        """The ranks of this node have ended."""
        self._unseen = []
        self._life.overflows.read(attempt, codes)
        self._life.send(WorkersEnded(attempt, codes, failed, self._looks))

    def may_restart(self, attempt: int, ranks: list[int]) -> bool:
        """Not after an abort: the same overflow, or the same bad GPU, would only be met again."""
        return not any(_aborted(self._life.scratch / file_name(rank, attempt)) for rank in ranks)

    # -- the end ------------------------------------------------------------------------------------------------

    def settle(self, done: LaunchDone) -> LaunchDone:
        """Add the scheduler's reason for a SIGTERM; one node is enough to ask."""
        # a scheduler repeats them, and once a node has ended ends the others
        _ignore_signals(signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
        if done.outcome != "signal":
            return done
        say_signal(done.signal)
        scheduler = self._job.scheduler if self._job is not None else None
        if not self._terms.plan.hosts or done.signal != signal.SIGTERM or scheduler is None or self._job is None:
            return done
        end = scheduler.why_it_ends(self._job)
        return msgspec.structs.replace(done, reason=end.reason, down_nodes=list(end.down_nodes), told_by=end.told_by)

    def wait(self, life: JobLife) -> bool:
        """False, too, if a second signal came before there was an agent."""
        if life.agent is None:
            return False
        try:
            life.wait()
        except signal_exceptions(KeyboardInterrupt):
            return life.verdict is not None
        return True

    def conclude(self, verdict: JobResult | None) -> None:
        """The report: beside the script's output on stderr, or as the answer of a check on stdout."""
        _ignore_signals()  # srun ends all others as soon as the first node has left with the answer that all have
        self._live.close()
        job = self._job
        if verdict is None or (job is not None and job.scheduler is not None and job.in_step and job.node_rank):
            return  # a scheduler puts the output of all nodes into one file: once is enough
        if not self._args.check_only:
            tell(verdict.text)
        elif self._args.format == "text":
            print(verdict.text, flush=True)
        elif self._life.run_dir is not None or self._args.collector is not None:
            try:  # of several nodes one: for one reader
                print(Path(verdict.report).read_text(encoding="utf-8"), flush=True)
            except OSError:
                tell(verdict.text)

    def exit_code(self, done: LaunchDone, verdict: JobResult | None, left: bool) -> int:
        """A check has no script that could fail by itself: whatever went wrong, it has failed."""
        code = {"ok": int(ExitCode.UNKNOWN), "failed": int(ExitCode.SCRIPT_FAILED)}.get(
            done.outcome, int(ExitCode.SIGNAL) + done.signal
        )
        code = verdict.exit_code if verdict is not None else code
        failed = self._args.check_only and ExitCode.CLEAN < code < ExitCode.SIGNAL
        return int(ExitCode.PREFLIGHT_FAILED) if failed else code

    def close(self) -> None:
        """Only after a second signal has torn torchrun out of its own shutdown is there any rank left to kill."""
        _ignore_signals()  # from here on it is a matter of seconds, and must be done
        self._live.close()
        for rank in self._ranks:
            with suppress(psutil.Error):
                rank.kill()
        with suppress(Exception):  # it is only a message
            patience_s = 0.0 if self._life.hurry else PATIENCE_LEFT_BEHIND_S
            tell_left_behind(self._life.scratch, say, patience_s)


def _ignore_signals(*numbers: signal.Signals) -> None:
    """These, or by default all that end a launch. Beside a torchrun that does not come back, nobody can: it stays."""
    if threading.current_thread() is threading.main_thread():
        for number in numbers or (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)


def _aborted(recorder: Path) -> bool:
    with suppress(OSError, NotReady), closing(RecorderReader(recorder)) as reader:
        return reader.abort > 0
    return False
