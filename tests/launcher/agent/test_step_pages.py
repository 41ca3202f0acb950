"""Pages that are read for what steps led to: each once, those of a short run at its end, late numbers when there."""

from __future__ import annotations

import struct

import pytest
from gpuwatch.core.events.definitions import ModuleDef, RootDef, ShapeDef, SlotDef
from gpuwatch.core.frames import FramePhase, RowKind
from gpuwatch.core.recorder.layout import NOTHING
from gpuwatch.core.recorder.page_tables import PageTables
from gpuwatch.core.recorder.reader import RecorderReader
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.values import DTYPE_CODES, PENDING, ValueEncoding
from gpuwatch.launcher.agent.batch_history import RankHistory
from gpuwatch.launcher.agent.step_pages import StepPages

NAMES = [
    RootDef(0, "Net"),
    ModuleDef(0, 0, "fc", "Linear"),
    ModuleDef(1, 0, "", "Net"),
    *(SlotDef(0, 0, "output"), SlotDef(1, 0, "weight"), SlotDef(2, 0, "grad weight"), ShapeDef(0, (4, 4))),
]
OUTPUT, WEIGHT, GRADIENT = range(3)


def float32(number: float) -> tuple[int, int, int]:
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    return bits, bits, ValueEncoding.FLOAT32 << 8


LATE, LARGE, ZERO = (0, 0, PENDING), float32(3e19), float32(0.0)


@pytest.fixture
def writer(tmp_path):
    recorder = RecorderWriter(
        tmp_path / "recorder", rank=0, local_rank=0, world_size=1, attempt=0, log_bytes=1 << 16, segments=64
    )
    yield recorder
    recorder.close()


@pytest.fixture
def reader(writer):
    found = RecorderReader(writer.path)
    yield found
    found.close()


@pytest.fixture
def pages():
    found = StepPages()
    found.define(NAMES)
    return found


def batch(writer, number, *, made=LARGE, got=ZERO):
    """A forward, a backward and a step: the gradient as the backward made it, and as the optimizer got it."""
    page = writer.begin_page(0, number, number)
    writer.resume_page(page)
    for phase, slot, value in (
        (FramePhase.FORWARD, OUTPUT, float32(1.0)),
        (FramePhase.BACKWARD, GRADIENT, made),
        (FramePhase.COLLECTIVE, GRADIENT, got),
        (FramePhase.OPTIMIZER, WEIGHT, float32(0.5)),
    ):
        row = (slot, writer.value(*value), 0, DTYPE_CODES["float32"], RowKind.MEASURED.number, 0)
        writer.frame(0, NOTHING, 0, phase.number, 0, [row])
    writer.frame(1, NOTHING, 0, FramePhase.FORWARD.number, 0, [])
    writer.end_page(page)


def read(pages, reader, number, *, late=False):
    page = reader.page(number)
    pages.read(page, PageTables(page), late=late)


def test_all_pages_of_a_short_run_are_read_at_its_end(writer, reader):
    kept = RankHistory(clock=lambda: 0.0)
    kept.define(NAMES)
    for number in range(20):
        batch(writer, number)
        if number == 12:
            kept.read(reader, reader.header(), 0.0)  # it reads four
    (found,) = kept.steps.finish(reader, 3, 1)
    assert (found.where.rank, found.where.attempt, found.where.root, found.where.batch) == (3, 1, "Net", 0)
    assert (found.batches, found.of, found.last) == (20, 20, 19)
    assert found.norm_least == pytest.approx(1.2e20), "16 elements, none smaller"


def test_numbers_that_are_late_are_read_when_they_have_come(writer, reader, pages):
    batch(writer, 0, got=LATE)
    read(pages, reader, 0)
    pages.read_again(reader, late=False)
    place = bytes(writer.view).index(PENDING.to_bytes(8, "little")) - 16
    writer.view[place : place + 24] = b"".join(part.to_bytes(8, "little") for part in ZERO)
    pages.read_again(reader, late=False)
    pages.read_again(reader, late=False)
    (found,) = pages.finish(reader, 0, 0)
    assert (found.batches, found.of) == (1, 1)


def test_numbers_that_never_come_say_nothing(writer, reader, pages):
    batch(writer, 0, got=LATE)
    batch(writer, 1, made=LATE)
    read(pages, reader, 0)
    assert pages.finish(reader, 0, 0) == []


def test_no_steps_no_word(reader, pages):
    assert pages.finish(reader, 0, 0) == []
