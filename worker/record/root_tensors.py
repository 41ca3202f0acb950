"""What a root holds when a batch of it begins: whether its buffers are finite, and hashes for a comparison of ranks.

A buffer is read when it is new or has changed. One that changes in every batch, such as a running average, is
read in one batch of ten. Weights and buffers are hashed, and all buffers read, in batches (or steps) 0, 1, 2,
4, 8, 16, 32, 64, 128, 192, ... and at the end, if the script still holds the model: one more pass over their bytes in
each of these batches, and none in the others. A hash is the sum of the bits as integers. `torch.hash_tensor` (2.13)
combines with xor, for which 64 ones and 64 zeros are the same.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from ...core.events.across_ranks import HashFlag, ReplicaHashes
from ...core.events.looked_again import HeldValue
from ...core.frames import FramePhase
from ...core.judge import STATISTICS
from ...core.recorder.writer import OpenPage
from ...core.signal_errors import suppress_own
from ...core.torch_names import name_in_torch
from ..device.device import ToHost, device_for, has_reader, is_on_device, to_host, without_modes
from .float_formats import FLOATS
from .frame_writer import FrameWriter
from .names import walk
from .plain_tensor import version_of
from .roots import RootInfo
from .tensor_stats import place_of

_norms_of = name_in_torch(
    "torch._foreach_norm", lambda tensors, power: [torch.linalg.vector_norm(each, power) for each in tensors]
)
_EVERY = 10
_MOST_APART = 64
"""Batches between two hashes, until half of the room is used. Then the distance doubles each time."""
_ROOM = 96 << 10
"""Bytes of hashes that a root writes into the recorder's log."""
_MOST_TENSORS = 1024
_MOST_TOLD = 8
_MIX = 0x9E37_79B9_7F4A_7C15 - (1 << 64)
"""An odd number: of two sums that differ, the products differ, most likely in their upper half."""


@dataclass(eq=False, slots=True)
class _HeldBuffer:
    """A buffer of a module, as it was last read."""

    owner: weakref.ref[nn.Module]
    module: str
    name: str
    seen: Any = None
    """Weak reference to the tensor."""
    version: int = -1
    is_busy: bool = False
    """It has changed between two batches."""
    masks: bool = False
    """It held an inf, and no nan, when it was first read: that is meant."""
    value: str = ""
    """`nan` or `inf` if it was not finite, and that is not meant."""


@dataclass(eq=False, slots=True)
class _RootState:
    buffers: dict[tuple[int, str], _HeldBuffer] = field(default_factory=dict)
    """By id of the module, and name."""
    next_batch: int = 0
    next_step: int = 0
    sampled_step: int = -1
    """Step of the last hashes."""
    known: dict[str, tuple[weakref.ref[torch.Tensor], int]] = field(default_factory=dict)
    """Entry -> (the tensor that was hashed last, its version)."""
    table: list[str] = field(default_factory=list)
    tables: int = 0
    used: int = 0


@dataclass(eq=False, slots=True)
class _WaitingHashes:
    event: ReplicaHashes
    parts: list[tuple[list[int], ToHost]]
    """Positions in the table, and their hashes."""
    count: int


@dataclass(eq=False, repr=False)
class RootTensors:
    """The weights and buffers of all roots of a rank."""

    _frames: FrameWriter

    def __post_init__(self) -> None:
        self._progress, self._rows = self._frames.progress, self._frames.rows
        self._is_on = self._progress.watches_weights
        self._states: dict[int, _RootState] = {}
        self._norms: list[tuple[ToHost, list[_HeldBuffer]]] = []
        self._hashes: list[_WaitingHashes] = []

    def read(self, root: RootInfo, module: nn.Module, page: OpenPage) -> None:
        """A batch of a root begins. The caller holds the lock."""
        if self._is_on:
            with self._progress.faults.within("buffers"):
                without_modes(self._look, root, module, page)

    def settle(self) -> bool:
        """The script has ended: hash once more. Whether nothing is outstanding."""
        with suppress_own(Exception):  # the device may have failed
            for root in self._frames.roots.infos if self._is_on else ():
                module, state = root.ref(), self._states.get(root.id)
                if module is not None and state is not None and self._progress.step > state.sampled_step:
                    without_modes(self._hash, root, state, module)
            self._collect_hashes()
        return not self._hashes

    def bad_buffers(self, root_id: int) -> list[HeldValue]:
        """The buffers that were not finite when the last batch of a root began, without those that are meant so."""
        state = self._states.get(root_id)
        if state is None:
            return []
        self._collect_norms(None)
        bad = [held for held in state.buffers.values() if held.value]
        return [
            HeldValue(held.module, self._class_of(root_id, held), held.name, held.value) for held in bad[:_MOST_TOLD]
        ]

    def _class_of(self, root_id: int, held: _HeldBuffer) -> str:
        owner = held.owner()
        info = self._frames.roots.infos[root_id].modules.get(id(owner))
        return info.cls if info is not None else type(owner).__name__

    def _look(self, root: RootInfo, module: nn.Module, page: OpenPage) -> None:
        state = self._states.setdefault(root.id, _RootState())
        is_due = page.batch >= state.next_batch or page.step >= state.next_step
        if is_due:
            self._find_buffers(state, module)
        to_look = [
            (held, tensor)
            for held in state.buffers.values()
            if (owner := held.owner()) is not None
            and (tensor := owner._buffers.get(held.name)) is not None
            and (is_due or self._is_to_look_at(held, tensor, page.batch))
            and self._note(held, tensor)
        ]
        if to_look:
            self._read_norms(to_look)
        if self._norms:
            self._collect_norms((root, page))
        if self._hashes:
            self._collect_hashes()
        if is_due:
            self._hash(root, state, module, page)

    # -- buffers that are not finite ----------------------------------------------------------------------------

    @staticmethod
    def _find_buffers(state: _RootState, module: nn.Module) -> None:
        before, state.buffers = state.buffers, {}
        for path, part in walk(module):
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.dtype in FLOATS:
                    key = (id(part), name)
                    held = before.get(key)
                    is_known = held is not None and held.owner() is part
                    state.buffers[key] = held if held and is_known else _HeldBuffer(weakref.ref(part), path, name)

    @staticmethod
    def _is_to_look_at(held: _HeldBuffer, tensor: torch.Tensor, batch: int) -> bool:
        # BatchNorm's running averages change in each batch: reading all of them each time would cost a pass
        if held.is_busy:
            return batch % _EVERY == 0
        return held.seen is None or held.seen() is not tensor or held.version != version_of(tensor)

    @staticmethod
    def _note(held: _HeldBuffer, tensor: torch.Tensor) -> bool:
        """Note that it is looked at now. False if it cannot be."""
        if place_of(tensor) is None or not (tensor.is_cpu or has_reader(tensor.device)):
            return False
        version = version_of(tensor)
        if held.seen is not None and held.seen() is tensor:
            held.is_busy |= held.version != version
        else:
            held.seen, held.masks = weakref.ref(tensor), True
        held.version = version
        return True

    def _read_norms(self, to_look: list[tuple[_HeldBuffer, torch.Tensor]]) -> None:
        for device in {tensor.device for _, tensor in to_look}:
            group = [(held, tensor.detach()) for held, tensor in to_look if tensor.device == device]
            if _is_capturing(group[0][1]):  # nothing may be launched
                continue
            # nan if there is a nan, else inf if there is an inf
            arrives = to_host(*_norms_of([tensor for _, tensor in group], 1))
            if arrives is not None:
                self._norms.append((arrives, [held for held, _ in group]))

    def _collect_norms(self, into: tuple[RootInfo, OpenPage] | None) -> None:
        """Take what has arrived. Running statistics that are not finite get a frame in this page: it is an alarm."""
        waiting, self._norms = self._norms, []
        for arrives, group in waiting:
            if not arrives.arrived():
                self._norms.append((arrives, group))
                continue
            for held, norm in zip(group, arrives.numbers, strict=True):
                held.masks &= math.isinf(norm)
                held.value = "nan" if math.isnan(norm) else "inf" if math.isinf(norm) and not held.masks else ""
                if not math.isfinite(norm) and held.name in STATISTICS and into is not None:
                    self._write(held, *into)

    def _write(self, held: _HeldBuffer, root: RootInfo, page: OpenPage) -> None:
        owner = held.owner()
        info = root.modules.get(id(owner)) if owner is not None else None
        buffer = owner._buffers.get(held.name) if owner is not None else None
        if info is not None and buffer is not None:
            row = self._rows.leaf(info, f"buffer {held.name}", buffer)
            self._frames.put(page, info, FramePhase.BUFFER, [row])

    # -- hashes -------------------------------------------------------------------------------------------------

    def _hash(self, root: RootInfo, state: _RootState, module: nn.Module, page: OpenPage | None = None) -> None:
        where = self._progress.where(page, root.label)
        is_compared = state.used < _ROOM and (where.clock or state.tables)  # else there are no replicas
        lines, tensors = _entries(module) if is_compared else ([], [])
        if any(map(_is_capturing, tensors)):
            return
        step, batch = self._progress.step, page.batch if page is not None else root.batches
        apart = _MOST_APART if state.used < _ROOM // 2 else 1 << 62
        state.next_batch, state.next_step = (at + min(max(at, 1), apart) for at in (batch, step))
        state.sampled_step = step
        if not lines:
            return
        flags = bytes(self._flags_of(state, line, tensor) for line, tensor in zip(lines, tensors, strict=True))
        is_new = lines != state.table
        if is_new:
            state.table, state.tables = lines, state.tables + 1
        event = ReplicaHashes(where, state.tables, b"", flags, lines if is_new else [])
        waiting = _WaitingHashes(event, [], len(lines))
        for device in {tensor.device for tensor in tensors}:
            places = [place for place, tensor in enumerate(tensors) if tensor.device == device]
            sums = torch.stack([_sum_of(tensors[place]) for place in places])
            driver = device_for(device) if is_on_device(sums) else None
            sums = (sums * _MIX >> 32) & 0xFFFF_FFFF
            waiting.parts.append((places, ToHost(driver.rows(sums) if driver is not None else sums, driver)))
        state.used += 5 * len(lines) + sum(map(len, event.tensors))
        self._hashes.append(waiting)
        self._collect_hashes()

    @staticmethod
    def _flags_of(state: _RootState, entry: str, tensor: torch.Tensor) -> int:
        known, version = state.known.get(entry), version_of(tensor)
        state.known[entry] = weakref.ref(tensor), version
        if known is None or known[0]() is not tensor:
            return HashFlag.REPLACED
        return HashFlag.WRITTEN if version != known[1] or version < 0 else 0

    def _collect_hashes(self) -> None:
        while self._hashes and all(arrives.arrived() for _, arrives in self._hashes[0].parts):
            waiting = self._hashes.pop(0)
            hashes = bytearray(4 * waiting.count)
            for places, arrives in waiting.parts:
                for place, number in zip(places, arrives.numbers, strict=True):
                    hashes[4 * place : 4 * place + 4] = int(number).to_bytes(4, "little")
            self._progress.recorder.append(replace(waiting.event, hashes=bytes(hashes)))


def _is_capturing(tensor: torch.Tensor) -> bool:
    return is_on_device(tensor) and device_for(tensor.device).is_capturing()


def _entries(module: nn.Module) -> tuple[list[str], list[torch.Tensor]]:
    """(`w fc1.weight float32 [4, 4]`, tensor) of the weights and buffers that a rank holds whole; `b` is a buffer."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    parts = list(walk(module))
    # FSDP1 gives each rank another part of a weight: its hashes differ on healthy ranks
    sharded = any(type(part).__name__ == "FullyShardedDataParallel" for _, part in parts)
    for path, part in parts:
        for kind, name, tensor in _held_by(part, with_weights=not sharded):
            place = place_of(tensor) if tensor is not None else None
            if place is None or not (tensor.is_cpu or has_reader(tensor.device)) or len(found) == _MOST_TENSORS:
                continue
            if kind == "b" and place[1] < 2:  # a rank's own flag or number
                continue
            dtype = str(tensor.dtype).removeprefix("torch.")
            words = "" if _has_words(tensor) else " odd"
            qualified = f"{path}.{name}" if path else name
            found.setdefault(id(tensor), (f"{kind} {qualified} {dtype} {list(tensor.shape)}{words}", tensor))
    return [entry for entry, _ in found.values()], [tensor for _, tensor in found.values()]


def _held_by(part: nn.Module, *, with_weights: bool) -> Iterator[tuple[str, str, Any]]:
    if with_weights:
        for name, weight in part._parameters.items():
            yield "w", name, weight
    for name, buffer in part._buffers.items():
        yield "b", name, buffer


def _has_words(tensor: torch.Tensor) -> bool:
    """Whether its bytes are whole words of 8: one pass over int64 takes a twentieth of one over int32 on the CPU."""
    size = tensor.element_size()
    return tensor.numel() * size % 8 == 0 and tensor.storage_offset() * size % 8 == 0


def _sum_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().view(-1)
    bits = flat.view(torch.int64) if _has_words(tensor) else flat.view(FLOATS[tensor.dtype].bits)
    return bits.sum(dtype=torch.int64)
