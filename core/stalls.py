"""How a rank that has stopped moving is asked where it stands: by a signal, and it answers into a file.

`faulthandler` writes the stack of Python's frames from within the signal's handler, so that a rank answers while it
waits in a collective, sleeps or loops. (docs.python.org/3/library/faulthandler.html)
"""

from __future__ import annotations

import re
import signal
import stat
from collections.abc import Callable

from .events import StackLine

MOST_LINES = 40
ANSWER_S = 8.0
"""How long the collector waits for ranks that have not answered yet."""
_LINE = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)')
_NOT_THE_USERS = (
    "/torch/",
    "/gpuwatch/worker/",
    "/gpuwatch/core/start.py:",
    "/worker/__main__.py:",
    "/lib/python3",
    "<frozen ",
    "<string>",
)
_ENTRY = "_run_gpuwatch"
"""The function of core/start.py that runs the worker, and with it the script; a checkout may have any name."""

_AROUND_COLLECTIVES = "/worker/hooks/process_groups.py"
"""gpuwatch's own function around torch's method, which is no call of the script's."""


def is_around_collectives(file: str) -> bool:
    """Whether a file has gpuwatch's own functions around torch's collectives."""
    return file.endswith(_AROUND_COLLECTIVES)


_TAKES_LONG = (
    "/torch/_dynamo/convert_frame.py",
    "/torch/_inductor/compile_fx.py",
    "/torch/_inductor/async_compile.py",
    "/torch/utils/cpp_extension.py",
    "/triton/compiler/compiler.py",
    "/torch/serialization.py",
    "/torch/distributed/checkpoint/",
    "/safetensors/",
)
"""A rank that compiles, or writes or reads a checkpoint, may take long for one step of it."""


def takes_long(stack: list[StackLine]) -> bool:
    """Whether a rank is where it may rest for longer than in other places."""
    return any(part in line.file for line in stack for part in _TAKES_LONG)


def has_left_backward(stack: list[StackLine]) -> bool:
    """Whether a main thread is in no backward: gpuwatch sees the gradients of one, and not its end."""
    return 0 < len(stack) < MOST_LINES and all(line.function != "_engine_run_backward" for line in stack)


def is_users(shown: str) -> bool:
    """Whether a line of a stack (`StackLine.shown`) is neither of torch, of Python nor of gpuwatch."""
    place = shown.partition(" in ")[0]
    return _ENTRY not in shown and not any(part in place for part in _NOT_THE_USERS)


def asking_signal() -> int | None:
    """The signal; None where there is none to spare. SLURM, Lightning and torchrun use no real-time signals."""
    last = getattr(signal, "SIGRTMAX", None)
    return int(last) - 3 if last is not None else None


def stack_file_name(rank: int, attempt: int) -> str:
    """Name of a rank's file within its node's folder."""
    return f"rank-{rank:05d}.attempt-{attempt:03d}.stack"


MAY_BE_ASKED = stat.S_IWUSR
"""This permission of a rank's file says that the handler of the signal is still ours."""


_FATAL = "Fatal Python error: "
_C_STACK = "C stack trace (most recent call first)"
"""From Python 3.14 on."""
_C_LINE = re.compile(r'  Binary file "(?P<file>[^"]*)", at (?P<function>[^+\s]+)\+0x[0-9a-f]+ ')
_MOST_C_LINES = 8


def parse_fatal(text: str, source: Callable[[str, int], str] = lambda file, line: "") -> list[StackLine]:
    """The last stack that faulthandler has written when a fatal signal came, innermost call first; [] if there is none.

    The names of native functions come first, as far as they are known. Their lines are 0.
    """
    last = text.rfind(_FATAL)
    if last < 0:
        return []
    python, _, native = text[last:].partition(_C_STACK)
    found = [
        StackLine(match["file"], 0, match["function"])
        for line in native.splitlines()
        if (match := _C_LINE.match(line)) is not None and "faulthandler" not in match["function"]
    ]
    return [*found[:_MOST_C_LINES], *parse_stack(python, source)]


def parse_stack(text: str, source: Callable[[str, int], str] = lambda file, line: "") -> list[StackLine]:
    """The last stack in what faulthandler has written, innermost call first; [] if there is none.

    `source` gives the text of a line of a file, "" where it is unknown.
    """
    last = text.rfind("most recent call first")
    found = []
    for line in text[last:].splitlines()[1:] if last >= 0 else ():
        match = _LINE.fullmatch(line)
        if match is None:
            break
        if is_around_collectives(match["file"]):
            continue
        number = int(match["line"])
        found.append(StackLine(match["file"], number, match["function"], source(match["file"], number).strip()[:200]))
    return _of_script(found)[:MOST_LINES]


def _of_script(stack: list[StackLine]) -> list[StackLine]:
    """The stack without the calls of gpuwatch that run the script, which are its outermost."""
    end = next((at for at, line in enumerate(stack) if line.function == _ENTRY), None)
    while end and stack[end - 1].file.endswith("/worker/__main__.py"):
        end -= 1
    return stack[:end] or stack
