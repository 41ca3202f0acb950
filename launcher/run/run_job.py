"""`gpuwatch run` from its options to its exit code. Imports no torch."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace as with_fields

from ...core.codes import Code, coded
from ...core.errors import UsageError
from ...core.guest.tell import say, tell
from ...core.host import host_name, loopback
from ...core.recorder.run_folder import RUN_VARIABLE, UNWATCHED, read_failed, write_settings
from ...core.secrets import masked_command, masked_text
from ...core.settings import WorkerSettings
from ...core.wire.keys import meeting_key, read_secret
from ...core.wire.pipe import JobResult, LaunchDone, PreflightOver, StageLine
from ..agent.process_ends import GRACE_S
from ..expect import why_not_started
from ..fill_in import read_task
from ..life import JobLife, JobTerms, RankStarter, say_signal, tell_of_torch
from ..option_tables import worker_settings
from ..option_types import bracketed
from ..options import parse_run
from ..plan import CollectorPlan, job_keys, meeting_place, run_plan
from ..scheduler_job import SchedulerFacts
from .command import AttendedCommand, block_signals, leaves_at_once, run_as_guest, run_unwatched
from .join import close_run, open_plan, open_run
from .run_ranks import HostRanks
from .tasks import HostTasks, NoFolder, TaskCommand

_MOST_UNWATCHED = 16
_PEERS_S = 5.0
"""How long ranks get to raise the error that another rank's end causes: it says more than a signal does."""


def run(arguments: list[str]) -> int:
    """Run a command. Returns the exit code; raises UsageError when the options cannot work."""
    args = parse_run(arguments)
    if os.environ.get(RUN_VARIABLE):
        raise UsageError(
            Code.NESTED_RUN,
            "expected one gpuwatch run, found one inside another: the outer one watches all ranks below it; "
            "leave out one of them",
        )
    if problem := why_not_started(args.command[0], "gpuwatch run -- python"):
        say(coded(f"{masked_text(args.command[0])}: {masked_text(problem[0])}", Code.NO_SCRIPT))
        return problem[1]
    job = read_task(os.environ)
    _expect_all_hosts(args, job)
    plan = run_plan(args, job)
    if args.other_hosts:
        plan = open_plan(args, plan)
    try:
        tasks = _tasks(args, job, plan)
    except NoFolder as error:
        text = f"the tasks of this host have no folder in which to find each other, and go on unwatched: {error.text}"
        say(coded(text, error.code))
        return run_unwatched(args.command, block_signals(), job=job)
    unblocked = block_signals()
    try:
        if tasks is not None and not tasks.is_owner:
            return run_as_guest(args.command, tasks, unblocked, job=job)
        command = AttendedCommand(args.command, unblocked=unblocked, job=job)
        keys = job_keys(args, plan)
        terms = JobTerms(args, plan, keys, ["gpuwatch", "run", *arguments], job, starter="the command")
        key = meeting_key(keys)
        return JobLife(CommandRanks(terms, key, tasks, command), key).run()
    finally:
        if tasks is not None:
            tasks.close()


def _expect_all_hosts(args: argparse.Namespace, job: SchedulerFacts | None) -> None:
    """What the scheduler's own starter starts on other hosts is not below this command. Raises UsageError."""
    if job is None or job.scheduler is None or job.nodes is None or job.nodes[1] < 2 or args.other_hosts:
        return
    starter = job.scheduler.on_each_node.split()[0]
    if Path(args.command[0]).name == starter:
        rest = shlex.join(masked_command(args.command[1:]))
        raise UsageError(
            Code.WRONG_TOGETHER,
            f"expected {starter} in front of gpuwatch run, found it behind: only the ranks of this host would be "
            f"watched; write {starter} OPTIONS gpuwatch run -- COMMAND for {starter} {rest}, or pass --other-hosts",
        )


def _tasks(args: argparse.Namespace, job: SchedulerFacts | None, plan: CollectorPlan) -> HostTasks | None:
    """The other tasks of this host, if the environment names any. Raises NoFolder."""
    if job is None or job.tasks_here < 2:
        return None
    secret = read_secret(args.secret_file)  # with one, nobody else can tell the folder's name beforehand
    return HostTasks(" ".join(filter(None, [plan.job, job.node or host_name(), secret])), job.tasks_here)


class CommandRanks(RankStarter):
    """The ranks below the commands of one host: below the command of the task that has the agent, and of the others."""

    def __init__(self, terms: JobTerms, key: str, tasks: HostTasks | None, command: AttendedCommand) -> None:
        self._terms = terms
        self._args = terms.args
        self._meeting_key = key
        self._tasks = tasks
        self._command = command
        self._join: Path | None = None
        """The file by which other hosts join."""
        self._failed_at = 0.0
        self._code = 0

    def run(self, life: JobLife) -> LaunchDone:
        """Start the helpers, and run this command, the other tasks' commands and their ranks to their end."""
        self._scratch = life.scratch
        self._ranks = HostRanks(
            life.scratch, life.send, lambda attempt, rank, code: life.overflows.read(attempt, {rank: code})
        )
        address = life.start_collector(self._terms, self._show)
        settings = with_fields(
            worker_settings(self._args, life.scratch, life.logs),
            meets_at=meeting_place(self._args, self._terms.plan, address),
        )
        write_settings(life.scratch, settings)
        if self._args.other_hosts:
            address = self._let_others_join(life, address, settings)
        life.start_agent(self._terms.agent_config(address, life.scratch), self._stop)
        tell_of_torch()
        self._code = self._run_command()
        return self._outcome()

    def _let_others_join(self, life: JobLife, address: str, settings: WorkerSettings) -> str:
        """Returns the collector's address for this node's own agent."""
        if life.run_dir is None:
            say(coded("without a collector no other host can join", Code.COLLECTOR_ENDED))
            return address
        invited = self._terms.agent_config(address, life.scratch)
        self._join = open_run(self._args, life.run_dir, address, invited, settings, self._meeting_key)
        return f"tcp://{bracketed(loopback())}:{address.rpartition(':')[2]}"

    def _show(self, line: StageLine | PreflightOver) -> None:
        """The preflight's result in a line; also that there was none, where one was asked for."""
        if isinstance(line, StageLine) or self._args.preflight == "off":
            return
        if not line.grade:
            say(coded("there was no preflight: no rank has called init_process_group", Code.PREFLIGHT_SKIPPED))
        for text in filter(None, [line.text, *line.warnings]):
            say(text)

    def _stop(self, reason: str, restart: bool) -> None:
        """`restart` is for torchrun alone: nobody here starts a command again."""
        say(f"stopping the command: {reason}")
        self._ranks.stopping = True
        self._command.stop.set()
        if self._tasks is not None:
            self._tasks.stop(reason)

    # -- the command --------------------------------------------------------------------------------------------

    def _run_command(self) -> int:
        """Returns its exit code, negative for a signal."""
        command, tasks = self._command, self._tasks
        command.start(self._scratch, self._join)
        if tasks is not None:
            tasks.share_scratch(self._scratch)
            tasks.say(TaskCommand(command.pid))
        while (code := command.turn()) is None or (tasks is not None and not tasks.all_ended(self._ranks.number)):
            self._ranks.poll(self._codes)
            self._stop_after_failure()
        self._ranks.last_look(self._codes)
        self._ranks.stopping = True
        if self._join is not None:
            close_run(self._join)
        self._wait_for_ranks(code)
        return code

    def _stop_after_failure(self) -> None:
        """A task of this host has failed: the others end, as under torchrun. First they may raise by themselves."""
        if self._tasks is None or self._command.stop.is_set():
            return
        if self._command.ended_by is not None:  # they have all been told to end: one may save for longer
            return
        if self._tasks.any_failed() or any(self._command.codes.values()):
            self._failed_at = self._failed_at or time.monotonic()
            if time.monotonic() - self._failed_at > _PEERS_S:
                self._stop("another task of this host has failed", restart=False)

    @property
    def _codes(self) -> dict[int, int | None]:
        others = self._tasks.commands() if self._tasks is not None else {}
        return {**others, **self._command.codes}

    def _wait_for_ranks(self, code: int) -> None:
        """The command has ended. Ranks that it has left behind end with it if it was killed; else they may go on."""
        ends = code < 0 or self._command.stop.is_set() or self._command.ended_by is not None
        told = False
        kill_at = time.monotonic() + GRACE_S
        while self._ranks.running:
            if ends and not told:
                self._ranks.signal(signal.SIGTERM)
            elif not told:
                say(f"the command has ended, but {len(self._ranks.running)} of its ranks still run: waiting for them")
            told = True
            if ends and time.monotonic() >= kill_at:
                self._ranks.signal(signal.SIGKILL)
            taken = self._command.take_signal()
            if taken is not None:
                self._ranks.signal(taken)
            self._ranks.last_look(self._codes)

    # -- the end ------------------------------------------------------------------------------------------------

    def _outcome(self) -> LaunchDone:
        done = self._how_it_ended()
        error = read_failed(self._scratch, self._command.pid) if done.outcome == "failed" else ""
        if not self._ranks.heard:
            return with_fields(done, error=error, note=self._why_no_rank())
        found = [f"process {pid} was not watched ({why})" for pid, why in self._unwatched()]
        return with_fields(done, error=error, unwatched=found)

    def _how_it_ended(self) -> LaunchDone:
        others = self._tasks.results() if self._tasks is not None else []
        if self._code == 0 and all(task.code == 0 for task in others):
            return LaunchDone("ok")
        signals = [int(self._command.ended_by or 0), *(task.ended_by for task in others)]
        if any(signals):
            return LaunchDone("signal", next(filter(None, signals)))
        if self._code < 0 and not self._ranks.has(self._command.pid) and not self._ranks.any_failed:
            return LaunchDone("signal", -self._code, reason="the signal was sent to the command")
        return LaunchDone("failed")

    def _why_no_rank(self) -> str:
        """Names processes that could not be watched, with the reason."""
        for _, why in self._unwatched():
            has_none = "ModuleNotFoundError" in why or "ImportError" in why
            return f"{why}: install gpuwatch into that Python, too" if has_none else why
        return (
            "no Python process below the command was seen to import torch and make a model or join a process group; "
            "python -S, -I and -E, env -i and containers hide such a process"
        )

    def _unwatched(self) -> list[tuple[str, str]]:
        """(process id, reason) of Python processes that could not be watched."""
        found = []
        for path in sorted(self._scratch.glob(UNWATCHED))[:_MOST_UNWATCHED]:
            with suppress(OSError):
                found.append((path.name.rpartition("-")[2], path.read_text()[:500]))
        return found

    def settle(self, done: LaunchDone) -> LaunchDone:
        """A signal that this run has got is said."""
        if self._command.ended_by is not None and done.outcome == "signal":
            say_signal(self._command.ended_by)
        return done

    def wait(self, life: JobLife) -> bool:
        """Wait in a thread, as this one takes the signals one by one."""
        waiting = threading.Thread(target=life.wait, daemon=True, name="gpuwatch-verdict")
        waiting.start()
        while waiting.is_alive():
            if leaves_at_once():
                return life.verdict is not None
        return True

    def conclude(self, verdict: JobResult | None) -> None:
        """The other tasks print nothing: the output of all nodes is one, and once is enough."""
        if self._tasks is not None:
            self._tasks.share_verdict(verdict)
        if verdict is not None and (self._terms.job is None or not self._terms.job.node_rank):
            tell(verdict.text)

    def exit_code(self, done: LaunchDone, verdict: JobResult | None, left: bool) -> int:
        """The command's own exit code, unless the verdict replaces it."""
        return self._command.exit_code(self._code, verdict, left=left)

    def close(self) -> None:
        """The command, too."""
        self._command.terminate()
        if self._join is not None:
            close_run(self._join)
        self._ranks.close()
