"""A task that has no agent of its own: another task of its host has one, or none has.

It runs its command, and waits for the verdict if there will be one.
"""

from __future__ import annotations

import signal

from ...core.exits import ExitCode
from ..say import say
from ..scheduler.job import Job
from .attended import AttendedCommand, leaves_at_once
from .command import exit_code, shell_code
from .tasks import Task, Tasks


def run_as_guest(command: list[str], tasks: Tasks, unblocked: set[int | signal.Signals], *, job: Job | None) -> int:
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
        say("the task that has this node's agent has ended: this one goes on unwatched")
    attended.start(scratch)
    tasks.say(Task(attended.pid))
    while (code := attended.turn()) is None:
        if tasks.why_stop():
            attended.stop.set()
    tasks.say(Task(attended.pid, code, int(attended.ended_by or 0)))
    verdict = tasks.verdict()
    while verdict is None and tasks.owner_lives():
        if leaves_at_once():
            break
        verdict = tasks.verdict()
    own = shell_code(code)
    if verdict is None:
        return own or int(ExitCode.UNKNOWN)
    return exit_code(own, verdict.exit_code, verdict.kind, stopped=attended.stop.is_set())


def run_unwatched(command: list[str], unblocked: set[int | signal.Signals], *, job: Job | None) -> int:
    """Run the command without an agent. Returns the exit code: its own, and never that all is well."""
    attended = AttendedCommand(command, unblocked=unblocked, job=job)
    attended.start(None)
    while (code := attended.turn()) is None:
        pass
    return shell_code(code) or int(ExitCode.UNKNOWN)
