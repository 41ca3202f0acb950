"""Scalars for TensorBoard, a run of its own for each rank: abs max of what each module returned, batch by batch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from .rows import ExportRow


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
    """What a row says, and for which of TensorBoard's runs."""
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
