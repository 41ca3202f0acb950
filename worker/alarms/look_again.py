"""Looks at the module of an alarm once more: its weights, its shard of them, its buffers. It waits for the device.

And at what the attributes of all modules hold: a value that one module leaves in an attribute and another takes out
is in no frame.

A weight is read once per optimizer step, and a script may change it in between. The ranks of FSDP gather a weight from
all of them, so only a rank's own shard tells whose it is. Called for the first alarm of a rank alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn

from ...core.frames import RowKind
from ...core.records import HeldValue, LookedAgain
from ...core.values import NonFinite, name_of
from ..record.names import class_of
from ..stats.tensor_stats import measure
from ..without_modes import without_modes

_MOST = 8
_MOST_HELD = 256
"""Attributes that are measured."""
_OF_TORCH = frozenset(vars(nn.Module()))
"""Parameters, buffers, modules and hooks."""
_CONTAINERS = (list, tuple, dict, deque)


def look_again(root: nn.Module | None, module: nn.Module) -> LookedAgain:
    """What is in the module now. `root` is the model that it is a part of."""
    return without_modes(_look_again, root, module)


def _look_again(root: nn.Module | None, module: nn.Module) -> LookedAgain:
    weights = {name: _found(each) for name, each in list(module._parameters.items())[:_MOST] if each is not None}
    buffers = {name: _found(each) for name, each in list(module._buffers.items())[:_MOST] if each is not None}
    shards = {name: _found(local) for name, local in _shards(root, module)}
    return LookedAgain(
        weights={name: found for name, found in weights.items() if found},
        shards={name: found for name, found in shards.items() if found},
        buffers={name: found for name, found in buffers.items() if found not in ("", "finite")},
        autocast=_autocast(module),
        computed=[name for name, each in module._parameters.items() if each is not None and each.grad_fn is not None],
        held=list(islice(_held(root), _MOST)) if root is not None else [],
    )


def _held(root: nn.Module) -> Iterator[HeldValue]:
    """What attributes of all modules hold that is nan or +inf. A -inf is a mask's, a single inf a bound or a start."""
    for name, module, key, tensor in islice(_attributes(root), _MOST_HELD):
        found = _found(tensor)
        if found not in ("", "finite", "-inf") and not (found == "+inf" and tensor.numel() == 1):
            yield HeldValue(name, class_of(module), key, found)


def _attributes(root: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """(module's name, module, attribute, tensor) of all attributes that are tensors, or hold some in a container."""
    for name, module in root.named_modules():
        for key, value in list(vars(module).items()):
            if key in _OF_TORCH:
                continue
            if isinstance(value, torch.Tensor):
                yield name, module, key, value
            elif isinstance(value, _CONTAINERS):
                inside = value.values() if isinstance(value, dict) else value
                for each in list(islice(inside, _MOST)):
                    if isinstance(each, torch.Tensor):
                        yield name, module, key, each


def _found(tensor: torch.Tensor) -> str:
    """`finite`, `nan`, `+inf`, `-inf`; "" if it cannot be measured."""
    numbers = measure(tensor)
    return name_of(NonFinite(numbers.meta & 0xFF)) if numbers.kind == RowKind.MEASURED else ""


def _shards(root: nn.Module | None, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(parameter, this rank's part of it) of a module that FSDP2 shards.

    Within a forward the module holds the whole parameter. The shard is known to the module that FSDP was applied to:
    internals of torch 2.6 to 2.13, so whatever is missing there means that nothing is known.
    """
    for holder in root.modules() if root is not None else ():
        state: Any = getattr(holder, "_get_fsdp_state", None)
        group: Any = getattr(state(), "_fsdp_param_group", None) if callable(state) else None
        for held in getattr(group, "fsdp_params", None) or ():
            info = getattr(held, "_module_info", None)
            local = getattr(getattr(held, "sharded_param", None), "_local_tensor", None)
            if info is not None and info.module is module and isinstance(local, torch.Tensor):
                yield info.param_name, local


def _autocast(module: nn.Module) -> str:
    """The dtype that autocast computes in, where it is on; else ""."""
    device = next((each.device.type for each in module.parameters(recurse=False)), "cpu")
    try:
        on = torch.is_autocast_enabled(device)
        return str(torch.get_autocast_dtype(device)).removeprefix("torch.") if on else ""
    except (RuntimeError, TypeError):  # a device without autocast, or torch 2.5
        return ""
