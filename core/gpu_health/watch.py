"""The watching child. It registers for XIDs before the training, prints each, and reads counters when asked on stdin.

NVML has no history of XIDs. It is only called in threads: one waits for events, one reads counters, one samples. The
main thread reads stdin, so that its end ends this process even when the driver hangs.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from typing import Any

import msgspec

from .facts import AskCounters, AskSamples, CountersLine, Trouble, Watching, XidLine
from .start import say, start

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
    if isinstance(begun, Trouble):
        say(begun)
        return
    from .nvml import NotKnown, ask, handles, text, uuid_of

    try:
        found, unwatched = handles()
        devices = {uuid_of(handle): handle for handle in found}
        events = ask("nvmlEventSetCreate")
    except NotKnown as error:
        say(Trouble(f"NVML does not let events be watched: {error}"))
        return
    for uuid, handle in devices.items():
        try:
            ask("nvmlDeviceRegisterEvents", handle, _XID_EVENT, events)
        except NotKnown as error:
            unwatched[uuid] = str(error)
    names = {uuid: text("nvmlDeviceGetName", handle) for uuid, handle in devices.items()}
    say(Watching(begun.driver, names, unwatched))
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
                say(Trouble(f"NVML does not wait for events any more: {error}"))
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
    from .sample import GpuSampler

    samplers = {uuid: GpuSampler(uuid, handle) for uuid, handle in devices.items()}
    while True:
        samples.get()
        for left, sampler in zip(range(len(samplers))[::-1], samplers.values(), strict=True):
            say(sampler.sample(time.monotonic(), last=not left))


def _tell_counters(moment: str, devices: dict[str, Any]) -> None:
    from .reading import migs_of, read_counters

    left = len(devices)
    for uuid, handle in devices.items():
        left -= 1
        asked = read_counters(handle)
        line = CountersLine(uuid, moment, time.time_ns(), asked.values, asked.unknown, migs_of(handle), last=not left)
        say(line)
