"""Asks NVML through a child process. There is an answer at the deadline, whatever the driver does."""

from __future__ import annotations

import selectors
import subprocess
import time

from ..imports.own_imports import own_command
from .facts import Answer, parse

KILLED_S = 1.0
"""How long a killed child may take to end. A child that is stuck in the driver ends when the driver lets it."""


def command(*arguments: str) -> list[str]:
    """The command line of the child."""
    return own_command(__package__, *arguments)


def ask_nvml(devices: list[str], deadline_s: float, *, loaded: bool = False) -> Answer:
    """Read the GPUs with these UUIDs, or all. With `loaded` they are at work, and only what shows under load is read.

    At the deadline the answer holds what is known by then; `trouble` says what the driver was asked last.
    """
    arguments = [word for uuid in devices for word in ("--device", uuid)]
    child = subprocess.Popen(
        command(*arguments, *(["--loaded"] if loaded else [])),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    answer = Answer()
    in_time = False
    try:
        in_time = _follow(child, answer, time.monotonic() + deadline_s)
    finally:
        code = _end(child, by_itself=in_time)
    if answer.finished:
        return answer
    asked = "" if answer.asking is None else f" when asked for {answer.asking.what}"
    if in_time:
        answer.trouble = f"the process that reads NVML ended with exit code {code}{asked}"
    else:
        answer.trouble = f"NVML did not answer within {deadline_s:.0f} s{asked}"
        answer.next = "Look at the node's kernel log for NVRM messages; a driver that hangs needs a reboot."
    return answer


def _follow(child: subprocess.Popen[bytes], answer: Answer, end: float) -> bool:
    """Read its lines. Returns True when it has said all or closed its output, False at the deadline."""
    pipe = child.stdout
    assert pipe is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while not answer.finished:
            left = end - time.monotonic()
            if left <= 0:
                return False
            if not selector.select(left):
                continue
            data = pipe.read1(1 << 16)  # type: ignore[attr-defined]  # a BufferedReader
            if not data:
                return True
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                parsed = parse(line)
                if parsed is not None:
                    answer.take(parsed)
    return True


def _end(child: subprocess.Popen[bytes], by_itself: bool) -> int | None:
    """Its exit code; None if it has none yet."""
    assert child.stdout is not None
    child.stdout.close()
    for _ in range(2):
        if not by_itself:
            child.kill()
        try:
            return child.wait(KILLED_S)
        except subprocess.TimeoutExpired:
            by_itself = False
    return None
