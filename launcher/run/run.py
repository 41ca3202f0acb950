"""`gpuwatch run` from its options to its exit code. Imports no torch."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

from ...core.errors import UsageError
from ...core.exits import ExitCode
from ...core.run_folder import RUN_VARIABLE, UNWATCHED, write_settings
from ...core.wire.pipe import LaunchDone
from ..arguments.job_keys import job_keys
from ..arguments.plan import Plan
from ..arguments.worker_settings import worker_settings
from ..helpers import Helpers
from ..overflows import Overflows
from ..say import say
from ..scheduler.cluster import read_job
from ..scheduler.job import Job
from ..scratch import keep_rescued, make_scratch, remove_scratch
from .command import environment_of_ranks, shell_code, start_command, why_not_started
from .options import parse_run
from .ranks import Ranks
from .run_plan import run_plan

_TICK_S = 0.1
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_RELAYED = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
_SENT_BY_KERNEL = 0x80
"""si_code of a signal that the terminal sends, to all processes in front of it. (man 2 sigaction)"""
_GRACE_S = 30.0
"""From SIGTERM to SIGKILL, as torchrun has it."""
_USUAL_RANKS = 8
"""So many recorders are looked for room for, as nobody says how many ranks there will be."""


def run(arguments: list[str]) -> int:
    """Run a command. Returns the exit code; raises UsageError when the options cannot work."""
    args = parse_run(arguments)
    if os.environ.get(RUN_VARIABLE):
        raise UsageError(
            "expected one gpuwatch run, found one inside another: the outer one watches all ranks below it; "
            "leave out one of them"
        )
    problem = why_not_started(args.command[0])
    if problem is not None:
        reason, code = problem
        say(f"{args.command[0]}: {reason}")
        return code
    job = read_job(os.environ)
    plan = run_plan(args, job)
    return _Run(args, plan, ["gpuwatch", "run", *arguments], job).run()


class _Run:
    def __init__(self, args: argparse.Namespace, plan: Plan, command: list[str], job: Job | None) -> None:
        self._args = args
        self._job = job
        self._helpers = Helpers(args, plan, job_keys(args, plan), 0, command, job, "the command")
        self._stop = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended_by: signal.Signals | None = None
        """The signal that this run was to end by."""
        self._relay_at: dict[signal.Signals, float] = {}
        self._kill_at = 0.0

    def run(self) -> int:
        """Helpers up, the command, helpers down, exit code."""
        self._scratch = make_scratch(_USUAL_RANKS, say)
        self._overflows = Overflows(self._scratch)
        self._ranks = Ranks(self._scratch, self._helpers.tell, self._rank_ended)
        # threads and helpers are started with them blocked: the loop below alone takes them
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_RELAYED, signal.SIGCHLD})
        try:
            address = self._helpers.start_collector(self._scratch, lambda line: None)
            write_settings(self._scratch, worker_settings(self._args, self._scratch, self._scratch))
            self._helpers.start_agent(address, self._scratch, self._stop_ranks)
            code = self._run_command(before)
            return self._finish(code)
        finally:
            self._clear_up()

    def _stop_ranks(self, reason: str) -> None:
        say(f"stopping the command: {reason}")
        self._stop.set()

    def _rank_ended(self, attempt: int, rank: int, code: int | None) -> None:
        self._overflows.look(attempt, {rank: code})

    # -- the command --------------------------------------------------------------------------------------------

    def _run_command(self, signals_before: set[int | signal.Signals]) -> int:
        """Until it and its ranks have ended. Returns its exit code, negative for a signal."""
        command = self._args.command
        environ = environment_of_ranks(self._scratch, os.environ)
        process = self._process = start_command(command, environ, signals_before)
        while process.poll() is None:
            self._turn()
        own = {process.pid: process.returncode}
        self._ranks.last_look(own)
        self._ranks.stopping = True
        self._wait_for_ranks(own)
        return int(process.returncode)

    def _turn(self) -> None:
        self._take_signal(_TICK_S)
        process = self._process
        assert process is not None
        now = time.monotonic()
        for number, due in list(self._relay_at.items()):
            if now >= due:
                del self._relay_at[number]
                process.send_signal(number)
        if self._stop.is_set():
            self._end_it(process, now)
        code = process.poll()
        self._ranks.look({} if code is None else {process.pid: code})

    def _end_it(self, process: subprocess.Popen[bytes], now: float) -> None:
        """First in a way that it can hear, then in one that it cannot."""
        if not self._kill_at:
            self._kill_at = now + _GRACE_S
            self._ranks.stopping = True
            process.terminate()
        elif now >= self._kill_at:
            process.kill()
            self._ranks.signal(signal.SIGKILL)

    def _wait_for_ranks(self, own: dict[int, int]) -> None:
        """The command has ended. Ranks that it has left behind end with it if it was killed; else they may go on."""
        process = self._process
        assert process is not None
        ends = process.returncode < 0 or self._stop.is_set() or self._ended_by is not None
        told = False
        kill_at = time.monotonic() + _GRACE_S
        while self._ranks.running:
            if ends and not told:
                self._ranks.signal(signal.SIGTERM)
            elif not told:
                say(f"the command has ended, and {len(self._ranks.running)} of its ranks go on: waiting for them")
            told = True
            if ends and time.monotonic() >= kill_at:
                self._ranks.signal(signal.SIGKILL)
            taken = self._take_signal(_TICK_S)
            if taken is not None:
                self._ranks.signal(taken)
            self._ranks.last_look(own)

    def _take_signal(self, limit_s: float) -> signal.Signals | None:
        """Wait for one; the command gets it, too, unless the terminal has sent it to all. Returns it."""
        info = signal.sigtimedwait({*_RELAYED, signal.SIGCHLD}, limit_s)
        if info is None or info.si_signo == signal.SIGCHLD:
            return None
        number = signal.Signals(info.si_signo)
        if number in _ENDING:
            self._ended_by = number
        if info.si_code != _SENT_BY_KERNEL:
            # a scheduler sends it to all processes of a step, and what hears it twice may leave at once
            in_step = self._job is not None and self._job.scheduler is not None
            self._relay_at.setdefault(number, time.monotonic() + (5.0 if in_step else 0.0))
        return number

    # -- the end ------------------------------------------------------------------------------------------------

    def _finish(self, code: int) -> int:
        """Wait for the verdict, print it, and say what to exit with."""
        done = self._outcome(code)
        if self._ended_by is not None and done.outcome == "signal":
            say(f"got {self._ended_by.name}; writing the report (Ctrl-C: leave at once)")
        self._helpers.tell(done)
        own = shell_code(code)
        if not self._wait_for_verdict():
            self._helpers.hurry = True
            return self._exit_code(own, own, "unknown")
        verdict = self._helpers.verdict
        if verdict is None:
            say("no verdict: the node agent ended without one")
            return self._exit_code(own, int(ExitCode.UNKNOWN), "unknown")
        print(verdict.text, file=sys.stderr, flush=True)
        return self._exit_code(own, verdict.exit_code, verdict.kind)

    def _outcome(self, code: int) -> LaunchDone:
        note = "" if self._ranks.heard else self._why_no_rank()
        if code == 0:
            return LaunchDone("ok", note=note)
        if self._ended_by is not None:
            return LaunchDone("signal", int(self._ended_by), note=note)
        process = self._process
        if code < 0 and process is not None and not self._ranks.has(process.pid) and not self._ranks.any_failed:
            return LaunchDone("signal", -code, "it was sent to the command", note=note)
        return LaunchDone("failed", note=note)

    def _why_no_rank(self) -> str:
        """What Python processes have left behind that could not be watched; else what it can be."""
        for path in sorted(self._scratch.glob(UNWATCHED)):
            with suppress(OSError):
                return f"{path.read_text()[:500]}: install gpuwatch into that Python, too"
        return (
            "no Python below the command has imported torch and made a model or joined a process group, as far as can "
            "be seen: python -S, -I and -E, env -i and containers hide it"
        )

    def _wait_for_verdict(self) -> bool:
        """False if the user would not wait."""
        waiting = threading.Thread(target=self._helpers.wait, daemon=True, name="gpuwatch-verdict")
        waiting.start()
        while waiting.is_alive():
            info = signal.sigtimedwait({*_ENDING}, _TICK_S)
            if info is not None and info.si_signo == signal.SIGINT:
                return self._helpers.verdict is not None
        return True

    def _exit_code(self, own: int, code: int, kind: str) -> int:
        """The command's own; that of the verdict where it found an overflow, or where the command has none.

        What a rank has said itself counts more than a verdict that knows nothing of it.
        """
        overflow = self._overflows.sentence
        if kind in ("overflow", "preflight"):
            return code
        if overflow:
            say(f"{overflow}; no report has it: its event was lost on the way")
            return int(ExitCode.OVERFLOW)
        if own == 0 or (self._stop.is_set() and code):
            return 0 if kind == "interrupted" else code
        return own

    def _clear_up(self) -> None:
        if self._process is not None and self._process.poll() is None:  # an error of ours
            self._process.terminate()
        self._ranks.close()
        self._helpers.end()
        rescued = keep_rescued(self._scratch)
        if rescued is not None:
            say(f"the runs' folder took no more: the store is in {rescued}, read it with: gpuwatch report {rescued}")
        remove_scratch(self._scratch)
