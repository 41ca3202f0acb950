"""The one table that a run is exported as: a row for each tensor of a frame, each number of a history, each verdict."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import pyarrow
from pyarrow import parquet
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from ...core.frames import Frame, Row
from ...core.lone_process import is_rank, pid_of_number
from ...core.recorder.page_tables import whole
from ...core.values import NonFinite
from ...core.wire.columns import NO_NUMBER
from ..decide.decide import decide
from ..facts.facts import RankFacts, RunFacts
from ..facts.kept_pages import KeptHistory

TABLES = ("verdict", "frames", "history")


class ExportRow(msgspec.Struct, frozen=True):
    """One row. What a table does not have is null."""

    table: str
    """`frames`: a tensor of a module call; `history`: the largest output of a module in a batch; `verdict`: one row."""
    run: str
    attempt: int | None = None
    """Counts elastic restarts."""
    rank: int | None = None
    root: str | None = None
    """Class of the model; `Net#2` for the second one."""
    batch: int | None = None
    """Forwards of that model, the first is 0."""
    step: int | None = None
    """Optimizer steps that were finished."""
    index: int | None = None
    """Place of the frame in its batch, in the order in which calls returned."""
    phase: str | None = None
    """forward, backward, weight, optimizer, collective, input"""
    module: str | None = None
    """As in `named_modules()`; "" is the model itself."""
    cls: str | None = msgspec.field(name="class", default=None)
    role: str | None = None
    """`input[0]`, `weight`, `output`, `grad weight`, ..."""
    kind: str | None = None
    """frames: `measured`, `none`, `not_a_tensor`, ...; verdict: its kind"""
    dtype: str | None = None
    shape: str | None = None
    """`4x16`"""
    abs_min: float | None = None
    abs_max: float | None = None
    """null where it is not finite"""
    nonfinite: str | None = None
    """What is not finite, with blanks between: `nan`, `+inf`, `-inf`, `inf` (of unknown sign)"""
    zeros: float | None = None
    """Share of elements that are zero, where it was counted."""
    subnormals: float | None = None
    """Share of elements below the smallest normal number."""
    headroom: float | None = None
    """Powers of two between abs max and the dtype's largest number."""
    seq: int | None = None
    """Collectives that the rank had issued when the call began."""
    text: str | None = None
    """verdict: its statement"""
    certainty: str | None = None
    """verdict: established, supported or unknown"""
    process: int | None = None
    """Process id of one that is no rank: `rank` is null then."""


def export_rows(
    facts: RunFacts, run: str, tables: Iterable[str] = TABLES, rank: int | None = None
) -> Iterator[ExportRow]:
    """All rows of a run, or of some tables, or numbers of one rank; one at a time, as a run may have millions."""
    chosen = set(tables)
    if "verdict" in chosen:
        yield _verdict(facts, run)
    ranks = [each for _, each in sorted(facts.ranks.items()) if rank in (None, each.rank)]
    ranks += [each for _, each in sorted(facts.processes.items())] if rank is None else []
    if "frames" in chosen:
        for each in ranks:
            yield from _frames(each, run)
    if "history" in chosen:
        for each in ranks:
            for kept in each.histories.values():
                yield from _history(each, kept, run)


def _verdict(facts: RunFacts, run: str) -> ExportRow:
    verdict = decide(facts)
    return ExportRow(
        "verdict",
        run,
        verdict.attempt,
        verdict.rank,
        verdict.root,
        verdict.batch,
        verdict.step,
        phase=verdict.phase,
        module=verdict.module,
        cls=verdict.cls,
        role=verdict.role,
        kind=verdict.kind,
        dtype=verdict.dtype,
        nonfinite=verdict.value,
        text=verdict.statement,
        certainty=verdict.certainty,
        process=verdict.pid,
    )


def _rank_or_process(rank: RankFacts) -> tuple[int | None, int | None]:
    return (rank.rank, None) if is_rank(rank.rank) else (None, pid_of_number(rank.rank))


def _frames(rank: RankFacts, run: str) -> Iterator[ExportRow]:
    for _, page in sorted(rank.pages.items()):
        number, process = _rank_or_process(rank)
        place = ("frames", run, rank.attempt, number, page.root, page.batch, page.step)
        for frame in sorted(page.frames, key=lambda frame: frame.index):
            plain: Frame = whole(frame)
            for row in plain.rows:
                yield ExportRow(
                    *place,
                    plain.index,
                    plain.phase,
                    plain.module,
                    plain.cls,
                    row.role,
                    row.kind,
                    row.dtype,
                    "x".join(map(str, row.shape)) if row.shape is not None else None,
                    _finite(row.abs_min),
                    _finite(row.abs_max),
                    _nonfinite(row),
                    row.zeros,
                    row.subnormals,
                    row.headroom,
                    plain.seq if plain.seq >= 0 else None,
                    process=process,
                )


def _history(rank: RankFacts, kept: KeptHistory, run: str) -> Iterator[ExportRow]:
    history = kept.open()
    if history is None:  # lost or damaged
        return
    number_of_rank, process = _rank_or_process(rank)
    for batch, step, numbers in zip(history.batches, history.steps, history.numbers.tolist(), strict=True):
        for returned, number in zip(history.modules, numbers, strict=True):
            if number != NO_NUMBER:
                yield ExportRow(
                    "history",
                    run,
                    rank.attempt,
                    number_of_rank,
                    kept.root,
                    batch,
                    step,
                    phase="forward",
                    module=returned.module,
                    cls=returned.cls,
                    role="output",
                    dtype=returned.dtype,
                    abs_max=_finite(number),
                    nonfinite="nan" if math.isnan(number) else "inf" if math.isinf(number) else None,
                    process=process,
                )


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _nonfinite(row: Row) -> str | None:
    names = {NonFinite.NAN: "nan", NonFinite.POSINF: "+inf", NonFinite.NEGINF: "-inf", NonFinite.INF: "inf"}
    return " ".join(name for flag, name in names.items() if row.flags & flag) or None


# The table as JSON lines or as CSV.

COLUMNS = [field.encode_name for field in msgspec.structs.fields(ExportRow)]


def write_jsonl(rows: Iterable[ExportRow], out: IO[str]) -> None:
    """A line for each row: {"table": "history", "run": "x", "attempt": 0, "rank": 1, ...}."""
    encoder = msgspec.json.Encoder()
    for row in rows:
        out.write(encoder.encode(row).decode() + "\n")


def write_csv(rows: Iterable[ExportRow], out: IO[str]) -> None:
    """A line with the names of the columns, then one for each row; null is nothing between two commas."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow(msgspec.structs.astuple(row))


# The table as one Parquet file, with pyarrow.

_AT_A_TIME = 1 << 16
"""Rows."""
_TYPES = {int: pyarrow.int64(), float: pyarrow.float64(), str: pyarrow.string()}


def write_parquet(rows: Iterable[ExportRow], path: Path) -> None:
    """Numbers are int64 and float64. Raises OSError."""
    schema = pyarrow.schema([(field.encode_name, _type_of(field.type)) for field in msgspec.structs.fields(ExportRow)])
    rest = iter(rows)
    with parquet.ParquetWriter(path, schema) as writer:
        while chunk := [msgspec.structs.astuple(row) for row in itertools.islice(rest, _AT_A_TIME)]:
            columns = dict(zip(COLUMNS, zip(*chunk, strict=True), strict=True))
            writer.write_table(pyarrow.table(columns, schema=schema))


def _type_of(annotation: Any) -> Any:
    """Of `int`, or of `int | None`."""
    kinds = getattr(annotation, "__args__", (annotation,))
    return next(_TYPES[kind] for kind in kinds if kind in _TYPES)


# Scalars for TensorBoard, a run of its own for each rank: abs max of what each module returned, batch by batch.


def write_tensorboard(rows: Iterable[ExportRow], folder: Path) -> None:
    """`folder/rank3`: scalars `abs_max/<root>/<module>/output` by batch; `folder/verdict`: its statement.

    Of a number that is not finite there is no point. Raises OSError.
    """
    writers: dict[str, EventFileWriter] = {}
    try:
        for row in rows:
            summary, name = _summary(row)
            if summary is not None:
                if name not in writers:
                    writers[name] = EventFileWriter(str(folder / name))
                writers[name].add_event(Event(wall_time=0.0, step=max(0, row.batch or 0), summary=summary))
    finally:
        for writer in writers.values():
            writer.close()


def _summary(row: ExportRow) -> tuple[Summary | None, str]:
    if row.table == "verdict":
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype=DT_STRING, string_val=[f"{row.kind}, {row.certainty}: {row.text}".encode()])
        return Summary(value=[Summary.Value(tag="verdict", metadata=metadata, tensor=tensor)]), "verdict"
    if row.abs_max is None or row.attempt is None:
        return None, ""
    tag = f"abs_max/{row.root}/{row.module or '(root)'}/{row.role}" + (f"/{row.phase}" if row.table == "frames" else "")
    who = f"rank{row.rank}" if row.process is None else f"process{row.process}"
    attempt = f"-attempt{row.attempt}" if row.attempt else ""
    return Summary(value=[Summary.Value(tag=tag, simple_value=row.abs_max)]), f"{who}{attempt}"
