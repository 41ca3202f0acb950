"""How a rank that has stopped moving is asked where it stands: by one of two signals, and it answers into a file.

The first has a handler in Python, which runs between two bytecodes: a rank that runs Python answers at once. A rank in
code in C, such as a collective, does not come to it. The second is for that one alone: `faulthandler` writes the stack
of Python's frames from within the signal's handler in C. (docs.python.org/3/library/faulthandler.html)

faulthandler may not be asked while the thread runs Python. From CPython 3.11 on it reads frames that the interpreter
is just taking down, and the process ends by SIGSEGV: after 250 to 34,000 such signals to a loop that runs new code
(CPython 3.11.7, 3.12.1 and 3.13.0; none in 100,000 on 3.10). A thread in C leaves its frames as they are.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import signal
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from msgspec.structs import replace

from ..events.rank_standing import GroupState, IssuedOperation, StackLine
from .group_table import OPERATIONS, RECENT

MOST_LINES = 40
ANSWER_S = 8.0
"""How long the collector waits for ranks that have not answered yet."""
_MOST_FRAMES = 100
_LINE = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)')
_NOT_THE_USERS = (
    "/torch/",
    "/gpuwatch/worker/",
    f"{Path(__file__).parents[2]}/worker/",  # a checkout may have any name
    "/gpuwatch/core/guest/start.py:",
    "/worker/__main__.py:",
    "/lib/python3",
    "<frozen ",
    "<string>",
)
_ENTRY = "_run_gpuwatch"
"""The function of core/guest/start.py that runs the worker, and with it the script."""

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


class AskingSignals(NamedTuple):
    """SLURM, Lightning and torchrun use no real-time signals."""

    in_python: int
    in_c: int


def asking_signals() -> AskingSignals | None:
    """None where there are none to spare."""
    last = getattr(signal, "SIGRTMAX", None)
    return AskingSignals(int(last) - 4, int(last) - 3) if last is not None else None


def stack_text(frame: FrameType | None) -> str:
    """The stack from this frame outwards, as faulthandler writes it."""
    lines = ["Stack (most recent call first):"]
    while frame is not None and len(lines) <= _MOST_FRAMES:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno or 0} in {code.co_name}')
        frame = frame.f_back
    return "\n".join([*lines, ""])


def stack_file_name(rank: int, attempt: int) -> str:
    """Name of a rank's file within its node's folder."""
    return f"rank-{rank:05d}.attempt-{attempt:03d}.stack"


MAY_BE_ASKED = stat.S_IWUSR
"""This permission of a rank's file says that the handlers of both signals are still ours."""


_FATAL = "Fatal Python error: "
_THREAD = re.compile(r"^(?=(?:Current thread|Thread) 0x)", re.MULTILINE)
_C_STACK = "C stack trace (most recent call first)"
"""From Python 3.14 on."""
_C_LINE = re.compile(r'  Binary file "(?P<file>[^"]*)", at (?P<function>[^+\s]+)\+0x[0-9a-f]+ ')
_MOST_C_LINES = 8


class FatalStacks(NamedTuple):
    """What faulthandler has written when a fatal signal came, innermost calls first."""

    stack: list[StackLine]
    """Of the thread that got the signal. The names of native functions come first, as far as they are known: their
    lines are 0. [] if it has no Python, as a library's own thread, or left nothing."""
    main: list[StackLine]
    """Of the main thread, if that is another one."""


def parse_fatal(text: str, source: Callable[[str, int], str] = lambda file, line: "") -> FatalStacks:
    """The last fatal signal in what faulthandler has written; without any call if there is none.

    faulthandler writes the newest thread first, and the main thread last. (CPython, Python/traceback.c)
    """
    last = text.rfind(_FATAL)
    if last < 0:
        return FatalStacks([], [])
    python, _, native = text[last:].partition(_C_STACK)
    found = [
        StackLine(match["file"], 0, match["function"])
        for line in native.splitlines()
        if (match := _C_LINE.match(line)) is not None and "faulthandler" not in match["function"]
    ]
    threads = [(part.startswith("Current"), parse_stack(part, source)) for part in _THREAD.split(python)[1:]]
    current = next((stack for is_current, stack in threads if is_current), [])
    main = threads[-1][1] if threads and not threads[-1][0] else []
    return FatalStacks([*found[:_MOST_C_LINES], *current], main)


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


# torch's flight recorder of NCCL, as a rank writes it at our request: what its device was given, and has completed.
#
# torch keeps the last collectives of a process (`TORCH_FR_BUFFER_SIZE`), and gives them as a pickle of plain values. A
# rank answers while it waits for its device (worker/answers.py).
# (pytorch.org/tutorials/unstable/flight_recorder_tutorial.html)


def pipe_of(folder: Path, rank: int, attempt: int) -> Path:
    """What comes in there is a question. `folder` is that of the node's recorders."""
    return folder / f"rank-{rank:05d}.attempt-{attempt:03d}.nccl"


def file_of(folder: Path, rank: int, attempt: int) -> Path:
    """The answer."""
    return pipe_of(folder, rank, attempt).with_suffix(".dump")


@dataclass(frozen=True)
class DeviceProgress:
    """What one rank's device was given in a group, and has not completed."""

    enqueued: int = 0
    """Number of the last collective that it was given."""
    pending: int = 0
    """Number of the first operation that it has not completed, below 0 for a message; 0: none."""
    pending_ns: int = 0
    """When that was given to it, Unix time."""
    recent: dict[int, IssuedOperation] = field(default_factory=dict)
    """The last ones, by number."""


class _PlainValues(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain value")


def read_dump(data: bytes) -> dict[str, DeviceProgress] | None:
    """What torch has written, by the groups' names; None if it is not whole, or something else."""
    try:
        entries = _PlainValues(io.BytesIO(data)).load()["entries"]
        found: dict[str, list[_RecordedOperation]] = {}
        for one in entries:
            found.setdefault(str(one["process_group"][0]), []).append(_entry(one))
        return {name: _progress(of_group) for name, of_group in found.items()}
    except Exception:  # whatever was read there
        return None


@dataclass(frozen=True)
class _RecordedOperation:
    number: int
    """Below 0: of a message."""
    name: str
    is_done: bool
    when_ns: int
    issued: IssuedOperation


def _entry(one: Mapping[str, Any]) -> _RecordedOperation:
    name = str(one["profiling_name"]).removeprefix("nccl:")
    number = -int(one["p2p_seq_id"]) if one.get("is_p2p") else int(one["collective_seq_id"])
    operation, _, peers = name.partition(" ")
    known = operation.lstrip("_").replace("allgather", "all_gather")
    known = "barrier" if known.endswith("barrier") else known
    known = next((one for one in reversed(OPERATIONS) if one and known.startswith(one)), "")
    peer = int(peers[peers.index("-") + 2 :] if "->" in peers else peers[peers.index("<") + 2 :]) if peers else -1
    sizes, dtypes = one.get("input_sizes") or [[]], one.get("input_dtypes") or [""]
    issued = IssuedOperation(number, known, _DTYPES.get(dtypes[0], ""), math.prod(sizes[0]), peer)
    return _RecordedOperation(number, name, one["state"] == "completed", int(one["time_created_ns"]), issued)


_DTYPES = {
    **{"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Bool": "bool"},
    **{"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8"},
}
_BUNDLE = "coalesced"
"""The entry of a bundle of operations, which follows theirs and is the only one whose end torch sees."""


def _progress(entries: list[_RecordedOperation]) -> DeviceProgress:
    """A group's collectives and bundles run in the order of their issue; a message alone has its own stream."""
    ends = [
        place for place, entry in enumerate(entries) if entry.is_done and (entry.number > 0 or entry.name == _BUNDLE)
    ]
    waiting = [entry for entry in entries[ends[-1] + 1 if ends else 0 :] if not entry.is_done]
    collectives = [entry.number for entry in entries if entry.number > 0]
    first = waiting[0] if waiting else None
    recent = {entry.number: entry.issued for entry in entries if entry.number > 0}
    if first is not None:
        recent[first.number] = first.issued
    return DeviceProgress(
        enqueued=max(collectives, default=0),
        pending=first.number if first is not None else 0,
        pending_ns=first.when_ns if first is not None else 0,
        recent=recent,
    )


def with_device(
    groups: list[GroupState], devices: Mapping[str, DeviceProgress] | None, now_ns: int
) -> list[GroupState]:
    """What a rank shows of its groups, with what its device shows of them. `now_ns` is Unix time.

    A group whose collectives torch counts otherwise than its table does is left as it is. `devices` None: torch did
    not answer.
    """
    if devices is None:
        return groups
    return [_with_device(group, devices.get(group.name, _NOTHING), now_ns) for group in groups]


_NOTHING = DeviceProgress()


def _with_device(group: GroupState, device: DeviceProgress, now_ns: int) -> GroupState:
    if device.enqueued < group.begun:  # what C++ has begun last is in torch's recorder alone
        return group
    table = {issued.number: issued for issued in group.recent}
    numbers = {*sorted(device.recent)[-RECENT:], *([device.pending] if device.pending else [])}
    recent = [issued for issued in group.recent if issued.number < 0 and issued.number != device.pending]
    for number in sorted(numbers):
        shown, known = device.recent[number], table.get(number)
        # the table has the root as well
        recent.append(known if known is not None and known.operation == shown.operation else shown)
    ended = device.pending - 1 if device.pending > 0 else group.ended if device.pending else device.enqueued
    return replace(
        group,
        begun=device.enqueued,
        ended=ended,
        recent=recent,
        pending=device.pending,
        pending_s=round(max(0, now_ns - device.pending_ns) / 1e9, 1) if device.pending else 0.0,
    )
