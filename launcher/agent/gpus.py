"""The node agent's eyes on its GPUs: holds the child that watches NVML, and turns its lines into events.

    agent --{"moment":"anomaly"}--> child
    agent <--{"type":"xid","device":"GPU-...","number":79,...}-- child          an event, as it is sent on

The child is started once. Should it die or not answer, that is said once, as `unknown`, and the training goes on:
nothing here ever waits for it.
"""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress

from ...core.events.node_events import GpuCounters, GpuHealth, GpuXid
from ...core.gpu import nvml_child
from ...core.host import LineReader
from ...core.text import messages_among
from ...core.wire.pipe import write_line

BEGIN_S = 30.0
"""How long NVML may take to start: on a big node without the persistence daemon it is many seconds."""
ANSWER_S = 10.0
"""How long it may take to read the counters of all GPUs."""
END_S = 3.0
"""How long the end of a run waits for the last counters."""
AGAIN_S = 5.0
"""Anomalies that follow one another within this time are one reason to read the counters."""

Event = GpuXid | GpuCounters | GpuHealth


class GpuWatch:
    """The GPUs of one node. `now` is monotonic time in seconds."""

    def __init__(self, now: float) -> None:
        self._events: list[Event] = []
        self._began = now
        self._watching: nvml_child.XidWatch | None = None
        self._asked: list[tuple[str, float]] = []
        """Moments that are not answered yet, and when they were asked."""
        self._samples: list[nvml_child.SampleLine] = []
        self._last_anomaly = -AGAIN_S
        self._killed: subprocess.Popen[bytes] | None = None
        """Stuck in the driver, it goes when the driver lets it."""
        self._child: subprocess.Popen[bytes] | None = None
        try:
            self._child = subprocess.Popen(
                nvml_child.command("--watch"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            assert self._child.stdout is not None
            self._output = LineReader(self._child.stdout.fileno())
        except OSError as error:
            self._unknown(f"the process that watches NVML could not be started: {error}")

    @property
    def fd(self) -> int | None:
        """Where the child speaks, to be polled; None once there is nothing more to hear."""
        return self._output.fd if self._child is not None else None

    def on_message(self) -> None:
        """There is something to read at `fd`."""
        for line in messages_among(self._output.lines(), nvml_child.LINES):
            self._take(line)
        if self._output.closed and self._child is not None:
            code = self._child.poll()
            self._give_up(f"the process that watches NVML has ended{'' if code is None else f' (exit code {code})'}")

    def anomaly(self, now: float) -> None:
        """A rank has met a non-finite value: what do the counters say?"""
        if now - self._last_anomaly >= AGAIN_S:
            self._last_anomaly = now
            self._ask("anomaly", now)

    def ask_samples(self) -> bool:
        """Whether NVML was asked how the GPUs do. It is not while it starts, without GPUs, and once it was given up."""
        return self._tell("")

    def samples(self) -> list[nvml_child.SampleLine] | None:
        """The samples of all GPUs that `ask_samples` asked for; None until they are complete."""
        if not self._samples or not self._samples[-1].last:
            return None
        samples, self._samples = self._samples, []
        return samples

    def end(self, now: float) -> None:
        """The ranks have ended: read the counters for the last time."""
        self._ask("end", now)

    def settled(self, now: float) -> bool:
        """Whether the last counters have arrived, or are overdue and given up."""
        return not any(moment == "end" and now - asked < END_S for moment, asked in self._asked)

    def tick(self, now: float) -> None:
        """Notice a child that does not answer."""
        self._reap(0.0)
        if self._child is None:
            return
        if self._watching is None and now - self._began > BEGIN_S:
            self._give_up(f"NVML did not start within {BEGIN_S:.0f} s")
        elif self._asked and now - self._asked[0][1] > ANSWER_S:
            self._give_up(f"NVML did not give its counters within {ANSWER_S:.0f} s")

    def events(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def close(self, wait_s: float = 0.0) -> None:
        """End the child. Only the end of the agent waits for it, and not for long: it may be stuck in the driver."""
        child, self._child = self._child, None
        self._asked.clear()
        if child is not None:
            for pipe in (child.stdin, child.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):
                    pipe.close()
            child.kill()
            self._killed = child
        self._reap(wait_s)

    def _reap(self, wait_s: float) -> None:
        if self._killed is not None:
            with suppress(subprocess.TimeoutExpired):
                self._killed.wait(wait_s)
                self._killed = None

    def _ask(self, moment: str, now: float) -> None:
        if self._tell(moment):
            self._asked.append((moment, now))

    def _tell(self, moment: str) -> bool:
        if self._child is None or self._watching is None or not self._watching.devices:
            return False
        assert self._child.stdin is not None
        # if its input is closed, `hear` will meet the end of its output
        return write_line(self._child.stdin, nvml_child.AskGpus(moment))

    def _take(self, line: nvml_child.Line) -> None:
        if isinstance(line, nvml_child.XidWatch):
            self._watching = line
            detail = f"watching {len(line.devices)} GPU(s) for XIDs" if line.devices else "NVML shows no GPU here"
            grade = "ok" if line.devices and not line.unwatched else "unknown"
            if line.unwatched:
                detail += f"; not {', '.join(f'{uuid} ({why})' for uuid, why in line.unwatched.items())}"
            self._events.append(GpuHealth(grade, detail, line.driver, line.devices, line.unwatched, time.time_ns()))
            self._ask("before", time.monotonic())
        elif isinstance(line, nvml_child.NvmlTrouble):
            self._give_up(line.why)
        elif isinstance(line, GpuXid):
            self._events.append(line)
        elif isinstance(line, nvml_child.SampleLine):
            self._samples.append(line)
        elif isinstance(line, nvml_child.CountersLine):
            self._events.append(line.event)
            if line.last:
                self._asked = [asked for asked in self._asked if asked[0] != line.event.moment]

    def _unknown(self, why: str) -> None:
        devices = self._watching.devices if self._watching is not None else {}
        self._events.append(GpuHealth("unknown", why, devices=devices, time_ns=time.time_ns()))

    def _give_up(self, why: str) -> None:
        """Said once: after that there is no child."""
        self._unknown(why)
        self.close()
