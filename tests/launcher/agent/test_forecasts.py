"""Which modules are said to pass their limit: from recorders that a real writer writes, and from real training."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import pytest
from gpuwatch.core.events.agent_events import LimitForecast
from gpuwatch.core.events.definitions import ModuleDef, RootDef, SlotDef
from gpuwatch.core.frames import FramePhase, RowKind
from gpuwatch.core.recorder.layout import NOTHING, file_name
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.values import DTYPE_CODES, ValueEncoding
from gpuwatch.core.wire.beat import HotModule, NodeBeat, pack_list, unpack_list
from gpuwatch.core.wire.messages import (
    AgentMessage,
    EventMessage,
    PageMessage,
    RankHistoryMessage,
    decode_agent,
    encode,
)
from gpuwatch.launcher.agent import batch_history as history
from gpuwatch.launcher.agent.rank_watch import RankWatch

NAMES = [RootDef(0, "Net")]
for n, name in enumerate(["calm", "grows", "fast"]):
    NAMES += [ModuleDef(n, 0, name, "Linear"), SlotDef(n, n, "output")]


@pytest.fixture
def writer(tmp_path):
    recorder = RecorderWriter(
        tmp_path / file_name(3, 1), rank=3, local_rank=0, world_size=4, attempt=1, log_bytes=1 << 16, segments=8
    )
    for entry in NAMES:
        recorder.append(entry)
    yield recorder
    recorder.close()


@pytest.fixture
def watch(writer, tmp_path, monkeypatch):
    monkeypatch.setattr(history, "SHARE", 1e9)  # it looks at each batch, however busy the machine is
    found = RankWatch(tmp_path, 3, 1, 4242, [])
    yield found
    found.close()


def batch(writer: RecorderWriter, number: int, values: list[float]) -> None:
    """Each module returns a float16 tensor with this abs max."""
    page = writer.begin_page(0, number, number)
    writer.resume_page(page)
    for module, value in enumerate(values):
        (bits,) = struct.unpack("<H", struct.pack("<e", value))
        index = writer.value(0, bits, ValueEncoding.FLOAT16 << 8)
        row = (module, index, 0, DTYPE_CODES["float16"], RowKind.MEASURED.number, 0)
        writer.frame(module, NOTHING, 0, FramePhase.FORWARD.number, 0, [row])
    writer.end_page(page)


def told_of(writer, watch, batches, values) -> list[LimitForecast]:
    told = []
    for number in range(batches):
        batch(writer, number, values(number))
        for message in watch.poll(float(number)):
            if isinstance(message, EventMessage) and isinstance(message.event, LimitForecast):
                told.append(message.event)
    return told


def test_each_module_that_grows_is_told_once_while_the_rank_runs(writer, watch):
    told = told_of(writer, watch, 150, lambda n: [100.0 + n % 7, 2 ** (n / 10), 1.5 * 2 ** (n / 10)])
    assert sorted(each.module for each in told) == ["fast", "grows"]
    first = told[0]
    assert (first.where.rank, first.where.attempt, first.cls, first.dtype) == (3, 1, "Linear", "float16")
    assert first.limit == 65504.0
    passes = 160 if first.module == "grows" else 154
    assert first.earliest <= passes - first.where.batch <= first.latest
    assert first.where.batch < 100


def test_of_healthy_modules_nothing_is_told(writer, watch):
    assert told_of(writer, watch, 150, lambda n: [30.0 * (n + 1) ** 0.5, 500.0, 6000 - 30.0 * n]) == []


def test_a_forecast_that_cannot_be_made_costs_nothing_else(writer, watch, monkeypatch):
    monkeypatch.setattr(history.RootForecasts, "update", lambda *given: 1 / 0)
    assert told_of(writer, watch, 20, lambda n: [1.0, 1.0, 1.0]) == []
    messages = watch.end(1, "itself", 99.0)
    assert [message for message in messages if isinstance(message, PageMessage)]
    assert [message for message in messages if isinstance(message, RankHistoryMessage)]


def benchmark():
    path = Path(__file__).parents[3] / "benchmarks" / "forecast.py"
    spec = importlib.util.spec_from_file_location("forecast_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_training_that_diverges_is_told_in_time():
    made = benchmark()
    course = made.train(made.high_rate_sgd, 400)
    batch, _, told = course.told[0]
    assert course.overflow - batch >= 5
    assert told.earliest <= course.overflow - batch <= told.latest


@pytest.mark.slow
def test_a_training_that_goes_well_is_not_told():
    made = benchmark()
    course = made.train(made.HEALTHY["classifier"], 120, as_float16=True)
    assert (course.overflow, course.told) == (None, [])


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", range(10))
def test_each_slow_overflow_and_each_healthy_model(name):
    made = benchmark()
    course = made.train(made.SLOW[name], 3000)
    assert course.overflow - course.told[0][0] >= 5
    healthy = list(made.HEALTHY.values())[name]
    assert made.train(healthy, 150, as_float16=True).told == []


def test_the_modules_that_are_closest_to_their_limit_are_told(writer, watch):
    told_of(writer, watch, 40, lambda n: [6000.0, 1000 * 2 ** (n / 20), 3.0])
    found = watch.hottest()
    assert [(hot.rank, hot.batch, hot.module, hot.dtype) for hot in found] == [
        (3, 38, "calm", "float16"),
        (3, 38, "grows", "float16"),
        (3, 38, "fast", "float16"),
    ]
    calm, grows, _ = found
    assert calm.left == pytest.approx(3.45, abs=0.05) and calm.change == 0
    assert grows.change == pytest.approx(0.05, abs=0.01)
    sent = encode(AgentMessage(0, NodeBeat([], {}, hot=pack_list(found))))
    assert unpack_list(decode_agent(sent).body.hot, HotModule) == found
