"""torch's flight recorder of NCCL, as a rank writes it at our request: what its device was given, and has completed.

torch keeps the last collectives of a process (`TORCH_FR_BUFFER_SIZE`), and gives them as a pickle of plain values. A
rank answers while it waits for its device (worker/answers.py).
(pytorch.org/tutorials/unstable/flight_recorder_tutorial.html)
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ..events import GroupState, IssuedOperation
from .group_table import OPERATIONS, RECENT


def pipe_of(folder: Path, rank: int, attempt: int) -> Path:
    """What comes in there is a question. `folder` is that of the node's recorders."""
    return folder / f"rank-{rank:05d}.attempt-{attempt:03d}.nccl"


def file_of(folder: Path, rank: int, attempt: int) -> Path:
    """The answer."""
    return pipe_of(folder, rank, attempt).with_suffix(".dump")


@dataclass(frozen=True)
class DeviceProgress:
    """What one rank's device was given in a group, and has not completed."""

    enqueued: int = 0
    """Number of the last collective that it was given."""
    pending: int = 0
    """Number of the first operation that it has not completed, below 0 for a message; 0: none."""
    pending_ns: int = 0
    """When that was given to it, Unix time."""
    recent: dict[int, IssuedOperation] = field(default_factory=dict)
    """The last ones, by number."""


class _PlainValues(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain value")


def read_dump(data: bytes) -> dict[str, DeviceProgress] | None:
    """What torch has written, by the groups' names; None if it is not whole, or something else."""
    try:
        entries = _PlainValues(io.BytesIO(data)).load()["entries"]
        found: dict[str, list[_RecordedOperation]] = {}
        for one in entries:
            found.setdefault(str(one["process_group"][0]), []).append(_entry(one))
        return {name: _progress(of_group) for name, of_group in found.items()}
    except Exception:  # whatever was read there
        return None


@dataclass(frozen=True)
class _RecordedOperation:
    number: int
    """Below 0: of a message."""
    name: str
    is_done: bool
    when_ns: int
    issued: IssuedOperation


def _entry(one: Mapping[str, Any]) -> _RecordedOperation:
    name = str(one["profiling_name"]).removeprefix("nccl:")
    number = -int(one["p2p_seq_id"]) if one.get("is_p2p") else int(one["collective_seq_id"])
    operation, _, peers = name.partition(" ")
    known = operation.lstrip("_").replace("allgather", "all_gather")
    known = "barrier" if known.endswith("barrier") else known
    known = next((one for one in reversed(OPERATIONS) if one and known.startswith(one)), "")
    peer = int(peers[peers.index("-") + 2 :] if "->" in peers else peers[peers.index("<") + 2 :]) if peers else -1
    sizes, dtypes = one.get("input_sizes") or [[]], one.get("input_dtypes") or [""]
    issued = IssuedOperation(number, known, _DTYPES.get(dtypes[0], ""), math.prod(sizes[0]), peer)
    return _RecordedOperation(number, name, one["state"] == "completed", int(one["time_created_ns"]), issued)


_DTYPES = {
    **{"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Bool": "bool"},
    **{"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8"},
}
_BUNDLE = "coalesced"
"""The entry of a bundle of operations, which follows theirs and is the only one whose end torch sees."""


def _progress(entries: list[_RecordedOperation]) -> DeviceProgress:
    """A group's collectives and bundles run in the order of their issue; a message alone has its own stream."""
    ends = [
        place for place, entry in enumerate(entries) if entry.is_done and (entry.number > 0 or entry.name == _BUNDLE)
    ]
    waiting = [entry for entry in entries[ends[-1] + 1 if ends else 0 :] if not entry.is_done]
    collectives = [entry.number for entry in entries if entry.number > 0]
    first = waiting[0] if waiting else None
    recent = {entry.number: entry.issued for entry in entries if entry.number > 0}
    if first is not None:
        recent[first.number] = first.issued
    return DeviceProgress(
        enqueued=max(collectives, default=0),
        pending=first.number if first is not None else 0,
        pending_ns=first.when_ns if first is not None else 0,
        recent=recent,
    )


def with_device(
    groups: list[GroupState], devices: Mapping[str, DeviceProgress] | None, now_ns: int
) -> list[GroupState]:
    """What a rank shows of its groups, with what its device shows of them. `now_ns` is Unix time.

    A group whose collectives torch counts otherwise than its table does is left as it is. `devices` None: torch did
    not answer.
    """
    if devices is None:
        return groups
    return [_with_device(group, devices.get(group.name, _NOTHING), now_ns) for group in groups]


_NOTHING = DeviceProgress()


def _with_device(group: GroupState, device: DeviceProgress, now_ns: int) -> GroupState:
    if device.enqueued < group.begun:  # what C++ has begun last is in torch's recorder alone
        return group
    table = {issued.number: issued for issued in group.recent}
    numbers = {*sorted(device.recent)[-RECENT:], *([device.pending] if device.pending else [])}
    recent = [issued for issued in group.recent if issued.number < 0 and issued.number != device.pending]
    for number in sorted(numbers):
        shown, known = device.recent[number], table.get(number)
        # the table has the root as well
        recent.append(known if known is not None and known.operation == shown.operation else shown)
    ended = device.pending - 1 if device.pending > 0 else group.ended if device.pending else device.enqueued
    return replace(
        group,
        begun=device.enqueued,
        ended=ended,
        recent=recent,
        pending=device.pending,
        pending_s=round(max(0, now_ns - device.pending_ns) / 1e9, 1) if device.pending else 0.0,
    )
