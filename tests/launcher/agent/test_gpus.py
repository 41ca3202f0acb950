"""The agent's watch over its GPUs: a real child, real ctypes, and a stand-in for the driver's library."""

from __future__ import annotations

import os
import select
import time

import psutil
import pytest
from gpuwatch.core.events.node_events import GpuCounters, GpuHealth, GpuXid
from gpuwatch.core.gpu.counters import since_preflight
from gpuwatch.launcher.agent.gpus import ANSWER_S, BEGIN_S, END_S, GpuWatch

from ...waiting import WAIT_S, until

pytestmark = pytest.mark.quick_here(4)


class Watched:
    """Polls as the agent does."""

    def __init__(self) -> None:
        self.watch = GpuWatch(time.monotonic())
        self.seen: list = []

    def until(self, condition):
        """Everything that was seen, once `condition` holds for it."""

        def hear() -> bool:
            fd = self.watch.fd
            if fd is None:
                self.seen += self.watch.events()
                assert condition(self.seen), self.seen
            elif select.select([fd], [], [], 0.5)[0]:
                self.watch.on_message()
            self.seen += self.watch.events()
            return condition(self.seen)

        until(lambda: condition(self.seen) or hear(), "what is asked of the GPUs", lambda: self.seen, look_s=0)
        return self.seen

    def counters(self, moment: str, gpus: int = 2):
        def complete(seen):
            return sum(isinstance(event, GpuCounters) and event.moment == moment for event in seen) == gpus

        return [event for event in self.until(complete) if isinstance(event, GpuCounters) and event.moment == moment]


@pytest.fixture
def start():
    started: list[Watched] = []

    def start() -> Watched:
        started.append(Watched())
        return started[-1]

    yield start
    for watched in started:
        watched.watch.close(WAIT_S)


def kinds(events, kind):
    return [event for event in events if isinstance(event, kind)]


def test_it_says_what_it_watches_and_reads_the_counters_before_the_training(nvml, start):
    nvml.says("1 pcie_replays 3", "0 mig_mode 1", "0 mig_room 7")
    watched = start()
    first, second = watched.counters("before")
    (health,) = kinds(watched.seen, GpuHealth)
    assert (health.grade, health.driver, list(health.devices)) == ("ok", "580.95.05", list(nvml.gpus))
    assert (first.device, second.device) == nvml.gpus
    assert second.counters["pcie_replays"] == 3
    assert (first.mig, second.mig) == (list(nvml.migs), [])


def test_an_xid_becomes_an_event_with_its_meaning_on_the_gpu_that_it_is_of(nvml, start):
    watched = start()
    watched.counters("before")
    before = time.time_ns()
    nvml.says("1 xid 79")
    (lost,) = kinds(watched.until(lambda seen: kinds(seen, GpuXid)), GpuXid)
    assert (lost.device, lost.number, lost.grade) == (nvml.gpus[1], 79, "fail")
    assert lost.meaning == "GPU has fallen off the bus"
    assert "restart" in lost.next
    assert before <= lost.time_ns <= time.time_ns()
    nvml.says("1 xid 79", "0 xid 13 3/1")
    second = kinds(watched.until(lambda seen: len(kinds(seen, GpuXid)) == 2), GpuXid)[1]
    assert (second.device, second.grade, second.mig) == (nvml.gpus[0], "ok", "3/1")


def test_counters_are_read_again_after_an_anomaly_and_at_the_end(nvml, start):
    watched = start()
    watched.counters("before")
    nvml.says("0 ecc_uncorrected_volatile 1")
    watched.watch.anomaly(100.0)
    watched.watch.anomaly(101.0)  # the same one, on another rank
    watched.counters("anomaly")
    nvml.says("0 ecc_uncorrected_volatile 2", "0 remap_pending 1")
    now = time.monotonic()
    watched.watch.end(now)
    assert not watched.watch.settled(now)
    watched.counters("end")
    assert watched.watch.settled(now)
    assert len(kinds(watched.seen, GpuCounters)) == 6, "asked once for an anomaly"
    sick, well = (since_preflight(watched.seen, uuid) for uuid in nvml.gpus)
    assert [change.sentence for change in sick.changes] == [
        "uncorrectable ECC errors: 0 -> 2",
        "memory row waits for a reset to be remapped: 0 -> 1",
    ]
    assert (well.known, well.changes, well.unknown) == (True, [], {})


@pytest.mark.parametrize(
    ("line", "why"),
    [("* init error 4", "permission denied"), ("* init error 9", "driver is not loaded")],
)
def test_nvml_that_does_not_start_is_said_once_and_nothing_waits_for_it(nvml, start, line, why):
    nvml.says(line)
    watched = start()
    (health,) = watched.until(lambda seen: seen)
    assert health.grade == "unknown"
    assert why in health.detail
    assert watched.watch.fd is None
    watched.watch.anomaly(1.0)
    watched.watch.end(2.0)
    watched.watch.tick(1e9)
    assert watched.watch.settled(2.0)
    assert watched.watch.events() == []


def test_a_driver_too_old_to_start_is_said_once(nvml, start):
    nvml.use("ANCIENT")
    (health,) = start().until(lambda seen: seen)
    assert (health.grade, health.detail) == ("unknown", "NVML is too old: this driver has no nvmlInit")


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this host has NVML")  # noqa: PTH110  # a condition
def test_without_nvml_it_is_said_once(start):
    (health,) = start().until(lambda seen: seen)
    assert (health.grade, health.detail) == ("unknown", "NVML is not on this host (libnvidia-ml.so.1)")


def test_a_driver_that_hangs_at_its_start_is_given_up(nvml, start):
    nvml.says("* init hang")
    watched = start()
    now = time.monotonic()
    watched.watch.end(now)
    assert watched.watch.settled(now), "nobody waits for the last counters of GPUs that were never seen"
    watched.watch.tick(now + 1)
    assert watched.watch.fd is not None
    watched.watch.tick(now + BEGIN_S + 1)
    (health,) = watched.watch.events()
    assert (health.grade, health.detail) == ("unknown", f"NVML did not start within {BEGIN_S:.0f} s")
    assert watched.watch.fd is None


def test_a_driver_that_hangs_later_is_given_up_and_xids_are_told_until_then(nvml, start):
    watched = start()
    watched.counters("before")
    nvml.says("0 recovery_action hang")
    now = time.monotonic()
    watched.watch.end(now)
    nvml.says("0 recovery_action hang", "1 xid 119")
    (xid,) = kinds(watched.until(lambda seen: kinds(seen, GpuXid)), GpuXid)
    assert xid.number == 119
    assert not watched.watch.settled(now + END_S - 0.1)
    assert watched.watch.settled(now + END_S + 0.1)
    watched.watch.tick(now + ANSWER_S + 1)
    (health,) = watched.watch.events()
    assert "did not give its counters" in health.detail
    assert health.devices, "it is said of whom"


def test_a_child_that_dies_is_said_once_and_not_started_again(nvml, start):
    watched = start()
    watched.counters("before")
    (child,) = [process for process in psutil.Process().children() if "--watch" in process.cmdline()]
    child.kill()
    events = watched.until(lambda seen: len(kinds(seen, GpuHealth)) == 2)
    assert "has ended" in kinds(events, GpuHealth)[1].detail
    assert watched.watch.fd is None
    watched.watch.tick(1e9)
    watched.watch.end(1e9)
    assert watched.watch.events() == []


def test_a_gpu_that_refuses_events_is_named_and_the_others_are_watched(nvml, start):
    nvml.says("0 register error 3")
    watched = start()
    (health,) = kinds(watched.until(lambda seen: kinds(seen, GpuHealth)), GpuHealth)
    assert (health.grade, health.unwatched) == ("unknown", {nvml.gpus[0]: "Not Supported"})
    nvml.says("0 register error 3", "1 xid 31")
    (xid,) = kinds(watched.until(lambda seen: kinds(seen, GpuXid)), GpuXid)
    assert xid.device == nvml.gpus[1]


def test_a_host_without_gpus_has_nothing_to_watch(nvml, start):
    nvml.says("* count 0")
    watched = start()
    (health,) = watched.until(lambda seen: seen)
    assert (health.grade, health.detail) == ("unknown", "NVML shows no GPU here")
    watched.watch.end(time.monotonic())
    assert watched.watch.settled(time.monotonic())


def test_closing_leaves_no_process_even_if_the_driver_hangs(nvml):
    nvml.says("* init hang")
    watch = GpuWatch(time.monotonic())
    (child,) = [process for process in psutil.Process().children() if "--watch" in process.cmdline()]
    watch.close(WAIT_S)
    assert psutil.wait_procs([child], timeout=WAIT_S)[1] == []


def test_the_child_ends_with_its_agent_even_if_the_driver_hangs(nvml):
    """Its input is closed when the agent is killed."""
    nvml.says("* init hang")
    watch = GpuWatch(time.monotonic())
    (child,) = [process for process in psutil.Process().children() if "--watch" in process.cmdline()]
    watch._child.stdin.close()
    assert child.wait(WAIT_S) == 0
    watch.close(WAIT_S)


@pytest.mark.gpu
def test_the_real_nvml_is_watched(start):
    watched = start()
    (health,) = kinds(watched.until(lambda seen: kinds(seen, GpuHealth)), GpuHealth)
    assert health.grade == "ok"
    before = watched.counters("before", len(health.devices))
    watched.watch.end(time.monotonic())
    watched.counters("end", len(health.devices))
    for reading in before:
        assert since_preflight(watched.seen, reading.device).known
