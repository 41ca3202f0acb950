"""When the figures of a node are read and sent, and that who does not answer stops nothing."""

from __future__ import annotations

import queue
import select
import time

import pytest
from gpuwatch.core.gpu.nvml_child import SampleLine
from gpuwatch.core.wire.beat import GpuNow, HostNow
from gpuwatch.core.wire.columns import unpack_samples
from gpuwatch.launcher.agent.gpus import GpuWatch
from gpuwatch.launcher.agent.telemetry import AGAIN_S, SILENT_S, NodeTelemetry

from ...waiting import WAIT_S, until

S = 1_000_000_000
CPU = ("", "cpu")


class Gpus:
    """What GpuWatch says of its GPUs: nothing until it is told to answer."""

    def __init__(self, there: bool = False) -> None:
        self.there = there
        self.asked = 0
        self.lines: list[SampleLine] | None = None

    def ask_samples(self):
        self.asked += self.there
        return self.there

    def samples(self):
        lines, self.lines = self.lines, None
        return lines


class Host:
    """A host that answers when it is told to. `read` runs in the thread."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue = queue.SimpleQueue()
        self.answers: queue.SimpleQueue = queue.SimpleQueue()

    def read(self, pids):
        self.asked.put(list(pids))
        answer = self.answers.get(timeout=WAIT_S)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Node:
    def __init__(self, interval_s=5.0, gpus=None) -> None:
        self.host, self.gpus, self.now = Host(), gpus or Gpus(), 0.0
        self.telemetry = NodeTelemetry(
            interval_s, {}, self.gpus, read=self.host.read, time_ns=lambda: int(self.now * S) + S
        )

    def turn(self, now):
        self.now = now
        self.telemetry.turn(lambda: [(0, 77)], now)

    def answer(self, values, now):
        """The host answers, and that is taken."""
        self.host.answers.put(values)

        def is_taken() -> bool:
            if "host" in self.telemetry._waits:
                self.turn(now)
            return "host" not in self.telemetry._waits

        until(is_taken, "what the host has answered is taken", lambda: self.telemetry._waits)

    def sent(self):
        message = self.telemetry.ended()
        if message is None:
            return None
        seconds, values = unpack_samples(message.samples, len(message.series))
        names = [(name.of, name.what) for name in message.series]
        return message, seconds.tolist(), {name: values[:, n].tolist() for n, name in enumerate(names)}


@pytest.fixture
def make():
    made: list[Node] = []

    def make(**settings):
        made.append(Node(**settings))
        return made[-1]

    yield make
    for node in made:
        for _ in range(3):  # whoever waits for an answer goes on
            node.host.answers.put({})


def test_it_is_read_at_once_and_every_few_seconds(make):
    node = make()
    for n in range(4):
        node.turn(5.0 * n)
        assert node.host.asked.get(timeout=WAIT_S) == [(0, 77)]
        node.turn(5.0 * n + 1)
        node.answer({CPU: float(n)}, 5.0 * n + 2)
        assert node.host.asked.empty()
    _, seconds, values = node.sent()
    assert seconds == [0.0, 5.0, 10.0, 15.0], "a sample has the time at which it was asked for"
    assert values[CPU][1:] == [1.0, 1.0, 1.0]


def test_a_host_that_does_not_answer_is_asked_once_and_stops_nothing(make):
    node = make(gpus=Gpus(there=True))
    for n in range(5):
        node.turn(5.0 * n)
        node.gpus.lines = [SampleLine("GPU-0", {"temperature": 40.0 + n}, last=True)]
        node.turn(5.0 * n + 1)
    assert node.host.asked.get(timeout=WAIT_S) == [(0, 77)]
    assert node.host.asked.empty()
    message, seconds, values = node.sent()
    assert seconds == [0.0, 5.0, 10.0, 15.0, 20.0]
    assert values["GPU-0", "temperature"] == [40.0, 41.0, 42.0, 43.0, 44.0]
    assert message.troubles == ["the host's own files, or a file system, did not answer for 20 s"]
    node.answer({CPU: 1.0}, 22.0)
    node.turn(25.0)
    assert node.host.asked.get(timeout=WAIT_S), "it is asked again once it has answered"


def test_an_nvml_that_does_not_answer_costs_only_its_own_figures(make):
    node = make(gpus=Gpus(there=True))
    for n in range(4):
        node.turn(5.0 * n)
        node.answer({CPU: float(n)}, 5.0 * n + 1)
    assert node.gpus.asked == 1
    message, seconds, values = node.sent()
    assert (seconds, values[CPU][1:]) == ([0.0, 5.0, 10.0, 15.0], [1.0, 1.0, 1.0])
    assert message.troubles == ["NVML did not answer for 15 s"]
    assert SILENT_S <= 15


def test_how_the_gpus_do_now_is_what_nvml_said_last(make):
    node = make(gpus=Gpus(there=True))
    node.turn(0.0)
    assert node.telemetry.gpus_now == []
    figures = {"gpu_use": 0.97, "gpu_memory_used": 3e9, "gpu_memory_total": 4e9}
    node.gpus.lines = [SampleLine("GPU-0", figures), SampleLine("GPU-1", trouble="not supported", last=True)]
    node.turn(1.0)
    assert node.telemetry.gpus_now == [GpuNow("GPU-0", 0.97, 0.75), GpuNow("GPU-1", -1.0, -1.0)]
    for n in range(1, 4):  # it is asked again, and does not answer
        node.turn(5.0 * n)
    assert node.telemetry.gpus_now == []


def test_how_the_host_does_now_is_what_was_read_last(make):
    node = make()
    memory = {("", "memory_used"): 3e9, ("", "memory_total"): 4e9}
    node.turn(0.0)
    node.answer({CPU: 7.0, **memory}, 1.0)
    assert node.telemetry.host_now == HostNow(-1.0, 0.75), "one reading of a count says nothing"
    node.turn(5.0)
    node.answer({CPU: 9.0, **memory}, 6.0)
    assert node.telemetry.host_now == HostNow(pytest.approx(0.4), 0.75)
    node.turn(10.0)
    node.answer({}, 11.0)
    assert node.telemetry.host_now == HostNow(-1.0, -1.0)


def test_why_nvml_has_no_figure_is_said_once(make):
    node = make(gpus=Gpus(there=True))
    for n in range(3):
        node.turn(5.0 * n)
        node.gpus.lines = [SampleLine("GPU-0", trouble="GPU is lost", last=True)]
        node.answer({CPU: float(n)}, 5.0 * n + 1)
    assert node.sent()[0].troubles == ["NVML has no figures of GPU-0: GPU is lost"]


def test_events_that_follow_one_another_send_it_seldom(make):
    node = make()
    assert node.telemetry.told(0.0) is None, "nothing is known yet"
    node.turn(0.0)
    node.answer({CPU: 1.0}, 1.0)
    told = [t for t in range(int(20 * AGAIN_S)) if node.telemetry.told(float(t)) is not None]
    assert told == [0, AGAIN_S, 3 * AGAIN_S, 7 * AGAIN_S, 15 * AGAIN_S]


def test_an_error_of_ours_ends_the_telemetry_and_nothing_else(make):
    node = make()
    node.turn(0.0)
    node.answer({CPU: 1.0}, 1.0)

    def no_thread_can_be_started():
        raise RuntimeError("can't start new thread")

    node.now = 5.0
    node.telemetry.turn(no_thread_can_be_started, 5.0)
    node.turn(10.0)
    assert node.host.asked.get(timeout=WAIT_S)
    assert node.host.asked.empty(), "it is not tried again"
    message, seconds, _ = node.sent()
    assert (seconds, message.troubles) == ([0.0], ["reading stopped: RuntimeError: can't start new thread"])


def test_it_can_be_turned_off(make):
    node = make(interval_s=0.0, gpus=Gpus(there=True))
    for n in range(3):
        node.turn(5.0 * n)
    assert node.host.asked.empty()
    assert node.gpus.asked == 0
    assert node.sent() is None


# -- the GPUs: a real child, real ctypes, and a stand-in for the driver's library ---------------------------------


class Watched:
    """The child that watches NVML, polled as the agent does."""

    def __init__(self) -> None:
        self.watch = GpuWatch(time.monotonic())
        self.until(lambda: self.watch.ask_samples())
        self.first = self.samples(ask=False)

    def until(self, condition):
        def hear():
            found = condition()
            if not found and select.select([self.watch.fd], [], [], 0.5)[0]:
                self.watch.on_message()
            return found

        return until(hear, "what the other process reads of the GPUs", lambda: vars(self.watch), look_s=0)

    def samples(self, ask=True):
        if ask:
            assert self.watch.ask_samples()
        return self.until(self.watch.samples)


@pytest.fixture
def watched(nvml):
    watched: list[Watched] = []

    def start() -> Watched:
        watched.append(Watched())
        return watched[-1]

    yield start
    for each in watched:
        each.watch.close(WAIT_S)


def test_the_figures_of_each_gpu_come_through_nvml(nvml, watched):
    nvml.says("1 temperature 83", "1 sm_clock 1200", "1 ecc_corrected_volatile 4", "* nvlink_kib 7", "* use 55")
    first, second = watched().first
    assert (first.device, second.device) == nvml.gpus
    assert (first.last, second.last) == (False, True)
    assert first.values.items() >= {"temperature": 41, "sm_clock": 1980, "power": 650.0, "gpu_use": 0.55}.items()
    assert second.values.items() >= {"temperature": 83, "sm_clock": 1200, "ecc_corrected": 4}.items()
    assert first.values["nvlink_sent"] == 7 * 1024
    assert first.values["gpu_memory_used"] == 60 << 30
    assert "pcie_sent" not in first.values, "this driver does not count them"


def test_seconds_in_which_clocks_are_held_down_are_counted(nvml, watched):
    started = watched()
    assert started.first[0].values["clocks_sw_thermal"] == 0
    nvml.says("0 clock_reasons 0x20")
    first, second = started.samples()
    assert first.values["clocks_sw_thermal"] > 0
    assert first.values["clocks_hw_thermal"] == 0
    assert second.values["clocks_sw_thermal"] == 0


def test_a_gpu_that_is_lost_says_so_and_the_other_goes_on(nvml, watched):
    started = watched()
    facts = "use memory sm_clock sm_clock_max power temperature ecc_corrected_volatile ecc_uncorrected_volatile"
    nvml.says(
        *(f"0 {fact} error 15" for fact in f"{facts} pcie_replays pcie_generation clock_reasons nvlink_kib".split())
    )
    first, second = started.samples()
    assert (first.values, bool(first.trouble)) == ({}, True)
    assert second.values["temperature"] == 41


def test_a_driver_that_hangs_holds_up_nobody(nvml, watched):
    started = watched()
    nvml.says("0 power hang")
    node = Node(gpus=started.watch)
    try:
        for n in range(4):
            node.turn(5.0 * n)
            node.answer({CPU: float(n)}, 5.0 * n + 1)
        message, seconds, values = node.sent()
    finally:
        node.host.answers.put({})
    assert seconds == [0.0, 5.0, 10.0, 15.0]
    assert message.troubles == ["NVML did not answer for 15 s"]
    assert set(values) == {CPU}


def test_an_error_of_ours_while_reading_is_told(make):
    node = make()
    node.turn(0.0)
    node.answer({CPU: 1.0}, 0.1)
    node.turn(5.0)
    node.answer(ValueError("a line of /proc/stat that nobody knows"), 5.1)
    node.turn(10.0)
    node.answer({CPU: 2.0}, 10.1)

    message, _, _ = node.sent()
    assert message.troubles == [
        "the host's figures could not be read: ValueError: a line of /proc/stat that nobody knows"
    ]
