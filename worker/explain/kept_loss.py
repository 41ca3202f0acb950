"""What the graph of a loss has saved, kept until the number of the loss has arrived from a device.

A backward frees what a node has saved once it has run, and the number arrives later. So small tensors among these are
held on to. That costs memory for a moment, and no time of the device: nothing is read and nothing is copied. When the
loss is bad, the search for its operation reads a `KeptNode` as it reads a node of torch's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from ...core.signal_errors import from_outside
from ..record.autograd_graph import ReturnedOutputs, is_of_torch
from ..record.plain_tensor import version_of
from .code_place import CallSite, call_sites
from .node_operations import saved

_MOST_NODES = 128
_MOST_SITES = 4
_MOST_BYTES = 4 << 20
"""Of one tensor."""
_MOST_BYTES_KEPT = 16 << 20
_SAVED, _RAW, _LEAF = "_saved_", "_raw_saved_", "variable"
_AT_HAND = SimpleNamespace(unpack_hook=None)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _KeptTensors(NamedTuple):
    """What a node has saved under one name: a tensor, or a list of some."""

    value: Any
    tensors: list[torch.Tensor]
    versions: list[int]
    bytes: list[int]

    def unchanged(self) -> Any:
        """The value. Raises RuntimeError, as torch does, if a tensor was changed in place since, or has no memory."""
        # FSDP gives the memory of a gathered weight back with resize_(0)
        if self.versions != list(map(version_of, self.tensors)) or self.bytes != list(map(_bytes_of, self.tensors)):
            raise RuntimeError("what was kept of a node was changed since")
        return self.value


class KeptNode:
    """A node of autograd's, whose backward may have run since: its attributes are what they were before."""

    __slots__ = ("_is_inner", "_kept", "itself", "next_functions")

    def __init__(self, itself: Any, is_inner: bool) -> None:
        self.itself, self._is_inner = itself, is_inner
        self.next_functions: tuple[tuple[KeptNode | None, int], ...] = ()
        self._kept: dict[str, _KeptTensors] = {}

    def name(self) -> str:
        """That of torch; "" for a node of a module's, of which nothing is known but its result."""
        return "" if self._is_inner else self.itself.name()

    def keep(self, name: str, value: Any, left: int) -> int:
        """Hold on to what the node has saved under a name, if it takes at most `left` bytes. How many it takes."""
        tensors = [each for each in (value if isinstance(value, list) else [value]) if each is not None]
        sizes = list(map(_bytes_of, tensors))
        if not tensors or max(sizes) > _MOST_BYTES or sum(sizes) > left:
            return 0
        alone = [each.detach() for each in tensors]
        self._kept[name] = _KeptTensors(
            alone if isinstance(value, list) else alone[0], alone, list(map(version_of, alone)), sizes
        )
        return sum(sizes)

    def forget(self, memory: set[int]) -> None:
        """Let go of what lies in memory at one of these addresses."""
        self._kept = {name: each for name, each in self._kept.items() if memory.isdisjoint(map(_memory, each.tensors))}

    def __getattr__(self, name: str) -> Any:
        """As torch's node has it. Raises RuntimeError if it is a tensor that was changed since."""
        if name.startswith(_RAW):
            return _AT_HAND if name.removeprefix(_RAW) in self._kept else None
        known = self._kept.get(name.removeprefix(_SAVED))
        if known is not None:
            return known.unchanged()
        return None if name == _LEAF else getattr(self.itself, name)


class KeptLoss(NamedTuple):
    """A loss, as the search for its operation reads one."""

    grad_fn: KeptNode
    output_nr: int
    number: torch.Tensor
    """Of one element. `version`: how often it had been changed in place."""
    version: int
    is_scaled: bool
    """By a GradScaler."""
    sites: list[CallSite]
    """Where its backward began, the innermost first."""
    nodes: list[KeptNode]

    def forget_weights(self, weights: Iterable[torch.Tensor]) -> None:
        """Let go of these weights and of the leaves of the graph: an optimizer has made a step since, and a fused one
        leaves no mark on what it changes."""
        leaves = (getattr(each.itself, _LEAF, None) for each in self.nodes)
        memory = {_memory(each) for each in (*weights, *leaves) if isinstance(each, torch.Tensor) and _is_plain(each)}
        for node in self.nodes:
            node.forget(memory)


def kept_loss(
    loss: torch.Tensor, returned: Iterable[ReturnedOutputs], is_scaled: bool, frame: FrameType
) -> KeptLoss | None:
    """Keep what the script's own nodes have saved, up to what modules returned. None if a node is not torch's own: it
    may use memory again without a mark, as compiled code does and a kernel that writes over what a forward has made.

    `frame`: which calls the backward.
    """
    number, returned = loss.detach(), list(returned)
    kept = _script_nodes(loss.grad_fn, returned) if _bytes_of(number) <= _MOST_BYTES else None
    if not kept:
        return None
    bytes_left = _MOST_BYTES_KEPT
    for node, part in kept.items():
        if part.name():
            part.next_functions = tuple((kept.get(before), place) for before, place in node.next_functions)
            for name in _saved_names(node.__class__):
                bytes_left -= part.keep(name, _saved_by(node, name), bytes_left)
    outputs = ((ref(), version) for calls in returned for ref, version in calls.outputs)
    for output, version in outputs:
        if output is None or output.output_nr or not _is_plain(output) or version_of(output) != version:
            continue
        made_by = kept.get(output.grad_fn)
        if made_by is not None:
            bytes_left -= made_by.keep("result", output, bytes_left)
    return KeptLoss(
        kept[loss.grad_fn],
        loss.output_nr,
        number,
        version_of(number),
        is_scaled,
        call_sites(frame, _MOST_SITES),
        list(kept.values()),
    )


def _script_nodes(start: Any, returned: list[ReturnedOutputs]) -> dict[Any, KeptNode] | None:
    """Each node that the script's own code has made, the nearest to the loss first, and those of modules next to them.

    None if one is not torch's own, or there are too many.
    """
    kept: dict[Any, KeptNode] = {}
    spans = [(each.first, each.end) for each in returned]
    left = deque([start])
    while left:
        node = left.popleft()
        if node is None or node in kept:
            continue
        if len(kept) == _MOST_NODES or not is_of_torch(node):
            return None
        number, is_inner = node._sequence_nr(), False
        for first, end in spans:  # any() would take three times as long
            is_inner = is_inner or first <= number < end
        kept[node] = KeptNode(node, is_inner)
        if not is_inner:
            left += [before for before, _ in node.next_functions]
    return kept


@lru_cache(256)
def _saved_names(cls: Any) -> list[str]:
    """The names under which nodes of a class have tensors."""
    return [name.removeprefix(_RAW) for name in dir(cls) if name.startswith(_RAW) or name == _LEAF]


def _saved_by(node: Any, name: str) -> Any:
    try:
        value = getattr(node, name) if name == _LEAF else saved(node, name)
    except (RuntimeError, LookupError) as error:  # changed in place, or it would have to be unpacked
        if from_outside(error):
            raise
        return None
    return value if all(map(_is_plain, value if isinstance(value, list) else [value])) else None


def _is_plain(value: Any) -> bool:
    return value is None or (type(value) in _PLAIN and value.layout is torch.strided)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes_of(tensor: torch.Tensor) -> int:
    """Of all memory that a tensor keeps: a view keeps that of its base."""
    return tensor.untyped_storage().nbytes()
