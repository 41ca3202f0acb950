"""The native frame writer (worker/native), where it was built and torch exports tensors to C (DLPack).

It is faster, and records the same as the Python path: rows.py, call_frames.py, backward.py and optimizer.py.
Both work on the same dictionaries.
"""

from __future__ import annotations

import struct
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from ...core.events.own_limits import OwnFault
from ...core.frames import FramePhase, RowKind, RowMark
from ...core.recorder import group_table, layout
from ...core.recorder.group_table import GroupField, GroupPhase
from ...core.recorder.layout import HeadField, RankPhase, SegmentField
from ...core.signal_errors import from_outside
from ...core.values import DTYPE_CODES, INF_BITS, PENDING, ValueEncoding
from ..device.device import late_device
from ..device.device_buffer import DeviceRow, DeviceStatsBuffer
from ..device.grouped_readings import WaitingTensors
from ..record.collectives import count_issued, issued
from ..record.names import KWARGS, leaves_of
from ..record.operation_place import GroupCall
from ..record.progress import RunProgress
from ..record.rows import COUNT_EVERY, RowWriter
from ..record.tensor_stats import TensorStats

try:
    from ..native.core import LAYOUT, NativeFrameWriter
    from ..native.core import trace_hooks_as as trace_hooks_as
except ImportError:  # gpuwatch was installed without a C compiler
    LAYOUT, NativeFrameWriter, trace_hooks_as = {}, None, None  # type: ignore[assignment,misc]


_NOT_IN_DLPACK = {"unknown", "qint8", "quint8", "qint32"}
"""dtypes that DLPack cannot express."""


_IN_LAYOUT = (
    *("SEGMENT_BYTES", "FRAMES_PER_SEGMENT", "ROWS_PER_SEGMENT", "VALUES_PER_SEGMENT", "ROWS_AT", "VALUES_AT"),
    *("NOTHING", "GROUPS_AT", "GROUPS", "GROUP_BYTES"),
)
_OF_SEGMENT = ("PAGE", "BATCH", "FRAMES", "ROWS", "VALUES", "FRAME_BASE", "VALUE_BASE")
_OF_SLOT = (GroupField.USED, GroupField.SIZE, GroupField.TIMEOUT_MS)
"""Fields that are written once, in Python, when a group gets its slot."""
_OF_FRAME = ("DEPTH", "PHASE", "COLLECTIVES", "SEQ", "ROWS")


def _offset(record: struct.Struct, position: int) -> int:
    """Offset in bytes of a struct's field, by the field's position in the format."""
    return struct.calcsize(record.format[: 1 + position])  # the first character is the byte order


def python_layout() -> dict[str, int]:
    """The layout constants that native code shares with Python, by their names in worker/native/include/layout.h."""
    numbers: dict[str, int] = {name: getattr(layout, name) for name in _IN_LAYOUT}
    numbers |= {name: getattr(group_table, name) for name in ("RECENT", "RECENT_AT", "OPERATION_BYTES")}
    numbers |= {f"S_{name}": SegmentField[name] for name in _OF_SEGMENT}
    numbers |= {f"F_{name}": HeadField[name] for name in ("PHASE", "MODULE", "WAITED_NS")}
    numbers |= {f"KIND_{kind.name}": kind.number for kind in RowKind if kind not in (RowKind.LOST, RowKind.PENDING)}
    numbers |= {f"FRAME_{name}": _offset(layout.FRAME, at) for at, name in enumerate(_OF_FRAME, 2)}
    numbers |= {f"ROW_{name}": _offset(layout.ROW, at) for at, name in enumerate(("DTYPE", "KIND", "MARK"), 3)}
    numbers |= {
        "SEGMENT_HEADER": layout.FRAMES_AT,
        "FRAME_BYTES": layout.FRAME.size,
        "ROW_BYTES": layout.ROW.size,
        "VALUE_BYTES": layout.VALUE.size,
        "RANK_BACKWARD": RankPhase.BACKWARD,
        "PHASE_BACKWARD": FramePhase.BACKWARD.number,
        "PHASE_OPTIMIZER": FramePhase.OPTIMIZER.number,
        "MARK_SCALED": RowMark.SCALED,
        "MARK_REHEARSED": RowMark.REHEARSED,
        "ENCODING_INTEGER": ValueEncoding.INTEGER,
        "VALUE_PENDING": PENDING,
        "COUNT_EVERY": COUNT_EVERY,
    }
    numbers |= {f"GROUP_{phase.name}": phase for phase in GroupPhase if phase != GroupPhase.NONE}
    numbers |= {f"G_{field.name}": field for field in GroupField if field not in _OF_SLOT}
    numbers |= {f"CALL_{call.name}": call for call in GroupCall}
    for encoding in (ValueEncoding.FLOAT32, ValueEncoding.FLOAT16, ValueEncoding.BFLOAT16, ValueEncoding.FLOAT64):
        numbers[f"ENCODING_{encoding.name}"] = encoding
        numbers[f"INF_{encoding.name}"] = INF_BITS[encoding]
    numbers |= {f"DTYPE_{name.upper()}": code for name, code in DTYPE_CODES.items() if name not in _NOT_IN_DLPACK}
    return {name: int(number) for name, number in numbers.items()}


def difference(native: dict[str, int]) -> str:
    """One sentence on the layout constants in which the native code differs from Python; empty if there are none."""
    python = python_layout()
    wrong = sorted(name for name in python.keys() | native.keys() if python.get(name) != native.get(name))
    found = ", ".join(f"{name} is {native.get(name)} and not {python.get(name)}" for name in wrong)
    return f"not used: it was built for another layout ({found}); install gpuwatch again" if found else ""


def called_by_native_hooks(progress: RunProgress, rows: RowWriter) -> tuple[Callable[..., Any], ...]:
    """Functions that the native writer's hooks call in a backward, with no Python function of ours around them."""
    buffer = DeviceStatsBuffer
    reads = rows._send_after_collectives, buffer._buffer, buffer.hold, buffer.read_rest
    return *reads, buffer.keep, rows.device_frame, progress.recorder.continue_segment, leaves_of, count_issued


class GradientTables(Protocol):
    """The hooks of the backward, as far as the native writer shares their tables."""

    parameters: dict[int, tuple[weakref.ref[torch.Tensor], list[Any]]]
    local: dict[int, tuple[weakref.ref[torch.Tensor], int]]


def native_writer_of(progress: RunProgress, rows: RowWriter, gradients: GradientTables) -> Any:
    """A NativeFrameWriter; None if it was not built, this torch does not support it, or `--sync` is set.

    It reads tensors in host memory itself. For a frame's tensors on a device it calls `rows.device_frame`.
    """
    # through it C reads a tensor's address, dtype and shape without a call of Python
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    settings = progress.settings
    if NativeFrameWriter is None or exchange is None or settings.sync:
        return None
    # the part in C may be older than this Python, after an upgrade by hand: it would write at wrong offsets
    wrong = difference(LAYOUT)
    if wrong:
        progress.recorder.append(OwnFault(progress.where(), "native frame writer", wrong))
        return None
    try:
        return NativeFrameWriter(
            memory=progress.recorder.memory,
            cursor=progress.recorder.cursor,
            seen=rows.seen,
            by_memory=rows.by_memory,
            weights=rows.weights,
            shapes=rows.shapes,
            ignored=rows.ignored,
            watched=gradients.parameters,
            local=gradients.local,
            kwargs=KWARGS,
            gradients=gradients,
            progress=progress,
            issued=issued,
            numbers=TensorStats,
            device_row=DeviceRow,
            waiting=WaitingTensors,
            tensor=torch.Tensor,
            parameter=torch.nn.Parameter,
            modes=torch._C._len_torch_function_stack,
            compiler=vars(torch.compiler),
            hook_dict=OrderedDict,
            handle=RemovableHandle,
            leaves_of=leaves_of,
            next_segment=progress.recorder.continue_segment,
            mutex=progress.lock.mutex,
            exchange=exchange,
            near=rows.notable.near,
            forward="forward" in settings.watch,
            with_weights="weights" in settings.watch,
            with_grads="grads" in settings.watch,
            device_frame=rows.device_frame,
            device_rows=rows,
            reads_host=late_device() is None,
        )
    except (AttributeError, TypeError, ValueError) as error:  # a torch version whose internals differ
        if from_outside(error):
            raise
        text = f"not used: {type(error).__name__}: {error}"
        progress.recorder.append(OwnFault(progress.where(), "native frame writer", text))
        return None
