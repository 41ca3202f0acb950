"""A rank's first anomaly, in the fixed part of its recorder."""

from __future__ import annotations

import msgspec
import pytest
from gpuwatch.core.events.alarms import Anomaly
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.recorder import layout
from gpuwatch.core.recorder.layout import AnomalyFlag, HeadField
from gpuwatch.core.recorder.reader import RecorderReader
from gpuwatch.core.recorder.writer import RecorderWriter

FIRST = Anomaly(
    RunPosition(1, 0, 3, 3, "Net", 3, 7, clock={"0": 7}),
    2,
    "fc",
    "Linear",
    "forward",
    "output",
    "+inf",
    "float32",
    [2, 3],
)


@pytest.fixture
def writer(tmp_path):
    made = RecorderWriter(tmp_path / "r", rank=1, local_rank=1, world_size=2, attempt=0, log_bytes=1 << 12, segments=1)
    yield made
    made.close()


def seen(writer) -> tuple[bool, Anomaly | None]:
    reader = RecorderReader(writer.path)
    try:
        return reader.overflow_seen, reader.first_anomaly()
    finally:
        reader.close()


def test_a_recorder_begins_without_one(writer):
    assert seen(writer) == (False, None)


def test_the_first_one_that_is_appended_is_in_the_header_and_stays(writer):
    writer.append(FIRST)
    writer.append(msgspec.structs.replace(FIRST, module="later"))
    assert seen(writer) == (True, FIRST)


def test_it_is_there_when_the_log_is_full(writer):
    while writer.append(msgspec.structs.replace(FIRST, module="x" * len(FIRST.module))):
        writer.fields[HeadField.ANOMALY] = AnomalyFlag.NONE  # as if it had been another kind of event
    while writer.append(FIRST):  # the rest of the log is as small as that
        writer.fields[HeadField.ANOMALY] = AnomalyFlag.NONE
    writer.fields[HeadField.ANOMALY] = AnomalyFlag.NONE
    assert not writer.append(FIRST)
    assert seen(writer) == (True, FIRST)


def test_one_with_very_long_names_is_shortened(writer):
    long = msgspec.structs.replace(FIRST, module="é" * 5000, cls="é" * 5000, role="é" * 5000, cause="é" * 5000)
    writer.note_first_anomaly(long)
    overflow, anomaly = seen(writer)
    assert overflow
    assert anomaly is not None
    assert long.module.startswith(anomaly.module)
    assert len(anomaly.module) >= 100
    assert (anomaly.where.batch, anomaly.value) == (3, "+inf")


@pytest.mark.parametrize("name", ["\udcff", "fc"])
def test_it_never_raises_and_never_leaves_it_unseen(writer, name):
    where = msgspec.structs.replace(FIRST.where, root=name, step=1 << 70)  # neither can be encoded
    writer.note_first_anomaly(msgspec.structs.replace(FIRST, where=where))
    assert seen(writer) == (True, None)


def test_damaged_bytes_leave_it_seen(writer):
    writer.append(FIRST)
    writer.memory[layout.ANOMALY_AT + 20] ^= 0xFF
    assert seen(writer) == (True, None)
    layout.ENTRY.pack_into(writer.memory, layout.ANOMALY_AT, 0xFFFFFFFF, 0)
    assert seen(writer) == (True, None)
