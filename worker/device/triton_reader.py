"""Reads a tensor into a row on its device with the kernels of kernel.py, at little cost for the host.

For each launch, Triton binds the arguments, derives a key from them and looks up the compiled kernel. That takes
many times as long as the driver's launch. Here the key holds only the arguments that can differ, and the driver
launches the compiled kernel (kernel_launcher.py).
"""
# ruff: noqa: D102  # `TensorReader` says what the methods of a reader do

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..record.tensor_stats import LOW_PRECISION
from .device import without_modes
from .kernel_launcher import KernelLauncher, KernelTrial, TrialWay, launch
from .torch_reader import DTYPES, ENTRY, KINDS, GroupedReadings, KernelDtype, TensorSource, dense

try:
    from ..native.core import launch_reads
    from ..native.core import tables as _native_tables
except ImportError:  # gpuwatch was installed without a C compiler
    _native_tables = None  # type: ignore[assignment]

    def launch_reads(  # type: ignore[misc]  # of these arguments it needs two
        kernels: Any, stream_of: Any, tensors: Any, *about: Any
    ) -> tuple[int, int] | None:
        """Triton launches each of them."""
        return (about[1], 1) if about[1] < len(tensors) else None


_OPTIONS = {"enable_fp_fusion": True}
"""The options of an ordinary launch. The kernels multiply no floats; without it, Triton 3.9 warns the script."""
_INT32 = 1 << 31
_PACK_BLOCK = 128
_ROWS, _ENTRY = 256, 8
"""As in kernel.py: the longest list of rows, and the columns of the table of `read_many`."""
_BLOCKS = 8
"""Blocks that a program of `read_many` reads, one after the other."""


class TritonReader:
    """A `TensorReader`. Raises ImportError without Triton. The first launches may raise any exception."""

    def __init__(self, kernel: Any = None, launcher: KernelLauncher | None = None) -> None:
        if kernel is None:
            from . import kernel as ours

            kernel = ours
        self._kernel = kernel
        self._launcher = launcher or KernelLauncher()
        self._stream = self._launcher.stream
        self.reads: dict[tuple[Any, ...], tuple[bytes, int, int]] = {}
        """Key of a read -> (kernel for `launch_reads`, elements in a block, most programs)"""
        self._loaded: set[tuple[Any, ...]] = set()
        """Keys of reads whose kernel Triton has compiled and launched."""
        self._kernels: dict[tuple[Any, ...], bytes] = {}
        """The others for `launch`"""
        self._programs: dict[torch.device, int] = {}
        self.interpreted: bool = kernel.INTERPRETED

    def read(self, source: TensorSource, rows: torch.Tensor, position: int, count: bool) -> None:
        """The device must be the current one."""
        if not self._launched_read(source, rows, position, count):
            without_modes(self._ordinary_read, source, rows, position, count)

    def read_dense(
        self, tensors: list[torch.Tensor], elements: list[int], rows: torch.Tensor, position: int, count: bool
    ) -> None:
        """One launch reads two tensors that are alike."""
        about, at = (0, 0, rows, position, count), 0
        while (left := launch_reads(self.reads, self._stream, tensors, elements, at, *about)) is not None:
            at, number = left
            source, *other = map(dense, tensors[at : at + number], elements[at:])
            if other:
                without_modes(self._ordinary_two, source, other[0], rows, position + at, count)
            else:
                without_modes(self._ordinary_read, source, rows, position + at, count)
            at += number

    def read_known(self, source: TensorSource, rows: torch.Tensor, position: int, count: bool) -> bool:
        """Whether zeros are counted is less important than that the tensor is read."""
        tensor, elements, inner, stride = source
        for counted in (count, not count):
            key, about = _key_of(source, rows, counted), (rows, position, counted)
            if key in self.reads:
                return self._launched_read(source, *about)
            if key in self._loaded:
                without_modes(self._launch_read, source, *about)
                return True
            nothing = dense(tensor, 0)  # the kernel for two tensors may have run before
            left = launch_reads(self.reads, self._stream, (tensor,) * 2, (elements, 0), 0, inner, stride, *about)
            if left == (0, 2) and _key_of_two(source, rows, counted) in self._loaded:
                without_modes(self._launch_two, source, nothing, *about)
            elif left is not None:
                continue
            return True
        return False

    def _launched_read(self, source: TensorSource, rows: torch.Tensor, position: int, count: bool) -> bool:
        tensor, elements, inner, stride = source
        about = inner, stride, rows, position, count
        return launch_reads(self.reads, self._stream, (tensor,), (elements,), 0, *about) is None

    def _ordinary_read(self, source: TensorSource, rows: torch.Tensor, position: int, count: bool) -> None:
        """An ordinary launch, which compiles the kernel where Triton has not done so yet."""
        compiled = self._launch_read(source, rows, position, count)
        sizes = bytes((8, 8, 4, *(8 if size >= _INT32 else 4 for size in source[1:])))
        layout = layout_of(source.elements, source.stride)
        self._keep_read(_key_of(source, rows, count), compiled, sizes, rows, TrialWay.READ, source, count, layout)

    def _launch_read(self, source: TensorSource, rows: torch.Tensor, position: int, count: bool) -> Any:
        tensor, elements, inner, stride = source
        kind, block, constants = _constants(tensor.dtype, count, layout_of(elements, stride))
        view = tensor if kind.read_as is tensor.dtype else tensor.view(kind.read_as)
        ordinary = self._kernel.read[(min(-(-elements // block), self._most_programs(tensor.device)),)]
        return ordinary(view, rows, position, elements, inner, stride, *constants, **_OPTIONS)

    def _ordinary_two(
        self, source: TensorSource, other: TensorSource, rows: torch.Tensor, position: int, count: bool
    ) -> None:
        compiled = self._launch_two(source, other, rows, position, count)
        sizes = bytes((8, 8, 8, 4, 4, 4, 4))
        self._keep_read(_key_of_two(source, rows, count), compiled, sizes, rows, TrialWay.TWO, source, count, 0)

    def _launch_two(
        self, source: TensorSource, other: TensorSource, rows: torch.Tensor, position: int, count: bool
    ) -> Any:
        kind, block, constants = _constants(source.tensor.dtype, count, 0)
        views = [
            one.tensor if kind.read_as is one.tensor.dtype else one.tensor.view(kind.read_as) for one in (source, other)
        ]
        most, sizes = self._most_programs(rows.device), (source.elements, other.elements)
        first, others = (min(-(-size // block), most) for size in sizes)
        options = self._kernel.element(kind.read_as), *constants
        return self._kernel.read_two[(first + others,)](*views, rows, position, *sizes, first, *options, **_OPTIONS)

    def _keep_read(
        self,
        key: tuple[Any, ...],
        compiled: Any,
        sizes: bytes,
        rows: torch.Tensor,
        way: TrialWay,
        source: TensorSource,
        count: bool,
        layout: int,
    ) -> None:
        self._loaded.add(key)
        about = source.tensor.dtype, count, layout
        found = self._tried(key, compiled, sizes, rows.device, way, *about)
        if found is not None:
            self.reads[key] = found, _constants(*about)[1], self._most_programs(rows.device)

    def read_many(self, readings: GroupedReadings, rows: torch.Tensor) -> None:
        """One launch for all tensors of one dtype and layout, as torch's foreach operations do it.

        A table on the device says which programs read which tensor. It is copied there without waiting.
        """
        device = rows.device
        make = tables if _native_tables is None else _native_tables
        earlier, groups = make(readings.entries, _share_of, self._most_programs(device), _ROWS)
        table = _on(device, b"".join([earlier, *(entries for _, _, entries in groups)]))
        at = _ROWS
        for variant, programs, entries in groups:
            tensors = table[at:], table, rows
            number = len(entries) // ENTRY.size
            key = device, "many", variant, *(each.data_ptr() % 16 == 0 for each in tensors)
            if not self._launched(key, programs, tensors, number):
                parts = _parts_of(variant)
                kind, _, constants = _constants(*parts)
                options = self._kernel.element(kind.read_as), bool(variant & 2), *constants, bool(variant & 1)
                compiled = self._kernel.read_many[(programs,)](*tensors, number, *options, **_OPTIONS)
                self._keep(key, compiled, device, TrialWay.KEPT if variant & 1 else TrialWay.MANY, *parts)
            at += number * _ENTRY

    def pack(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        packed = rows.new_empty(count, 3)
        programs = -(-count // _PACK_BLOCK)
        key = (rows.device, "pack", rows.data_ptr() % 16 == 0, packed.data_ptr() % 16 == 0)
        if not self._launched(key, programs, (rows, packed), count):
            compiled = self._kernel.pack[(programs,)](rows, packed, count, _PACK_BLOCK, **_OPTIONS)
            self._keep(key, compiled, rows.device, TrialWay.PACK, torch.float32)
        return packed

    def _launched(self, key: tuple[Any, ...], programs: int, tensors: Sequence[torch.Tensor], *numbers: int) -> bool:
        kernel = self._kernels.get(key)
        if kernel is None:
            return False
        stream = self._stream(tensors[0].get_device())
        return launch(kernel, programs, stream, *[each.data_ptr() for each in tensors], *numbers) == 0

    def _keep(self, key: tuple[Any, ...], compiled: Any, device: torch.device, way: TrialWay, *about: Any) -> None:
        sizes = (8, 8, 4) if way is TrialWay.PACK else (8, 8, 8, 4)
        kernel = self._tried(key, compiled, bytes(sizes), device, way, *about)
        if kernel is not None:
            self._kernels[key] = kernel

    def _tried(
        self, key: Any, compiled: Any, sizes: bytes, device: torch.device, way: TrialWay, *about: Any
    ) -> bytes | None:
        """What an ordinary launch has returned, for `launch`, if its trial has passed."""

        def begin(kernel: bytes) -> KernelTrial:
            stream = self._stream(-1 if device.index is None else device.index)
            return KernelTrial(way, functools.partial(launch, kernel, way.programs, stream), device, *about)

        return self._launcher.tried(key, compiled, sizes, begin)

    def _most_programs(self, device: torch.device) -> int:
        """As many as keep the device's memory busy: a tensor gets no more."""
        most = self._programs.get(device)
        if most is None:
            most = 3
            if device.type == "cuda":
                most = 4 * torch.cuda.get_device_properties(device).multi_processor_count
            self._programs[device] = most
        return most


def tables(
    entries: bytes, share_of: Callable[[int], int], most: int, rows: int
) -> tuple[bytes, list[tuple[int, int, bytes]]]:
    """The launches that read GroupedReadings' entries: (variant, programs, table) of each; and before these a list with
    the address of each row's earlier numbers, 0 if it has none. See `read_many` in kernel.py.

    A tensor gets a program for each `share_of(variant)` of its elements, `most` at most. `rows`: how long the list is.
    worker/native has the same in C.
    """
    kept = array("q", bytes(8 * rows))
    programs: dict[int, int] = {}
    found: dict[int, list[bytes]] = {}
    for code, counted, position, address, elements, inner, stride, earlier in ENTRY.iter_unpack(entries):
        kept[position] = earlier
        layout = layout_of(elements, stride)
        variant = code << 8 | layout << 3 | counted << 2 | (address % 16 == 0) << 1 | (earlier != 0)
        first = programs.get(variant, 0)
        own = max(1, min(-(-elements // share_of(variant)), most))
        programs[variant] = first + own
        before = position if address else 0
        found.setdefault(variant, []).append(ENTRY.pack(first, own, address, position, elements, inner, stride, before))
    return kept.tobytes(), [(variant, programs[variant], b"".join(parts)) for variant, parts in found.items()]


def _parts_of(variant: int) -> tuple[torch.dtype, bool, int]:
    """Arguments of `_constants`."""
    return DTYPES[variant >> 8], bool(variant & 4), variant >> 3 & 3


@functools.cache
def _share_of(variant: int) -> int:
    """Elements that a program of `read_many` reads."""
    return _constants(*_parts_of(variant))[1] * _BLOCKS


def layout_of(elements: int, stride: int) -> int:
    """The kernels' LAYOUT."""
    return 0 if stride == 0 else 1 if elements < _INT32 else 2


@functools.cache
def _constants(dtype: torch.dtype, count: bool, layout: int) -> tuple[KernelDtype, int, tuple[Any, ...]]:
    """(how a dtype is read, elements in a block, the kernels' constants KIND, COUNT, LAYOUT, DEEP and WIDE)"""
    kind = KINDS[dtype]
    deep = kind.deep if layout == 0 else 1
    return kind, deep * kind.wide, (kind.code, count and dtype in LOW_PRECISION, layout, deep, kind.wide)


def _on(device: torch.device, integers: bytes) -> torch.Tensor:
    """Integers on the device, without waiting: torch keeps the pinned memory until the copy is done."""
    table = torch.frombuffer(bytearray(integers), dtype=torch.int64)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _key_of(source: TensorSource, rows: torch.Tensor, count: bool) -> tuple[Any, ...]:
    tensor, elements, inner, stride = source
    target, device = rows.data_ptr(), tensor.get_device()
    return read_key(tensor.dtype, count, device, tensor.data_ptr(), target, elements, inner, stride)


def _key_of_two(source: TensorSource, rows: torch.Tensor, count: bool) -> tuple[Any, ...]:
    return "two", source.tensor.dtype, count, rows.get_device()


def read_key(
    dtype: torch.dtype, count: bool, device: int, address: int, target: int, elements: int, inner: int, stride: int
) -> tuple[Any, ...]:
    """The key of a call of `kernel.read`. Calls with the same key run the same compiled kernel. `launch_reads` makes
    the same key in C.

    Triton compiles a kernel for the types of the arguments (an integer has 32 or 64 bits), for whether 16 divides each
    pointer, and for the values of the constants. These follow from `dtype`, `count` and the layout.
    """
    wide = elements >= _INT32 or inner >= _INT32 or stride >= _INT32
    sizes = (elements < _INT32, inner < _INT32, stride < _INT32) if wide else None
    return dtype, count, device, address % 16 == 0, target % 16 == 0, stride == 0, sizes
