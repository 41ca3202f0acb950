"""The native frame writer (`FrameWriter` of native/core.c), where it was built and torch lets it look at tensors.

Without it the same is recorded, in more time: it does nothing that rows.py, hooks.py, gradients.py and steps.py do not
do, on the dictionaries that are theirs.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ...core.recorder import layout
from ..hooks.backward import Gradients
from ..stats.device import late_device
from ..stats.tensor_stats import TensorStats
from .collectives import issued
from .leaves import KWARGS
from .notable import Notable
from .progress import Progress
from .rows import COUNT_EVERY, Rows

try:
    from ..native.core import LAYOUT, FrameWriter
except ImportError:  # there was no compiler where this was installed
    LAYOUT, FrameWriter = (), None  # type: ignore[assignment,misc]

_LAYOUT = (
    layout.FRAME.size,
    layout.ROW.size,
    layout.VALUE.size,
    layout.FRAMES_PER_SEGMENT,
    layout.ROWS_PER_SEGMENT,
    layout.VALUES_PER_SEGMENT,
    layout.FRAMES_AT,
    layout.ROWS_AT,
    layout.VALUES_AT,
    COUNT_EVERY,
)


def native_writer_of(progress: Progress, rows: Rows, notable: Notable, gradients: Gradients) -> Any:
    """A FrameWriter for these, or None where there can be none."""
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    settings = progress.settings
    if FrameWriter is None or exchange is None or LAYOUT != _LAYOUT or settings.sync or late_device() is not None:
        return None
    try:
        return FrameWriter(
            memory=progress.recorder.memory,
            cursor=progress.recorder.cursor,
            seen=rows.seen,
            by_memory=rows.by_memory,
            weights=rows.weights,
            shapes=rows.shapes,
            ignored=rows.ignored,
            waived=set(),
            watched=gradients.parameters,
            local=gradients.local,
            kwargs=KWARGS,
            gradients=gradients,
            progress=progress,
            issued=issued,
            numbers=TensorStats,
            tensor=torch.Tensor,
            parameter=torch.nn.Parameter,
            modes=torch._C._len_torch_function_stack,
            compiler=vars(torch.compiler),
            hook_dict=OrderedDict,
            handle=RemovableHandle,
            exchange=exchange,
            near=notable.near,
            forward="forward" in settings.watch,
            with_weights="weights" in settings.watch,
            with_grads="grads" in settings.watch,
        )
    except (AttributeError, TypeError, ValueError):  # a torch that has changed
        return None
