"""A node's telemetry: when its figures are read, kept and sent. No socket.

    every few seconds  --> a thread reads the host      --.
                       --> the child of gpus.py asks NVML --> one sample, in the record of the node

A source that does not answer holds up nothing: samples go on without its figures, and the report says so.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy

from ...core.gpu.nvml_child import SampleLine
from ...core.guest.threads import start_thread
from ...core.wire.beat import GpuNow, HostNow
from ...core.wire.columns import pack_samples
from ...core.wire.messages import SeriesName, TelemetryMessage
from .batch_history import spread, thinned
from .gpus import GpuWatch
from .host_figures import Values, read_cgroup, read_disks, read_host, read_infiniband, read_ranks

Pids = Sequence[tuple[int, int]]
"""(rank, pid)"""


# The samples of one node, in bounded memory for any length of run: the older, the further apart. Pure.
#
# A count is kept as it stood, so its growth over a gap is known however many samples in it were dropped. A level is
# known only at the kept samples.

NEWEST = 64
"""The newest samples, each of which is kept; of those before, one of 2, of 4, and so on, 32 of each."""
MOST_SERIES = 512
SENT_BYTES = 128 << 10
"""Before it is packed."""


class _TelemetrySample(NamedTuple):
    number: int
    time_ns: int
    values: array[float]
    """By series; those that were not known yet are not in it."""


class NodeRecord:
    """The samples of one node, since its agent began."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], int] = {}
        self._samples: list[_TelemetrySample] = []
        self._taken = 0

    def add(self, time_ns: int, values: Values) -> None:
        """A sample, by the host's own clock."""
        for name in values:
            if name not in self._series and len(self._series) < MOST_SERIES:
                self._series[name] = len(self._series)
        row = array("d", [math.nan]) * len(self._series)
        for name, value in values.items():
            if name in self._series:
                row[self._series[name]] = value
        self._samples.append(_TelemetrySample(self._taken, time_ns, row))
        self._taken += 1
        if self._taken % NEWEST == 0:
            self._samples = thinned(self._samples, lambda sample: sample.number, NEWEST)

    def message(self, sent_ns: int, troubles: list[str]) -> TelemetryMessage | None:
        """All of it; None if there is nothing."""
        samples = _ascending(spread(self._samples, max(8, SENT_BYTES // (8 + 4 * max(1, len(self._series))))))
        if not samples or not self._series:
            return None
        table = numpy.full((len(samples), len(self._series)), numpy.nan)
        for n, sample in enumerate(samples):
            table[n, : len(sample.values)] = sample.values
        return TelemetryMessage(
            samples[0].time_ns,
            sent_ns,
            [SeriesName(of, what) for of, what in self._series],
            pack_samples([sample.time_ns for sample in samples], table, [what for _, what in self._series]),
            troubles,
        )


def _ascending(samples: list[_TelemetrySample]) -> list[_TelemetrySample]:
    """The samples without those out of order, as a clock that was set back leaves them."""
    found: list[_TelemetrySample] = []
    for sample in samples:
        while found and found[-1].time_ns > sample.time_ns:
            found.pop()
        found.append(sample)
    return found


AGAIN_S = 60.0
"""From a stall or an overflow to the next one that is worth a message of its own; each time twice as long."""
SILENT_S = 10.0
"""The report names a source that has not answered for this long."""


class NodeTelemetry:
    """One node's telemetry. `now` is monotonic time in seconds; `interval_s` 0: reads nothing, and sends nothing."""

    def __init__(
        self,
        interval_s: float,
        folders: dict[str, Path],
        gpus: GpuWatch,
        *,
        read: Callable[[Pids], Values] | None = None,
        time_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._interval_s = interval_s
        self._gpus = gpus
        self._time_ns = time_ns
        self._read = read or (  # disks last, which may never answer
            lambda pids: read_host() | read_cgroup() | read_ranks(pids) | read_infiniband() | read_disks(folders)
        )
        self._answers: deque[Values] = deque()
        """The host's, as long as nobody has taken them."""
        self._record = NodeRecord()
        self._next = 0.0
        self._asked_ns = 0
        """When the sample was begun that is not complete; 0: there is none."""
        self._values: Values = {}
        """The figures of that sample so far."""
        self._waits: dict[str, float] = {}
        """Source -> when it was asked. A source that has not answered is not asked again."""
        self._troubles: dict[str, str] = {}
        self.gpus_now: list[GpuNow] = []
        """As NVML found them last; none where there is no GPU, or NVML does not answer."""
        self.host_now = HostNow()
        self._cpu_before = math.nan, math.nan
        """When the processors' count was read last, in seconds, and what it was."""
        self._again_s = AGAIN_S
        self._told_at: float | None = None

    def turn(self, pids: Callable[[], Pids], now: float) -> None:
        """Take the answers that have arrived, and ask again if it is time. `pids` gives the running (rank, pid)."""
        if self._interval_s == 0:
            return
        try:
            self._take()
            if not self._waits or now >= self._next:
                self._close_sample()
            if now >= self._next:
                self._next = now + self._interval_s
                self._ask(pids(), now)
        except Exception as error:  # such as a limit on threads: the agent goes on without it
            self._troubles["own"] = f"reading stopped: {type(error).__name__}: {error}"
            self._interval_s = 0

    def _ask(self, pids: Pids, now: float) -> None:
        self._asked_ns = self._time_ns()
        for name, since in self._waits.items():
            if now - since >= SILENT_S:
                self._troubles[name] = f"{_WHO[name]} did not answer for {now - since:.0f} s"
                self.gpus_now = [] if name == "gpus" else self.gpus_now
        if "host" not in self._waits:
            if not start_thread(lambda: self._read_host(pids)):  # a file system that does not answer stops it alone
                raise RuntimeError("no thread can be started")
            self._waits["host"] = now
        if "gpus" not in self._waits and self._gpus.ask_samples():
            self._waits["gpus"] = now

    def _read_host(self, pids: Pids) -> None:
        values: Values = {}
        try:
            values = self._read(pids)
        except Exception as error:
            self._troubles["own"] = f"the host's figures could not be read: {type(error).__name__}: {error}"
        self._answers.append(values)

    def _take(self) -> None:
        if self._answers:
            values = self._answers.popleft()
            self._values.update(values)
            self.host_now = self._host_now(values)
            del self._waits["host"]
        lines = self._gpus.samples()
        if lines is not None and "gpus" in self._waits:
            del self._waits["gpus"]
            self.gpus_now = [_gpu_now(line) for line in lines]
            for line in lines:
                self._values.update({(line.device, what): value for what, value in line.values.items()})
                if line.trouble:
                    self._troubles[line.device] = f"NVML has no figures of {line.device}: {line.trouble}"

    def _host_now(self, values: Values) -> HostNow:
        cpu, used, total = (values.get(("", what), math.nan) for what in _OF_HOST_NOW)
        (before_s, before), self._cpu_before = self._cpu_before, (self._asked_ns / 1e9, cpu)
        elapsed_s = self._cpu_before[0] - before_s
        return HostNow(
            min(1.0, max(0.0, (cpu - before) / elapsed_s)) if elapsed_s > 0 and cpu >= before else -1.0,
            used / total if total > 0 else -1.0,
        )

    def _close_sample(self) -> None:
        if self._asked_ns and self._values:
            self._record.add(self._asked_ns, self._values)
        self._asked_ns, self._values = 0, {}

    def told(self, now: float) -> TelemetryMessage | None:
        """What to send because of a stall or an anomaly; None if the last one was not long ago, or nothing is known."""
        if self._told_at is not None and now - self._told_at < self._again_s:
            return None
        message = self._message()
        if message is not None:
            self._again_s *= 1 if self._told_at is None else 2
            self._told_at = now
        return message

    def ended(self) -> TelemetryMessage | None:
        """What to send when the run has ended; None if nothing is known."""
        return self._message()

    def _message(self) -> TelemetryMessage | None:
        self._close_sample()
        with suppress(Exception):  # it decides nothing
            return self._record.message(self._time_ns(), list(self._troubles.values()))
        return None


def _gpu_now(line: SampleLine) -> GpuNow:
    total = line.values.get("gpu_memory_total", 0.0)
    memory = line.values.get("gpu_memory_used", 0.0) / total if total > 0 else -1.0
    figures = (line.values.get(what, -1.0) for what in ("temperature", "power"))
    return GpuNow(line.device, line.values.get("gpu_use", -1.0), memory, *figures)


_OF_HOST_NOW = ("cpu", "memory_used", "memory_total")
_WHO = {"host": "the host's own files, or a file system,", "gpus": "NVML"}
