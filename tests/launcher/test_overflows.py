"""The launch's own evidence: recorders that real writers wrote, and exit codes."""

from __future__ import annotations

import msgspec
import pytest
from gpuwatch.core.codes import RANK_OVERFLOW, ExitCode
from gpuwatch.core.events.alarms import Anomaly
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.recorder.layout import AnomalyFlag, HeadField, file_name, seal
from gpuwatch.core.recorder.reader import RecorderReader
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.launcher.agent.process_ends import SeenOverflows

ANOMALY = Anomaly(RunPosition(1, 0, 3, 3, "Net", 3), 2, "fc", "Linear", "forward", "output", "+inf", "float32")


@pytest.fixture
def record(tmp_path):
    made = []

    def make(rank: int, attempt: int = 0) -> RecorderWriter:
        path = tmp_path / file_name(rank, attempt)
        made.append(
            RecorderWriter(path, rank=rank, local_rank=0, world_size=2, attempt=attempt, log_bytes=4096, segments=1)
        )
        return made[-1]

    yield make
    for writer in made:
        writer.close()


def test_a_rank_that_has_said_nothing_is_no_overflow(record, tmp_path):
    record(0)
    overflows = SeenOverflows(tmp_path)
    overflows.read(0, {0: 0, 1: 1, 2: None})
    assert overflows.sentence == ""


def test_what_a_recorders_header_says_is_told_and_outlives_the_file(record, tmp_path):
    record(0)
    writer = record(1)
    writer.append(ANOMALY)
    overflows = SeenOverflows(tmp_path)
    overflows.read(0, {0: 1, 1: 1})
    writer.path.unlink()
    overflows.read(1, {0: 0, 1: 0})
    assert overflows.sentence == "rank 1 saw an overflow: +inf in output of `fc` (Linear), forward of batch 3"


def test_a_rank_is_looked_into_from_its_alarm_until_it_ends_the_job(record, tmp_path):
    overflows = SeenOverflows(tmp_path)
    record(0).append(ANOMALY)  # of one that does not run its forward again
    writer = record(1)
    assert not overflows.is_looked_into(0, [0, 1, 2])
    writer.append(msgspec.structs.replace(ANOMALY, aborts=True, looks=True))
    assert overflows.is_looked_into(0, [0, 1, 2])
    assert not overflows.is_looked_into(0, [0])
    assert not overflows.is_looked_into(1, [1])
    writer.fields[HeadField.ABORT] = seal(int(ExitCode.OVERFLOW))
    assert not overflows.is_looked_into(0, [0, 1, 2])


def test_of_several_ranks_the_earliest_batch_is_told(record, tmp_path):
    """With --on-overflow continue the others have it a step later, from the reduced gradients."""
    record(1).append(ANOMALY)
    later = msgspec.structs.replace(ANOMALY.where, rank=0, batch=4)
    record(0).append(msgspec.structs.replace(ANOMALY, where=later, module="embed"))
    overflows = SeenOverflows(tmp_path)
    overflows.read(0, {0: 0, 1: 0})
    assert overflows.sentence == (
        "ranks 0, 1 saw an overflow; in the earliest batch, on rank 1: "
        "+inf in output of `fc` (Linear), forward of batch 3"
    )


def test_an_exit_code_or_a_damaged_header_is_told_without_a_place(record, tmp_path):
    overflows = SeenOverflows(tmp_path)
    overflows.read(0, {4: RANK_OVERFLOW})
    assert overflows.sentence == "rank 4 saw an overflow; the place is unknown"
    other = SeenOverflows(tmp_path)
    record(2).fields[HeadField.ANOMALY] = AnomalyFlag.SEEN
    other.read(0, {2: 0})
    assert other.sentence == "rank 2 saw an overflow; the place is unknown"


def test_the_code_of_a_script_is_no_overflow_where_the_recorder_says_none(record, tmp_path):
    record(1)
    overflows = SeenOverflows(tmp_path)
    overflows.read(0, {1: RANK_OVERFLOW})
    assert overflows.sentence == ""


@pytest.mark.parametrize("garbage", [-1, 3, 77, 1 << 40])
def test_garbage_in_a_header_accuses_nobody(record, tmp_path, garbage):
    writer = record(1)
    writer.fields[HeadField.ANOMALY] = garbage
    overflows = SeenOverflows(tmp_path)
    overflows.read(0, {1: 1})
    assert overflows.sentence == ""
    reader = RecorderReader(writer.path)
    assert (reader.state().overflow, reader.state().records_lost) == (False, 1)
    reader.close()


def test_a_hostile_name_reaches_no_terminal(record, tmp_path):
    record(1).append(msgspec.structs.replace(ANOMALY, module="fc\x1b[2J\nVERDICT", role="kwargs.\x9b"))
    overflows = SeenOverflows(tmp_path)
    overflows.read(0, {1: 1})
    assert overflows.sentence.isprintable()
    assert "`fc\\x1b[2J\\nVERDICT` (Linear)" in overflows.sentence
