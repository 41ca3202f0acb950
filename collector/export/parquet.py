"""The table as one Parquet file, with pyarrow."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
from pyarrow import parquet

from .rows import ExportRow
from .text import COLUMNS

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
