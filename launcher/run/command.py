"""The user's command: started as it stands, with its own stdin, stdout and stderr, and ended with its run."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ...core.codes import Code, ExitCode, VerdictKind, coded
from ...core.guest.tell import say
from ...core.host import signal_at_parents_end
from ...core.recorder.run_folder import JOIN_VARIABLE, RUN_VARIABLE
from ...core.wire.keys import SECRET_VARIABLE
from ...core.wire.pipe import JobResult
from ..agent.process_ends import GRACE_S
from ..scheduler_job import SchedulerFacts
from .tasks import HostTasks, TaskCommand

PATH_FOLDER = str(Path(__file__).parents[2] / "worker" / "path")
"""Holds the sitecustomize that makes ranks of processes."""


def environment_of_ranks(scratch: Path, join: Path | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for the command: what makes ranks comes first on PYTHONPATH. `join`: other hosts may."""
    paths = [PATH_FOLDER, *filter(None, [environ.get("PYTHONPATH")])]
    of_join = {JOIN_VARIABLE: str(join)} if join is not None else {}
    return {**environ, "PYTHONPATH": os.pathsep.join(paths), RUN_VARIABLE: str(scratch), **of_join}


def shell_code(returncode: int) -> int:
    """The exit code that a shell would have for it."""
    return 128 - returncode if returncode < 0 else returncode


# The command while it runs: the signals that it is to get, and its end where the run asks for it.
#
# The signals are blocked in this process, and taken one by one: the sender shows whether the command got it, too.

TICK_S = 0.1
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
RELAYED = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)
_UNKNOWN_SENDER_S = 5.0
"""In a job, somebody may have sent a signal to all processes. What hears SIGTERM twice may leave at once: the command
gets it again only if it is still there."""
_SENT_BY_KERNEL = 0x80
"""si_code of a signal that the terminal sends, to all processes in front of it. (man 2 sigaction)"""


def block_signals() -> set[int | signal.Signals]:
    """Call it before any thread is started. Returns the signals that were blocked before."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, {*RELAYED, signal.SIGCHLD})


class AttendedCommand:
    """`unblocked` is what `block_signals` has returned. `job` is what this is part of."""

    def __init__(self, command: list[str], *, unblocked: set[int | signal.Signals], job: SchedulerFacts | None) -> None:
        self._command = command
        self._unblocked = unblocked
        self._job = job if job is not None and job.scheduler is not None else None
        self._process: subprocess.Popen[bytes] | None = None
        self._relay_at: dict[signal.Signals, float] = {}
        self._kill_at = 0.0
        self.stop = threading.Event()
        """Set it to have the command ended."""
        self.ended_by: signal.Signals | None = None
        """The signal that this run was to end by."""

    @property
    def pid(self) -> int:
        """0 before it is started."""
        return self._process.pid if self._process is not None else 0

    @property
    def codes(self) -> dict[int, int | None]:
        """Its exit code by its process id, negative for a signal, None while it runs."""
        return {self._process.pid: self._process.poll()} if self._process is not None else {}

    def start(self, scratch: Path | None, join: Path | None = None) -> None:
        """With `scratch` as the folder of its ranks' recorders; None: unwatched. Raises OSError as exec does.

        `join` is the file by which other hosts may join. The kernel sends the command SIGTERM when this process ends,
        however that is.
        """
        own = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
        environ = environment_of_ranks(scratch, join, own) if scratch is not None else own
        follow_parent = signal_at_parents_end(signal.SIGTERM)

        def prepare() -> None:  # between fork and exec: everything that can be loaded before is loaded
            signal.pthread_sigmask(signal.SIG_SETMASK, self._unblocked)
            follow_parent()

        self._process = subprocess.Popen(self._command, env=environ, close_fds=False, preexec_fn=prepare)

    def turn(self) -> int | None:
        """Wait a moment for what happens. Returns its exit code, negative for a signal; None while it runs."""
        process = self._process
        assert process is not None
        self.take_signal()
        now = time.monotonic()
        for number, due in list(self._relay_at.items()):
            if now >= due:
                del self._relay_at[number]
                process.send_signal(number)
        if self.stop.is_set():  # first in a way that it can hear, then in one that it cannot
            if not self._kill_at:
                self._kill_at = now + GRACE_S
                process.terminate()
            elif now >= self._kill_at:
                process.kill()
        return process.poll()

    def take_signal(self) -> signal.Signals | None:
        """Wait a moment for one; the command gets it, too, unless the terminal has sent it to all. Returns it."""
        info = signal.sigtimedwait({*RELAYED, signal.SIGCHLD}, TICK_S)
        if info is None or info.si_signo == signal.SIGCHLD:
            return None
        number = signal.Signals(info.si_signo)
        if number in ENDING:
            self.ended_by = number
        if info.si_code != _SENT_BY_KERNEL:
            self._relay(number, info.si_pid)
        return number

    def _relay(self, number: signal.Signals, sender: int) -> None:
        """The command hears a signal once: a second one would end it if it has taken its handler away, as Lightning
        does after its training, or would call a handler that still saves."""
        if self._job is None or not _has_sent_to_all(self._job, sender):
            is_ending = number in ENDING and self._job is not None
            self._relay_at.setdefault(number, time.monotonic() + (_UNKNOWN_SENDER_S if is_ending else 0.0))

    def exit_code(self, code: int, verdict: JobResult | None, *, left: bool) -> int:
        """What a run exits with: as its command has, unless there was an overflow, or the run has ended it.

        The verdict's code counts, too, where the command itself has nothing to tell: it has left with 0, and something
        is wrong or not proven. `code` is negative for a signal; `left`: the user would not wait for the verdict.
        """
        own, unknown = shell_code(code), JobResult(int(ExitCode.UNKNOWN), VerdictKind.UNKNOWN, "", "")
        verdict = verdict or unknown
        if verdict.kind.outranks:
            return verdict.exit_code
        if left or verdict.kind == VerdictKind.INTERRUPTED:
            return own
        return verdict.exit_code if own == 0 or (self.stop.is_set() and verdict.exit_code) else own

    def terminate(self) -> None:
        """End the command after an error of ours, so that it does not stay behind."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()


def _has_sent_to_all(job: SchedulerFacts, sender: int) -> bool:
    """Whether it signals each process of a step; of a batch script, the shell alone. 0 is outside of this container."""
    if job.in_step and job.scheduler is not None:
        with suppress(OSError):  # it has ended, as `kill` does
            return not sender or Path(f"/proc/{sender}/comm").read_text().strip() == job.scheduler.signals_by
    return False


def leaves_at_once() -> bool:
    """Wait a moment; True if the user does not want to wait for the report."""
    info = signal.sigtimedwait({*ENDING}, TICK_S)
    return info is not None and info.si_signo == signal.SIGINT


# A task that has no agent of its own: another task of its host has one, or none has.
#
# It runs its command, and waits for the verdict if there will be one.


def run_as_guest(
    command: list[str], tasks: HostTasks, unblocked: set[int | signal.Signals], *, job: SchedulerFacts | None
) -> int:
    """Run the command. Returns the exit code."""
    attended = AttendedCommand(command, unblocked=unblocked, job=job)
    scratch = None
    while scratch is None and tasks.owner_lives() and attended.ended_by is None:
        scratch = tasks.scratch()
        if scratch is None:
            attended.take_signal()
    if attended.ended_by is not None:
        return int(ExitCode.SIGNAL) + int(attended.ended_by)
    if scratch is None:
        say(coded("the task that runs this node's agent has ended: this task goes on unwatched", Code.AGENT_ENDED))
    attended.start(scratch)
    tasks.say(TaskCommand(attended.pid))
    while (code := attended.turn()) is None:
        if tasks.is_stopped():
            attended.stop.set()
    tasks.say(TaskCommand(attended.pid, code, int(attended.ended_by or 0)))
    while (verdict := tasks.verdict()) is None and tasks.owner_lives() and not leaves_at_once():
        pass
    if verdict is None:
        return shell_code(code) or int(ExitCode.UNKNOWN)
    return attended.exit_code(code, verdict, left=False)


def run_unwatched(command: list[str], unblocked: set[int | signal.Signals], *, job: SchedulerFacts | None) -> int:
    """Run the command without an agent. Returns the exit code: its own, and never that all is well."""
    attended = AttendedCommand(command, unblocked=unblocked, job=job)
    attended.start(None)
    while (code := attended.turn()) is None:
        pass
    return shell_code(code) or int(ExitCode.UNKNOWN)
