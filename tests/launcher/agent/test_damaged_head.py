"""Any bytes may stand in a recorder's head: no healthy rank is accused, and no overflow is called clean."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gpuwatch.collector.decide.decide import decide
from gpuwatch.collector.facts.fold import fold
from gpuwatch.core.codes import ExitCode
from gpuwatch.core.events.alarms import Anomaly
from gpuwatch.core.events.definitions import ModuleDef, RootDef, SlotDef
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.events.script_events import ScriptExit
from gpuwatch.core.recorder.layout import (
    EARLIER_GROUP_BYTES,
    EARLIER_GROUPS,
    EARLIER_VERSION,
    GROUPS_AT,
    SEALED,
    STEPS_AT,
    UNSEALED_VERSION,
    AnomalyFlag,
    HeadField,
    HooksState,
    RankPhase,
    check_of,
    file_name,
    unseal,
)
from gpuwatch.core.recorder.reader import NotReady, RecorderReader
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.values import ValueEncoding
from gpuwatch.core.wire.messages import AgentHello, NodeBye
from gpuwatch.launcher.agent.process_ends import SeenOverflows
from gpuwatch.launcher.agent.rank_watch import RankWatch
from gpuwatch.launcher.launch_job import _aborted
from hypothesis import given
from hypothesis import strategies as st

HEAD_BYTES = 8 * (max(HeadField) + 1)
ANOMALY = Anomaly(
    RunPosition(0, 0, batch=1, root="Net#0", page=1),
    1,
    "fc",
    "Linear",
    "forward",
    "output",
    "+inf",
    "float32",
    [4],
    aborts=False,
)


def record(folder: Path, *, overflows: bool) -> RecorderWriter:
    """What a rank of two batches has written by its end."""
    path = folder / file_name(0, 0)
    writer = RecorderWriter(path, rank=0, local_rank=0, world_size=1, attempt=0, log_bytes=1 << 16, segments=4)
    writer.fields[HeadField.HOOKS] = HooksState.ATTACHED
    for definition in (RootDef(0, "Net"), ModuleDef(0, 0, "fc", "Linear"), SlotDef(0, 0, "output")):
        writer.append(definition, name=True)
    for number in range(2):
        page = writer.begin_page(0, number, number)
        value = writer.value(0, 0x3F800000, ValueEncoding.FLOAT32 << 8)
        writer.frame(0, 0xFFFFFFFF, 0, 0, number, [(0, value, 0xFFFFFFFF, 1, 0, 0)])
        writer.end_page(page)
    if overflows:
        writer.append(ANOMALY)
    writer.append(ScriptExit(RunPosition(0, 0), 0))
    writer.fields[HeadField.PHASE] = RankPhase.FINISHED
    return writer


def damage(writer: RecorderWriter, at: int, data: bytes) -> None:
    head = writer.view[:HEAD_BYTES]
    data = data[: HEAD_BYTES - at]
    head[at : at + len(data)] = data
    head.release()


def verdict(folder: Path, beforehand: RankWatch | None = None) -> str:
    """What is told of the run. `beforehand`: who has opened the recorder already."""
    agent = beforehand or RankWatch(folder, 0, 0, 1, [])
    hello = AgentHello("a", "host", 1, 1, 1, ["train.py"], {}, "run")
    bodies = [hello, *agent.end(0, "itself", 0.0), NodeBye("ok")]
    agent.close()
    return decide(fold([("a", number, body) for number, body in enumerate(bodies)])).kind


def told_by_the_launch(folder: Path) -> str:
    overflows = SeenOverflows(folder)
    overflows.read(0, {0: 0})
    return overflows.sentence


@pytest.mark.parametrize(("overflows", "kind"), [(False, "clean"), (True, "overflow")])
def test_undamaged(tmp_path, overflows, kind):
    record(tmp_path, overflows=overflows).close()
    assert verdict(tmp_path) == kind
    assert bool(told_by_the_launch(tmp_path)) == overflows


byte_runs = st.binary(min_size=1, max_size=64) | st.integers(0, 255).flatmap(
    lambda byte: st.integers(1, 64).map(lambda count: bytes([byte]) * count)
)


anywhere = given(at=st.integers(0, HEAD_BYTES - 1), data=byte_runs, late=st.booleans())


@contextmanager
def damaged(at: int, data: bytes, *, overflows: bool, late: bool) -> Iterator[tuple[Path, RankWatch]]:
    """The folder of a recorder with other bytes in its head, and who reads it; `late`: from before the damage."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        writer = record(path, overflows=overflows)
        watch = RankWatch(path, 0, 0, 1, [])
        if late:
            watch.poll(0.0)
        damage(writer, at, data)
        yield path, watch
        writer.close()


@anywhere
def test_no_bytes_accuse_a_healthy_rank(at, data, late):
    with damaged(at, data, overflows=False, late=late) as (path, watch):
        assert told_by_the_launch(path) == ""
        assert not _aborted(path / file_name(0, 0))
        assert verdict(path, watch) in ("clean", "unknown")


@anywhere
def test_no_bytes_make_an_overflow_clean(at, data, late):
    with damaged(at, data, overflows=True, late=late) as (path, watch):
        assert verdict(path, watch) != "clean"


@pytest.mark.parametrize(
    "field", [*map(HeadField, range(HeadField.VERSION, HeadField.CHECK + 1))], ids=lambda field: field.name
)
def test_what_is_fixed_is_not_believed_when_it_is_damaged(tmp_path, field):
    writer = record(tmp_path, overflows=False)
    writer.fields[field] ^= 1
    with pytest.raises(NotReady):
        RecorderReader(writer.path)
    writer.close()
    assert verdict(tmp_path) == "unknown"


@pytest.mark.parametrize("value", [0, 1, 2, 3, 4, ExitCode.OVERFLOW, -1, 1 << 40])
@pytest.mark.parametrize("field", SEALED, ids=lambda field: field.name)
def test_a_code_that_no_writer_writes_is_damage(tmp_path, field, value):
    writer = record(tmp_path, overflows=False)
    writer.fields[field] = value
    reader = RecorderReader(writer.path)
    assert reader.state().records_lost == 1
    reader.close()
    writer.close()
    assert verdict(tmp_path) == "unknown"


@pytest.mark.parametrize("version", [UNSEALED_VERSION, EARLIER_VERSION])
@pytest.mark.parametrize(("overflows", "kind"), [(False, "clean"), (True, "overflow")])
def test_a_recorder_of_an_earlier_version_is_read(tmp_path, overflows, kind, version):
    """A rank whose Python has an earlier gpuwatch."""
    writer = record(tmp_path, overflows=overflows)
    writer.fields[HeadField.VERSION] = version
    writer.fields[HeadField.CHECK] = check_of(writer.fields)
    if version == UNSEALED_VERSION:
        for field in SEALED:
            writer.fields[field] = unseal(writer.fields[field])
        writer.fields[HeadField.CHECK] = 0
        assert writer.fields[HeadField.ANOMALY] == (2 if overflows else 0)
        assert writer.fields[HeadField.PHASE] == 4
    writer.close()
    data = writer.path.read_bytes()
    writer.path.write_bytes(data[:GROUPS_AT] + bytes(EARLIER_GROUPS * EARLIER_GROUP_BYTES) + data[STEPS_AT:])
    reader = RecorderReader(writer.path)
    assert reader.state().phase == "finished"
    assert reader.overflow_seen == (reader[HeadField.ANOMALY] == AnomalyFlag.WRITTEN) == overflows
    assert reader.groups() == reader.steps(0) == []
    reader.close()
    assert verdict(tmp_path) == kind
