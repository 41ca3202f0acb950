"""The one table that a run is exported as: a row for each tensor of a frame, each number of a history, each verdict."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from ...core.frames import Row
from ...core.identity import is_rank, pid_of_number
from ...core.recorder.page_tables import whole
from ...core.values import NonFinite, RowStatistics
from ...core.wire.columns import NO_NUMBER
from ..decide.decide import decide
from ..facts.rank_facts import RankFacts
from ..facts.run_facts import RunFacts

TABLES = ("verdict", "frames", "history")


class TensorColumns(RowStatistics, frozen=True):
    """The columns up to the statistics of a tensor, which are the last of these."""

    table: str
    run: str
    attempt: int | None = None
    rank: int | None = None
    root: str | None = None
    batch: int | None = None
    step: int | None = None
    index: int | None = None
    phase: str | None = None
    module: str | None = None
    cls: str | None = msgspec.field(name="class", default=None)
    role: str | None = None
    kind: str | None = None
    dtype: str | None = None
    shape: str | None = None
    abs_min: float | None = None
    abs_max: float | None = None
    nonfinite: str | None = None


class ExportRow(TensorColumns, frozen=True, kw_only=True):
    """One row. What a table does not have is null. docs/export.md says what the columns mean."""

    seq: int | None = None
    text: str | None = None
    certainty: str | None = None
    process: int | None = None


COLUMNS = [field.encode_name for field in msgspec.structs.fields(ExportRow)]


def export_rows(
    facts: RunFacts, run: str, tables: Iterable[str] = TABLES, ranks: Collection[int] | None = None
) -> Iterator[ExportRow]:
    """The rows of a run, of some tables or of some ranks; one at a time, because a run may have millions."""
    chosen = set(tables)
    if "verdict" in chosen:
        yield _verdict(facts, run)
    shown = facts.only(ranks)
    for table, rows in (("frames", _frames), ("history", _histories)):
        if table in chosen:
            for each in (*_in_order(shown.ranks), *_in_order(shown.processes)):
                yield from rows(each, run)


def _in_order(ranks: dict[tuple[int, int], RankFacts]) -> list[RankFacts]:
    return [each for _, each in sorted(ranks.items())]


def _verdict(facts: RunFacts, run: str) -> ExportRow:
    verdict = decide(facts)
    place = ("attempt", "rank", "root", "batch", "step", "phase", "module", "cls", "role", "kind", "dtype", "certainty")
    shared = {name: getattr(verdict, name) for name in place}
    return ExportRow("verdict", run, **shared, nonfinite=verdict.value, text=verdict.statement, process=verdict.pid)


def _rank_or_process(rank: RankFacts) -> tuple[int | None, int | None]:
    return (rank.rank, None) if is_rank(rank.rank) else (None, pid_of_number(rank.rank))


def _frames(rank: RankFacts, run: str) -> Iterator[ExportRow]:
    number, process = _rank_or_process(rank)
    for _, page in sorted(rank.pages.items()):
        for frame in map(whole, sorted(page.frames, key=lambda frame: frame.index)):
            for row in frame.rows:
                yield ExportRow(
                    *("frames", run, rank.attempt, number, page.root, page.batch, page.step),
                    *(frame.index, frame.phase, frame.module, frame.cls, row.role, row.kind, row.dtype),
                    "x".join(map(str, row.shape)) if row.shape is not None else None,
                    *(_finite(row.abs_min), _finite(row.abs_max), _nonfinite(row)),
                    **{name: getattr(row, name) for name in RowStatistics.__struct_fields__},
                    seq=frame.seq if frame.seq >= 0 else None,
                    process=process,
                )


def _histories(rank: RankFacts, run: str) -> Iterator[ExportRow]:
    number_of_rank, process = _rank_or_process(rank)
    for kept in rank.histories.values():
        history = kept.open()
        if history is None:  # lost or damaged
            continue
        for batch, step, numbers in zip(history.batches, history.steps, history.numbers.tolist(), strict=True):
            for returned, number in zip(history.modules, numbers, strict=True):
                if number != NO_NUMBER:
                    yield ExportRow(
                        *("history", run, rank.attempt, number_of_rank, kept.root, batch, step),
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


# The table as one Parquet file, with pyarrow. Who writes another format need not have it.

_AT_A_TIME = 1 << 16
"""Rows."""


def write_parquet(rows: Iterable[ExportRow], path: Path) -> None:
    """Numbers are int64 and float64. Raises OSError."""
    import pyarrow
    from pyarrow import parquet

    types = {int: pyarrow.int64(), float: pyarrow.float64(), str: pyarrow.string()}
    columns = [  # the type of a column is `int`, or `int | None`
        (field.encode_name, types[getattr(field.type, "__args__", (field.type,))[0]])
        for field in msgspec.structs.fields(ExportRow)
    ]
    schema = pyarrow.schema(columns)
    rest = iter(rows)
    with parquet.ParquetWriter(path, schema) as writer:
        while chunk := [msgspec.structs.astuple(row) for row in itertools.islice(rest, _AT_A_TIME)]:
            table = dict(zip(COLUMNS, zip(*chunk, strict=True), strict=True))
            writer.write_table(pyarrow.table(table, schema=schema))
