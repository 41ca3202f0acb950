"""Any bytes in a recorder: the node agent reads on, what it sends is well formed, and the report is written."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from cases import case
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.report.model import to_json
from gpuwatch.collector.report.text_report import render_text
from gpuwatch.core.events.agent_events import WorkerExit
from gpuwatch.core.events.alarms import Anomaly
from gpuwatch.core.events.definitions import ModuleDef, RootDef, ShapeDef, SlotDef
from gpuwatch.core.events.own_limits import OwnFault
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.events.script_events import ScriptExit
from gpuwatch.core.recorder import layout
from gpuwatch.core.recorder.group_table import GroupField
from gpuwatch.core.recorder.layout import NOTHING, HeadField, file_name
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.values import ValueEncoding
from gpuwatch.core.wire.messages import AgentMessage, decode_agent, encode
from gpuwatch.launcher.agent.rank_watch import RankWatch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

LOG_BYTES, SEGMENTS = 1 << 14, 4
SIZE = layout.file_bytes(LOG_BYTES, SEGMENTS)
ANOMALY = Anomaly(RunPosition(0, 0, 2, 2, "Net", 2), 0, "fc", "Linear", "forward", "output", "+inf", "float32")
NUMBERS = (-1, 1, 1 << 20, (1 << 31) - 1, 1 << 40, -(1 << 63), (1 << 63) - 1)
_folders = itertools.count()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    """A recorder with names, three batches of two frames, an anomaly and an end."""
    folder = tmp_path_factory.mktemp("whole")
    path = folder / file_name(0, 0)
    writer = RecorderWriter(path, rank=0, local_rank=0, world_size=1, attempt=0, log_bytes=LOG_BYTES, segments=SEGMENTS)
    definitions = [RootDef(0, "Net"), ModuleDef(0, 0, "fc", "Linear"), SlotDef(0, 0, "output"), ShapeDef(0, (2, 3))]
    for definition in definitions:
        writer.append(definition, name=True)
    for batch in range(3):
        page = writer.begin_page(0, batch, batch)
        for _ in range(2):
            value = writer.value(0, 0x7F800000, ValueEncoding.FLOAT32 << 8 | 2)
            writer.frame(0, NOTHING, 0, 0, batch, [(0, value, 0, 1, 0, 0)])
        writer.end_page(page)
    writer.append(ANOMALY)
    writer.append(ScriptExit(RunPosition(0, 0), 1))
    writer.close()
    return path.read_bytes()


def read(folder: Path, data: bytes) -> list:
    """Everything that the agent makes of such a file, as it comes out of the wire; and a report of it."""
    path = folder / f"{next(_folders)}"
    path.mkdir()
    (path / file_name(0, 0)).write_bytes(data)
    watch = RankWatch(path, 0, 0, 1, [1])
    try:
        bodies = watch.poll(0)
        watch.state()
        bodies += watch.poll(100)
        bodies += watch.end(1, "itself", 101)
    finally:
        watch.close()
    wires = [encode(AgentMessage(n, body)) for n, body in enumerate(bodies, 1)]
    assert sum(map(len, wires)) < 4 * SIZE, "what is sent grows with a number in the file"
    bodies = [decode_agent(wire).body for wire in wires]
    report = build_report(
        fold(("a", n, body) for n, body in enumerate(bodies, 1)), run_id="x", started=None, ended=None
    )
    assert len(to_json(report)) < 1 << 20
    render_text(report)
    assert isinstance(bodies[-1].event, WorkerExit)
    assert bodies[-1].event.where.rank == 0
    return bodies


def anomalies(bodies) -> list:
    return [body.event for body in bodies if isinstance(getattr(body, "event", None), Anomaly)]


def with_number(data: bytes, offset: int, number: int) -> bytes:
    return data[:offset] + number.to_bytes(8, "little", signed=True) + data[offset + 8 :]


def test_the_whole_file_gives_its_anomaly(whole, tmp_path):
    assert anomalies(read(tmp_path, whole)) == [ANOMALY]


@pytest.mark.quick(1)
@pytest.mark.parametrize("number", NUMBERS)
def test_any_number_in_the_header(whole, tmp_path, number):
    for field in HeadField:
        if field not in (HeadField.MAGIC, HeadField.VERSION):
            with case(field):
                bodies = read(tmp_path, with_number(whole, 8 * field, number))
                # what says which file this is, and how it is laid out, cannot be done without
                if field not in (HeadField.RANK, HeadField.ATTEMPT, HeadField.LOG_BYTES, HeadField.SEGMENTS):
                    assert anomalies(bodies) == [ANOMALY]


@pytest.mark.quick(2)
@pytest.mark.parametrize("number", NUMBERS)
def test_any_number_in_a_process_groups_slot(whole, tmp_path, number):
    data = with_number(whole, layout.GROUPS_AT, 1)
    for field in GroupField:
        with case(field):
            bodies = read(tmp_path, with_number(data, layout.GROUPS_AT + 8 * field, number))
            assert len(bodies[-1].event.groups) == (0 if field == GroupField.USED and number != 1 else 1)


@pytest.mark.quick(2)
@pytest.mark.parametrize("number", NUMBERS)
def test_any_number_in_a_segments_header_leaves_the_others(whole, tmp_path, number):
    header = layout.HEADER_BYTES + LOG_BYTES + layout.SEGMENT_BYTES  # of batch 1; the anomaly's is batch 2
    for field in layout.SegmentField:
        with case(field):
            bodies = read(tmp_path, with_number(whole, header + 8 * field, number))
            assert anomalies(bodies) == [ANOMALY]
            assert any(getattr(body, "batch", None) == 2 and body.segments for body in bodies)


def test_behind_a_damaged_length_the_log_goes_on(whole, tmp_path):
    at = layout.HEADER_BYTES
    data = whole[:at] + b"\xf0\xff\xff\x7f" + whole[at + 4 :]
    assert anomalies(read(tmp_path, data)) == [ANOMALY]


@pytest.mark.parametrize("size", [0, 1, 8, 4095, 4096, SIZE // 2, SIZE - 1])
def test_a_file_that_was_cut(whole, tmp_path, size):
    read(tmp_path, whole[:size])


@pytest.mark.parametrize("size", [0, 8, 4095, 4096, layout.HEADER_BYTES, SIZE // 2, SIZE - 1])
def test_a_file_that_is_cut_while_it_is_read(whole, tmp_path, size):
    """What a mapping would have killed its reader for. The log says nothing here: the header alone has the anomaly."""
    path = tmp_path / file_name(0, 0)
    path.write_bytes(with_number(whole, 8 * HeadField.LOG_END, 0))
    watch = RankWatch(tmp_path, 0, 0, 1, [1])
    try:
        assert anomalies(watch.poll(0)) == []
        os.truncate(path, size)
        watch.state()
        watch.movement()
        bodies = [*watch.poll(100), *watch.end(-7, "itself", 101)]
    finally:
        watch.close()
    assert isinstance(bodies[-1].event, WorkerExit)
    told = any(isinstance(getattr(body, "event", None), OwnFault) for body in bodies)
    assert told == (size < SIZE - 1), "that something is missing is said"
    assert anomalies(bodies) == ([ANOMALY] if size >= layout.FIXED_BYTES else [])


@given(
    st.lists(
        st.tuples(
            st.integers(0, SIZE - 8), st.one_of(st.sampled_from(NUMBERS), st.integers(-(1 << 63), (1 << 63) - 1))
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage(whole, tmp_path_factory, damages):
    data = whole
    for offset, number in damages:
        offset -= offset % 8 if offset < layout.HEADER_BYTES else 0
        data = with_number(data, offset, number)
    read(tmp_path_factory.getbasetemp(), data)
