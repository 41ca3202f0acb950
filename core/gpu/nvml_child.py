"""Asks NVML through a child process. There is an answer at the deadline, whatever the driver does."""

from __future__ import annotations

import os
import queue
import selectors
import subprocess
import sys
import threading
import time
from typing import Any

import msgspec

from ..own_imports import own_command
from .lines import (
    AskCounters,
    AskSamples,
    ChildAnswer,
    CountersLine,
    Line,
    NvmlStarted,
    NvmlTrouble,
    XidLine,
    XidWatch,
    parse,
)

KILLED_S = 1.0
"""How long a killed child may take to end. A child that is stuck in the driver ends when the driver lets it."""


def command(*arguments: str) -> list[str]:
    """The command line of the child."""
    return own_command(__package__, *arguments)


def ask_nvml(devices: list[str], deadline_s: float, *, loaded: bool = False) -> ChildAnswer:
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
    answer = ChildAnswer()
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


def _follow(child: subprocess.Popen[bytes], answer: ChildAnswer, end: float) -> bool:
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


# How a child begins: it loads and initialises NVML, or says why not. And how it prints its lines.

_TODO = {
    "old": "Update the NVIDIA driver, or install the nvidia-ml-py of its time.",
    "absent": "It comes with the NVIDIA driver; in a container, start it with the `utility` driver capability.",
    "permission": "Ask whoever looks after the node for access to /dev/nvidiactl.",
    "driver": "Load the NVIDIA driver, or look at the kernel log for why it is not (dmesg).",
    "mismatch": "Reboot the node, or reload the driver: its library is of another version than its kernel module.",
}

_lock = threading.Lock()


def say(line: Line) -> None:
    """Print one line for the parent process."""
    with _lock:
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()


def start() -> NvmlStarted | NvmlTrouble:
    """Load and initialise NVML."""
    try:
        import pynvml

        from .nvml import NotKnown, ask, text
    except ImportError as error:
        return NvmlTrouble(f"nvidia-ml-py cannot be imported: {error}", "Install it: pip install nvidia-ml-py.")
    try:
        ask("nvmlInit")
    except NotKnown as error:
        what, todo = {
            pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: ("NVML is not on this host (libnvidia-ml.so.1)", _TODO["absent"]),
            pynvml.NVML_ERROR_NO_PERMISSION: ("NVML may not be used here (permission denied)", _TODO["permission"]),
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED: ("the NVIDIA driver is not loaded", _TODO["driver"]),
            pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
                "NVML is of another version than the driver",
                _TODO["mismatch"],
            ),
            pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: (f"NVML is too old: {error}", _TODO["old"]),
        }.get(error.code or 0, (f"NVML cannot be initialised: {error}", ""))
        return NvmlTrouble(what, todo)
    return NvmlStarted(text("nvmlSystemGetDriverVersion"), text("nvmlSystemGetNVMLVersion"))


# The watching child. It registers for XIDs before the training, prints each, and reads counters when asked on stdin.
#
# NVML has no history of XIDs. It is only called in threads: one waits for events, one reads counters, one samples. The
# main thread reads stdin, so that its end ends this process even when the driver hangs.

_WAIT_MS = 1000
_NO_INSTANCE = 0xFFFFFFFF
_XID_EVENT = 8
"""nvmlEventTypeXidCriticalError"""


def watch() -> None:
    """Until stdin is closed."""
    questions: queue.SimpleQueue[AskCounters] = queue.SimpleQueue()
    samples: queue.SimpleQueue[AskSamples] = queue.SimpleQueue()
    threading.Thread(target=_begin, args=(questions, samples), daemon=True).start()
    decoder: msgspec.json.Decoder[AskCounters | AskSamples] = msgspec.json.Decoder(AskCounters | AskSamples)
    for line in sys.stdin.buffer:
        question = decoder.decode(line)
        if isinstance(question, AskSamples):
            samples.put(question)
        else:
            questions.put(question)
    os._exit(0)  # the threads may be in a driver that never returns


def _begin(questions: queue.SimpleQueue[AskCounters], samples: queue.SimpleQueue[AskSamples]) -> None:
    begun = start()
    if isinstance(begun, NvmlTrouble):
        say(begun)
        return
    from .nvml import NotKnown, ask, handles, text, uuid_of

    try:
        found, unwatched = handles()
        devices = {uuid_of(handle): handle for handle in found}
        events = ask("nvmlEventSetCreate")
    except NotKnown as error:
        say(NvmlTrouble(f"NVML does not let events be watched: {error}"))
        return
    for uuid, handle in devices.items():
        try:
            ask("nvmlDeviceRegisterEvents", handle, _XID_EVENT, events)
        except NotKnown as error:
            unwatched[uuid] = str(error)
    names = {uuid: text("nvmlDeviceGetName", handle) for uuid, handle in devices.items()}
    say(XidWatch(begun.driver, names, unwatched))
    if devices.keys() - unwatched.keys():
        threading.Thread(target=_tell_xids, args=(events, devices), daemon=True).start()
    threading.Thread(target=_tell_samples, args=(samples, devices), daemon=True).start()
    while True:
        _tell_counters(questions.get().moment, devices)


def _tell_xids(events: Any, devices: dict[str, Any]) -> None:
    from .nvml import NotKnown, address_of, ask

    by_address = {address_of(handle): uuid for uuid, handle in devices.items()}
    while True:
        try:
            event = ask("nvmlEventSetWait", events, _WAIT_MS)
        except NotKnown as error:
            if error.is_timeout:
                continue
            if not error.gpu_is_lost:
                say(NvmlTrouble(f"NVML does not wait for events any more: {error}"))
                return
            time.sleep(_WAIT_MS / 1000)  # one of them is lost; the others are still watched
            continue
        if event.eventType == _XID_EVENT:
            mig = ""
            if event.gpuInstanceId != _NO_INSTANCE:
                mig = f"{event.gpuInstanceId}/{event.computeInstanceId}"
            uuid = by_address.get(address_of(event.device), "")
            say(XidLine(uuid, int(event.eventData), time.time_ns(), mig))


def _tell_samples(samples: queue.SimpleQueue[AskSamples], devices: dict[str, Any]) -> None:
    from .questions import GpuSampler

    samplers = {uuid: GpuSampler(uuid, handle) for uuid, handle in devices.items()}
    while True:
        samples.get()
        for left, sampler in zip(range(len(samplers))[::-1], samplers.values(), strict=True):
            say(sampler.sample(time.monotonic(), last=not left))


def _tell_counters(moment: str, devices: dict[str, Any]) -> None:
    from .questions import migs_of, read_counters

    left = len(devices)
    for uuid, handle in devices.items():
        left -= 1
        asked = read_counters(handle)
        line = CountersLine(uuid, moment, time.time_ns(), asked.values, asked.unknown, migs_of(handle), last=not left)
        say(line)
