"""Rows: the records of tensors. A page reads each distinct tensor once, and a weight once per optimizer step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...core.events.run_position import RunPosition
from ...core.frames import RowKind, RowMark
from ...core.recorder.layout import NOTHING
from ...core.signal_errors import from_outside
from ...core.values import PENDING
from ..device.captured_rows import CAPTURED
from ..device.device import is_on_device, late_device
from ..device.device_buffer import DeviceRow
from ..device.torch_reader import FROM_GRAPH, GRAPH_NUMBERS
from .float_formats import CODES, FloatFormat
from .named_rows import NamedRows
from .names import inputs_of
from .plain_tensor import has_numbers, is_unfinished, version_of
from .recorded_row import RecordedRow
from .roots import ModuleInfo, is_released
from .tensor_stats import TensorReading, TensorStats, in_memory, measure, place_of, stats_in_memory
from .unmeasured_rows import UnmeasuredRows

_FEW = 256
"""Entries of freed weights are purged only when there are more entries than this."""
COUNT_EVERY = 10
"""Zeros and subnormals are counted in one of this many batches."""


_TENSOR = torch.Tensor
_ref = weakref.ref
_MEASURED, _NOT_MEASURABLE = RowKind.MEASURED.number, RowKind.NOT_MEASURABLE.number
_IGNORED = int(RowMark.IGNORED)


def _has_moved(tensor: torch.Tensor, address: int) -> bool:
    """Whether a tensor has other memory than at an address, as after `x.data = ...`: that leaves its version."""
    return address != 0 and 0 != tensor.data_ptr() != address


def _is_still_at(tensor: torch.Tensor | None, address: int) -> bool:
    """Whether a tensor is alive and lies there still. It may have left its memory to another: see `_has_moved`."""
    return tensor is not None and tensor.data_ptr() == address


def _is_empty(tensor: torch.Tensor) -> bool:
    """Whether it has no elements, as far as that can be known without waiting."""
    try:
        return tensor.numel() == 0
    except RuntimeError as error:  # a nested tensor
        if from_outside(error):
            raise
        return False


_new: Callable[[type[RecordedRow], tuple[Any, ...]], RecordedRow] = tuple.__new__
"""Makes a named tuple three times as fast as its class does."""

# A tensor is remembered by id, with a weak reference, its version and at times its address, and never held:
#
# - A strong reference would keep an activation that the script has dropped, for as long as the page.
# - An id and an address belong to another tensor once the first one is freed: the weak reference is dead then
#   (docs.python.org/3/library/functions.html#id).
# - An operation in place raises `_version`. `x.data = ...` does not, but changes the address. A collective changes
#   neither: `may_have_changed` counts collectives for that. An inference tensor has no version, and -1 never matches.
_Seen = tuple[Callable[[], Any], int, int, int, int, int, int, int, int, int]
"""Weak reference to the tensor, its version; value, shape, dtype code and kind of its row, flags, high and meta;
and the address of its elements if it is on a device, 0 where that is not known."""


_Weight = tuple[Callable[[], Any], int, int, TensorStats | DeviceRow]
"""Weak reference to the parameter, its version, the step, and its numbers or the row on the device that holds them."""


@dataclass(eq=False, repr=False)
class RowWriter(NamedRows):
    """Reads tensors and writes their numbers into the current page."""

    _where: Callable[[], RunPosition]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seen: dict[int, _Seen] = {}
        self.by_memory: dict[tuple[int, int, int], _Seen] = {}
        """(address, elements, dtype code) -> how it was last seen. Live tensors with one key share their elements."""
        self.weights: dict[int, _Weight] = {}
        self._many = _FEW
        self.changed: dict[int, _Seen] = {}
        """id of a tensor -> how it was last seen, for arguments of this call that were changed in place."""
        self._late = late_device()
        self._seq_of_call = -1
        """Collectives issued before the last call ended whose arguments were checked."""
        self._unmeasured = UnmeasuredRows(self._recorder, self._where)
        self._note_unmeasured, self.look_at_unfinished = self._unmeasured.note, self._unmeasured.look_at_unfinished
        self._first_after = 0
        """The first value of the page that was read after the last collective."""

    def begin_page(self, batch: int) -> None:
        """Forget the tensors of the page before, and decide whether this batch is counted."""
        if self._unmeasured.unfinished:
            self.look_at_unfinished()
        # addresses and ids are used again in the next batch
        self.seen.clear()
        self.by_memory.clear()
        self.changed.clear()
        self._first_after = 0
        if len(self.weights) > self._many:  # a forward that makes modules adds weights in every call
            for gone in [key for key, known in self.weights.items() if known[0]() is None]:
                del self.weights[gone]
            self._many = 2 * max(_FEW, len(self.weights))
        self.count_in(batch)

    def count_in(self, batch: int) -> None:
        """Count zeros and subnormals in this batch or not. It depends on the batch alone: all ranks do the same."""
        self.count = batch % COUNT_EVERY == 0

    # -- rows ---------------------------------------------------------------------------------------------------

    def argument(self, info: ModuleInfo, role: str, leaf: Any) -> RecordedRow:
        """The row of an input. It is never notable: a call is judged by its output."""
        known = self.seen.get(id(leaf))
        row = self.leaf(info, role, leaf)
        if row.fresh and known is not None and known[0]() is leaf:
            self.changed[id(leaf)] = known
        return row._replace(notable=False) if row.notable else row

    def read_again(self, info: ModuleInfo, role: str, leaf: torch.Tensor) -> RecordedRow | None:
        """The row of an argument in host memory that changed since it was last read; None if it did not."""
        if is_on_device(leaf):
            return None
        numbers = measure(leaf, self.count)
        if numbers.kind != _MEASURED or not numbers.meta & 0xFF:
            return None
        return self._row(self.slot(info, role), leaf, 0, numbers)._replace(notable=False)

    def may_have_changed(self, seq: int) -> bool:
        """Whether a collective was issued since something on a device was read for this page. `seq`: see `issued`."""
        # values of the page up to here were read before the collective that was issued since
        if seq != self._seq_of_call:
            self._seq_of_call = seq
            self._first_after = self._recorder.value_count
        return self._first_after > 0

    def forget_changed_arguments(self, args: Any, kwargs: Any) -> None:
        """Read arguments on a device again if they were read before the last collective.

        A collective writes into a tensor without a new version. `read_again` does the same for host memory.
        """
        for _, leaf in inputs_of(args, kwargs):
            known = self.seen.get(id(leaf))
            if known is not None and known[2] < self._first_after:
                del self.seen[id(leaf)]
            if type(leaf) is _TENSOR and leaf.layout is torch.strided:
                place = leaf.data_ptr(), leaf.numel(), CODES.get(leaf.dtype, 0)
                known = self.by_memory.get(place)
                if known is not None and known[2] < self._first_after:
                    del self.by_memory[place]

    def before(self, info: ModuleInfo, role: str, leaf: Any) -> RecordedRow:
        """The row of an argument in `changed`, with the numbers it had before the call."""
        _, _, value, shape, code, kind, flags, *_ = self.changed[id(leaf)]
        return _new(
            RecordedRow, ((self.slot(info, f"before {role}"), value, shape, code, kind, 0), flags, False, 0, 0, False)
        )

    def leaf(self, info: ModuleInfo, role: str, leaf: Any, mark: int = 0) -> RecordedRow:
        """The row of an input, an output or a gradient."""
        slot = info.slots.get(role)
        if slot is None:
            slot = self.slot(info, role)
        if slot in self.ignored:
            mark |= _IGNORED
        if not isinstance(leaf, _TENSOR):
            kind = RowKind.NONE if leaf is None else RowKind.NOT_A_TENSOR
            return RecordedRow((slot, NOTHING, NOTHING, 0, kind.number, mark), 0, False)
        version = version_of(leaf)
        key = id(leaf)
        known = self.seen.get(key)
        if known is not None and known[1] == version >= 0 and known[0]() is leaf and not _has_moved(leaf, known[9]):
            packed = (slot, known[2], known[3], known[4], known[5], mark)
            return _new(RecordedRow, (packed, known[6], False, known[7], known[8], known[6] != 0))
        place = place_of(leaf)
        memory = None
        if place is not None and type(leaf) is _TENSOR:
            memory = (place[0], place[1], place[2][0])
            # alive and at that address still: the allocator gives freed memory to the next tensor of that size
            alias = self.by_memory.get(memory)
            if alias is not None and alias[1] == version >= 0 and _is_still_at(alias[0](), place[0]):
                # another view of the same elements: reshaped, or returned by an autograd function, as in FSDP
                packed = (slot, alias[2], self._shape(leaf), alias[4], alias[5], mark)
                return _new(RecordedRow, (packed, alias[6], False, alias[7], alias[8], alias[6] != 0))
        if place is not None and self._late is None and leaf.is_cpu:
            row = self._host_row(slot, leaf, mark, place)
        else:
            row = self._row(slot, leaf, mark)
        packed, flags, _, high, meta, _ = row
        if packed[4] == _NOT_MEASURABLE and is_unfinished(leaf):
            return row  # it is read where it is used
        address = memory[0] if memory is not None and meta == PENDING else 0
        seen = (_ref(leaf), version, packed[1], packed[2], packed[3], packed[4], flags, high, meta, address)
        self.seen[key] = seen
        if memory is not None:
            self.by_memory[memory] = seen
        return row

    def forget(self) -> None:
        """Read every tensor again when it is next recorded."""
        self.seen.clear()
        self.by_memory.clear()

    def gradient(
        self, info: ModuleInfo, role: str, gradient: torch.Tensor, mark: int = 0, numbers: TensorStats | None = None
    ) -> RecordedRow:
        """The row of a gradient. No other row is about the same tensor, so its numbers are not kept.

        `numbers` are given if the gradient has been read already, on any device.
        """
        slot = info.slots.get(role)
        if slot is None:
            slot = self.slot(info, role)
        if slot in self.ignored:
            mark |= _IGNORED
        place = in_memory(gradient) if numbers is None and self._late is None else None
        if place is not None:
            return self._host_row(slot, gradient, mark, place)
        return self._row(slot, gradient, mark, numbers)

    def traced(
        self,
        info: ModuleInfo,
        role: str,
        dtype: torch.dtype | None,
        kind: RowKind,
        source: TensorReading | torch.Tensor | RecordedRow | None = None,
        mark: int = 0,
    ) -> RecordedRow:
        """The row of a tensor of type `dtype` that was read inside a compiled region.

        `source` is one of three things: the numbers and dims of a tensor in host memory; an earlier row about the same
        tensor; or a device tensor with the `graph_numbers` of the tensor, which is read in its place. The shape of the
        row is then unknown.
        """
        slot = info.slots.get(role)
        if slot is None:
            slot = self.slot(info, role)
        if slot in self.ignored:
            mark |= _IGNORED
        code = CODES.get(dtype, 0) if dtype is not None else 0
        if source is None:
            return RecordedRow((slot, NOTHING, NOTHING, code, kind.number, mark), 0, False)
        if isinstance(source, RecordedRow):
            packed, flags, _, high, meta, _ = source
            again = (slot, packed[1], packed[2], code, packed[4], mark)
            return _new(RecordedRow, (again, flags, False, high, meta, flags != 0))
        if isinstance(source, torch.Tensor):
            numbers = None if is_on_device(source) else measure(source[:GRAPH_NUMBERS])
            packed, flags, _, high, meta, notable = self._row(slot, source, mark, numbers, FROM_GRAPH)
            return _new(
                RecordedRow, ((slot, packed[1], NOTHING, code, packed[4], mark), flags, True, high, meta, notable)
            )
        (low, high, meta, seen_as), dims = source
        if seen_as != _MEASURED:
            return RecordedRow((slot, NOTHING, NOTHING, code, seen_as, mark), 0, True)
        value = self._recorder.value(low, high, meta)
        packed = (slot, value, self._shape_of(dims), code, 0, mark)
        return _new(RecordedRow, (packed, meta & 0xFF, True, high, meta, self.notable.value(code, high, meta)))

    def weight(self, info: ModuleInfo, name: str, parameter: torch.Tensor, step: int) -> RecordedRow:
        """The row of a weight. A weight is read once per optimizer step, and every page holds its numbers.

        A weight on a device comes after the other rows of its frame: see `DeviceStatsBuffer.frame`.
        """
        slot = info.slots.get(name)
        if slot is None:
            slot = self.slot(info, name)
        mark = _IGNORED if slot in self.ignored else 0
        version = version_of(parameter)
        key = id(parameter)
        seen = self.seen.get(key)
        if seen is not None and seen[1] == version and seen[0]() is parameter:
            packed = (slot, seen[2], seen[3], seen[4], seen[5], mark)
            return _new(RecordedRow, (packed, seen[6], False, seen[7], seen[8], seen[6] != 0))
        known = self.weights.get(key)
        # the step as well: fused optimizers write without a new version
        if known is not None and not (known[1] == version and known[2] == step and known[0]() is parameter):
            known = None
        reference = known[0] if known is not None else _ref(parameter)
        numbers: TensorStats | DeviceRow | None = known[3] if known is not None else None
        if is_on_device(parameter):
            (index,), (numbers,) = self._device_frame([parameter], [0], [numbers])
            row = self._device_row(slot, parameter, mark, index, info)
        else:
            if not isinstance(numbers, TensorStats):
                numbers = measure(parameter)
            row = self._row(slot, parameter, mark, numbers, info=info)
        if numbers is not None:
            self.weights[key] = (reference, version, step, numbers)
        packed = row.packed
        self.seen[key] = (reference, version, packed[1], packed[2], packed[3], packed[4], row[1], row[3], row[4], 0)
        return row

    def weight_again(self, info: ModuleInfo, name: str, parameter: torch.Tensor, step: int) -> RecordedRow:
        """The row of a weight, read again: something other than the optimizer may have changed it unnoticed."""
        self.seen.pop(id(parameter), None)
        self.weights.pop(id(parameter), None)
        return self.weight(info, name, parameter, step)

    def weight_has_changed(self, parameter: torch.Tensor) -> bool:
        """Whether a weight that was read has another version since, and can be read again."""
        known = self.weights.get(id(parameter))
        if known is None or known[0]() is not parameter or known[1] == version_of(parameter):
            return False
        return not is_released(parameter) and has_numbers(parameter)

    def _host_row(self, slot: int, tensor: torch.Tensor, mark: int, place: tuple[int, int, FloatFormat]) -> RecordedRow:
        """The row of a tensor in host memory, at the place that `in_memory` returned."""
        low, high, meta, _ = stats_in_memory(tensor, *place, self.count)
        value = self._recorder.value(low, high, meta)
        code = place[2][0]
        packed = (slot, value, self._shape(tensor), code, 0, mark)
        return _new(RecordedRow, (packed, meta & 0xFF, True, high, meta, self.notable.value(code, high, meta)))

    def _row(
        self,
        slot: int,
        tensor: torch.Tensor,
        mark: int,
        numbers: TensorStats | None = None,
        elements: int = 0,
        info: ModuleInfo | None = None,
    ) -> RecordedRow:
        if numbers is None and is_on_device(tensor):
            return self._device_row(slot, tensor, mark, self._device_frame([tensor], [elements], [])[0][0])
        value, flags = NOTHING, 0
        code = CODES.get(tensor.dtype, 0)
        low, high, meta, kind = numbers if numbers is not None else measure(tensor, self.count)
        if kind == _MEASURED:
            value = self._recorder.value(low, high, meta)
            flags = meta & 0xFF
        elif kind == _NOT_MEASURABLE:
            self._note_unmeasured(slot, tensor, mark, info)
        packed = (slot, value, self._shape(tensor), code, kind, mark)
        notable = kind == _MEASURED and self.notable.value(code, high, meta)
        return _new(RecordedRow, (packed, flags, True, high, meta, notable))

    def _device_row(
        self, slot: int, tensor: torch.Tensor, mark: int, index: int | None, info: ModuleInfo | None = None
    ) -> RecordedRow:
        """The row of a tensor on a device whose value has this index; None: it cannot be measured."""
        value, kind, meta = NOTHING, RowKind.NOT_MEASURABLE, 0
        if index is not None and index >= CAPTURED:
            value = index
        elif index is not None:
            value, kind, meta = index, RowKind.MEASURED, PENDING
        elif _is_empty(tensor):
            kind = RowKind.EMPTY
        elif not self.is_capturing:  # what a graph does not read is counted by itself
            self._note_unmeasured(slot, tensor, mark, info)
        packed = (slot, value, self._shape(tensor), CODES.get(tensor.dtype, 0), kind.number, mark)
        return _new(RecordedRow, (packed, 0, True, 0, meta, False))
