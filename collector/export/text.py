"""The table as JSON lines or as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from typing import IO

import msgspec

from .rows import ExportRow

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
