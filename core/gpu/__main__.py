"""The child process that talks to NVML. A driver that hangs blocks only this process.

A hung driver can keep this process from being killed. So its parent waits for its lines, never for its end.
"""

from __future__ import annotations

import argparse
import os
import queue
import sys
import threading
import time
from typing import Any

import msgspec

from ..events.node_events import GpuCounters, GpuXid
from ..text import from_json
from .counters import meaning_of
from .nvml_child import (
    AskGpus,
    CountersLine,
    GpuReading,
    NvmlFinished,
    NvmlQuestion,
    NvmlStarted,
    NvmlTrouble,
    XidWatch,
)

_REFUSALS = {
    "LIBRARY_NOT_FOUND": (
        "NVML is not on this host (libnvidia-ml.so.1)",
        "It comes with the NVIDIA driver; in a container, start it with the `utility` driver capability.",
    ),
    "NO_PERMISSION": (
        "NVML may not be used here (permission denied)",
        "Ask the node's administrator for access to /dev/nvidiactl.",
    ),
    "DRIVER_NOT_LOADED": (
        "the NVIDIA driver is not loaded",
        "Load the NVIDIA driver, or look at the kernel log for why it is not (dmesg).",
    ),
    "LIB_RM_VERSION_MISMATCH": (
        "NVML and the driver have different versions",
        "Reboot the node, or reload the driver: its library and its kernel module have different versions.",
    ),
    "FUNCTION_NOT_FOUND": (
        "NVML is too old: {error}",
        "Update the NVIDIA driver, or install an nvidia-ml-py release as old as the driver.",
    ),
}
"""Why NVML cannot be initialised, by its error (NVML_ERROR_...), and what to do."""

_lock = threading.Lock()


def say(line: msgspec.Struct) -> None:
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
        for name, (what, todo) in _REFUSALS.items():
            if error.code == getattr(pynvml, f"NVML_ERROR_{name}"):
                return NvmlTrouble(what.format(error=error), todo)
        return NvmlTrouble(f"NVML cannot be initialised: {error}")
    return NvmlStarted(text("nvmlSystemGetDriverVersion"))


def read(devices: list[str], loaded: bool) -> None:
    """One reading, as lines."""
    say(NvmlQuestion("its start"))
    begun = start()
    say(begun)
    if isinstance(begun, NvmlTrouble):
        return
    from .nvml import NotKnown, handle_of, handles, text, uuid_of
    from .questions import ask_group, questions

    say(NvmlQuestion("its devices"))
    found = {}
    try:
        wanted = devices or [uuid_of(handle) for handle in handles()[0]]
    except NotKnown as error:
        say(NvmlTrouble(f"NVML does not list its devices: {error}"))
        return
    for uuid in wanted:
        say(NvmlQuestion("its name", uuid))
        try:
            found[uuid] = handle_of(uuid)
            say(GpuReading(uuid, name=text("nvmlDeviceGetName", found[uuid])))
        except NotKnown as error:
            lost = {"lost": 1} if error.gpu_is_lost else {}
            say(GpuReading(uuid, lost, {} if lost else {"lost": f"NVML has no such device: {error}"}))
    for uuid, handle in found.items():
        for what, group in questions(loaded):
            say(NvmlQuestion(what, uuid))
            say(ask_group(uuid, handle, group))
    say(NvmlFinished())


# The watching child. It registers for XIDs before the training, prints each, and reads counters when asked on stdin.
#
# NVML has no history of XIDs. It is only called in threads: one waits for events, one reads counters, one samples. The
# main thread reads stdin, so that its end ends this process even when the driver hangs.

_WAIT_MS = 1000
_NO_INSTANCE = 0xFFFFFFFF
_XID_EVENT = 8
"""nvmlEventTypeXidCriticalError"""
_TIMEOUT = 10
"""NVML_ERROR_TIMEOUT: nothing has happened"""


def watch() -> None:
    """Until stdin is closed."""
    questions: queue.SimpleQueue[str] = queue.SimpleQueue()
    samples: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_begin, args=(questions, samples), daemon=True).start()
    for line in sys.stdin.buffer:
        moment = from_json(line, AskGpus).moment
        (questions if moment else samples).put(moment)
    os._exit(0)  # the threads may be in a driver that never returns


def _begin(questions: queue.SimpleQueue[str], samples: queue.SimpleQueue[str]) -> None:
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
        say(NvmlTrouble(f"NVML refuses to watch events: {error}"))
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
        _tell_counters(questions.get(), devices)


def _tell_xids(events: Any, devices: dict[str, Any]) -> None:
    from .nvml import NotKnown, address_of, ask

    by_address = {address_of(handle): uuid for uuid, handle in devices.items()}
    while True:
        try:
            event = ask("nvmlEventSetWait", events, _WAIT_MS)
        except NotKnown as error:
            if error.code == _TIMEOUT:
                continue
            if not error.gpu_is_lost:
                say(NvmlTrouble(f"NVML no longer waits for events: {error}"))
                return
            time.sleep(_WAIT_MS / 1000)  # one of them is lost; the others are still watched
            continue
        if event.eventType == _XID_EVENT:
            whole = event.gpuInstanceId == _NO_INSTANCE
            mig = "" if whole else f"{event.gpuInstanceId}/{event.computeInstanceId}"
            uuid, number = by_address.get(address_of(event.device), ""), int(event.eventData)
            say(GpuXid(uuid, number, time.time_ns(), *meaning_of(number), mig))


def _tell_samples(samples: queue.SimpleQueue[str], devices: dict[str, Any]) -> None:
    from .questions import GpuSampler

    samplers = {uuid: GpuSampler(uuid, handle) for uuid, handle in devices.items()}
    while True:
        samples.get()
        for left, sampler in zip(range(len(samplers))[::-1], samplers.values(), strict=True):
            say(sampler.sample(time.monotonic(), last=not left))


def _tell_counters(moment: str, devices: dict[str, Any]) -> None:
    from .nvml import mig_devices
    from .questions import read_counters

    for left, (uuid, handle) in zip(range(len(devices))[::-1], devices.items(), strict=True):
        asked = read_counters(handle)
        event = GpuCounters(uuid, moment, asked.values, asked.unknown, time.time_ns(), mig_devices(handle))
        say(CountersLine(event, last=not left))


def main() -> int:
    """Entry."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", action="append", default=[], help="UUID; default: all")
    loaded = "the GPU is under load: read its clocks and its PCIe link, and nothing else"
    parser.add_argument("--loaded", action="store_true", help=loaded)
    watched = "print XIDs as they arrive, and counters when asked on stdin"
    parser.add_argument("--watch", action="store_true", help=watched)
    options = parser.parse_args()
    if options.watch:
        watch()
    else:
        read(options.device, options.loaded)
    return 0


if __name__ == "__main__":
    sys.exit(main())
