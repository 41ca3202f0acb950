"""The gradient of a parameter as autograd has accumulated it, where other hooks get the gradient as well.

Autograd writes a gradient on its own stream, where our hook reads it. A hook of another library may let another stream
write into it, or into the memory that `.grad` has afterwards, and nothing orders that before our read:

- ZeRO 3 of DeepSpeed copies the gradient into a bucket on a stream of its own, and makes `.grad.data` a slice of it.
- A hook that reduces the gradient at once, with `async_op=True`, has NCCL's stream write over it.
- A hook that moves the gradient to host memory leaves no `.grad`, or one that the copy has not reached yet.

So a first hook starts to read the gradient before all others, and keeps the row. A last one decides with `fate_of` what
the others have done to it, and writes the frame.

When the memory of a gradient is written, and by which hook it is read (torch 2.13, one leaf, one backward):

    hooks of the tensor (`register_hook`)          the sum of all contributions is there, `.grad` is still the old one
    AccumulateGrad                                 writes `.grad`, or adds to it in place
    `register_post_accumulate_grad_hook`           read here. If the parameter has no other such hook, by our one hook.
                                                   Else our first hook reads before the others, and our last one runs
                                                   after them and writes the frame
    hooks of the AccumulateGrad node               DDP's Reducer: copies the gradient, and reduces it over the ranks
    callbacks of the engine (`queue_callback`)     DDP and FSDP wait for the gradients of all ranks. In a job without
                                                   process groups, those on a device are read here, all together
    step                                           read again, where it is not as it was recorded

See torch/csrc/autograd/functions/accumulate_grad.h, and torch/csrc/distributed/c10d/reducer.hpp for DDP.
A reentrant checkpoint runs a backward of its own for each of its calls: `.grad` is then written several times.

Megatron, Transformer Engine and Apex can add a weight's gradient to `main_grad` within the backward's own kernel, on
autograd's stream. `.grad` is then a placeholder that nobody writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch

from ...core.recorder.writer import OpenPage
from ...core.signal_errors import from_outside
from ..record.collectives import issued
from ..record.plain_tensor import local_part, unwrapped, version_of
from ..record.recorded_row import RecordedRow


class GradientFate(Enum):
    """What the other hooks have done to a gradient."""

    LEFT = auto()
    """Nothing."""
    TAKEN = auto()
    """They have given its memory to another stream, or have let go of it: only the early row has its numbers."""
    CHANGED = auto()
    """An operation of torch has changed it in place, as a hook that clips does. It is to be read again."""
    REPLACED = auto()
    """`.grad` is another tensor, or a step has used the gradient: the hook before a step reads what the step gets."""


@dataclass(slots=True, eq=False)
class EarlyReading:
    """A gradient that was read before the other hooks got it."""

    gradient: torch.Tensor
    page: OpenPage
    row: RecordedRow
    step: int
    """Optimizer steps finished when it was read. `issued`, `address` and `version` are of the same moment."""
    issued: int
    address: int
    version: int


class AccumulatedGradients:
    """The gradients whose other hooks run now."""

    def __init__(self) -> None:
        self._early: dict[int, EarlyReading] = {}
        """By id of the parameter."""

    def note(
        self, parameter: torch.Tensor, page: OpenPage, gradient: torch.Tensor, row: RecordedRow, step: int
    ) -> None:
        """`row` is that of a gradient which no other hook has got yet."""
        # Three marks, since each change leaves another one. An operation in place raises the version. `.data = ...`
        # changes the address and not the version. A collective changes neither, but is counted.
        now = issued(), _address_of(gradient), version_of(gradient)
        self._early[id(parameter)] = EarlyReading(gradient, page, row, step, *now)

    def pop(self, parameter: torch.Tensor) -> EarlyReading | None:
        """What was noted of this parameter's gradient in the backward that runs."""
        return self._early.pop(id(parameter), None)

    def forget(self) -> None:
        """No backward runs: one of the other hooks has raised."""
        self._early.clear()


def fate_of(early: EarlyReading, now: torch.Tensor | None, step: int) -> GradientFate:
    """What has become of a gradient. `now`: where the parameter's gradient is now, if it has one.

    A collective changes no version, and may have been issued on this gradient.
    """
    if step != early.step:
        return GradientFate.REPLACED
    # first of the four: what another stream still writes must not be read, whatever else is the same
    if now is None or issued() != early.issued:
        return GradientFate.TAKEN
    if now is not early.gradient:
        return GradientFate.REPLACED
    if _address_of(now) != early.address:
        return GradientFate.TAKEN
    return GradientFate.LEFT if version_of(now) == early.version else GradientFate.CHANGED


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Where autograd has accumulated the gradient of a parameter."""
    # Megatron's and Transformer Engine's mark: the kernel has added to `main_grad`, and `.grad` holds nothing
    if getattr(parameter, "grad_added_to_main_grad", False):
        return getattr(parameter, "main_grad", None)
    return parameter.grad


def is_offloaded(parameter: torch.Tensor) -> bool:
    """Whether FSDP2 keeps this shard in host memory (`CPUOffloadPolicy`).

    FSDP2 calls the hooks of such a parameter when it has started to copy the gradient from the device. It waits for
    the copy at the end of the backward, and the hook before the step reads it then.
    """
    # A hook here would also cost time: torch 2.13 copies such a gradient without overlap if the parameter has a
    # post-accumulate hook (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce).
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and parameter.is_cpu and getattr(mesh, "device_type", "cpu") != "cpu"


def put_first(handle: Any) -> None:
    """Have torch call the hook of this handle before all others of its tensor.

    torch reads the values of the dictionary in C++, in the order in which they were entered: `move_to_end` of an
    OrderedDict has no effect there.
    """
    # the order within an OrderedDict is kept beside the dict that C++ reads, so the others are entered again
    hooks = handle.hooks_dict_ref()
    for key in [key for key in hooks if key != handle.id]:
        hook = hooks[key]
        # no call between these lines: a signal's handler that raises after one would leave the hook out for good
        del hooks[key]
        hooks[key] = hook


def _address_of(gradient: torch.Tensor) -> int:
    """Where its elements are; 0 for a tensor that has no such place, as a sparse one."""
    try:
        return local_part(unwrapped(gradient)).data_ptr()
    except RuntimeError as error:
        if from_outside(error):
            raise
        return 0
