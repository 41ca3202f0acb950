"""Reads a tensor into a row on its device with the kernels of kernel.py, at little cost for the host.

For each launch, Triton binds the arguments, derives a key from them and looks up the compiled kernel. That takes
many times as long as the driver's launch. Here the key holds only the arguments that can differ, and the driver
launches the compiled kernel (kernel_launcher.py).
"""
# ruff: noqa: D102  # `TensorReader` says what the methods of a reader do

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .device import without_modes
from .grouped_readings import ENTRY, GroupedReadings, WaitingTensors
from .kernel_launcher import KernelLauncher, KernelTrial, TrialWay, launch
from .kernel_variants import BLOCKS, INT32, constants_of, key_of, key_of_two, layout_of, parts_of, share_of, tables
from .known_numbers import FIRST_ROW, FoundExpected, known_numbers, rows_kept, rows_packed, rows_read
from .reader_check import ReaderChecks, Run
from .tensor_source import TensorSource, dense
from .torch_reader import TorchReader

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
_PACK_BLOCK = 128
_ROWS, _ENTRY = 256, 8
"""As in kernel.py: the longest list of rows, and the columns of the table of `read_many`."""


_Launched = tuple[bytes, int, int]
"""(kernel for `launch_reads`, elements in a block, most programs)"""
_ManyTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class TritonReader:
    """A `TensorReader`. Raises ImportError without Triton. The first launches may raise any exception."""

    def __init__(self, kernel: Any = None, launcher: KernelLauncher | None = None) -> None:
        if kernel is None:
            from . import kernel as ours

            kernel = ours
        self._kernel = kernel
        self._launcher = launcher or KernelLauncher()
        self._stream = self._launcher.stream
        self.reads: dict[tuple[Any, ...], _Launched] = {}
        """By the key of a read"""
        self._loaded: set[tuple[Any, ...]] = set()
        """Keys of reads whose kernel Triton has compiled and launched."""
        self._in_trial: dict[Any, bytes] = {}
        """Kernels whose trial has passed."""
        self.checks: ReaderChecks | None = None
        """Proves each kernel; None where nobody checks the reader."""
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
            key, about = key_of(source, rows, counted), (rows, position, counted)
            if key in self.reads:
                return self._launched_read(source, *about)
            if key in self._loaded:
                without_modes(self._launch_read, source, *about)
                return True
            nothing = dense(tensor, 0)  # the kernel for two tensors may have run before
            left = launch_reads(self.reads, self._stream, (tensor,) * 2, (elements, 0), 0, inner, stride, *about)
            if left == (0, 2) and key_of_two(source, rows, counted) in self._loaded:
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
        key, device, about = key_of(source, rows, count), rows.device, (source.tensor.dtype, count)
        layout, is_wide = layout_of(source.elements, source.stride), key[-1] is not None
        known = functools.partial(known_numbers, *about, layout != 0, key[3])

        def ordinary(sources: list[TensorSource], table: torch.Tensor) -> None:
            for row, each in enumerate(sources, FIRST_ROW):
                self._launch_read(each, table, row, count)

        def direct(entry: _Launched, sources: list[TensorSource], table: torch.Tensor) -> None:
            for row, each in enumerate(sources, FIRST_ROW):
                if is_wide:  # its parameters have 64 bits, and known numbers are fewer
                    programs = min(-(-each.elements // entry[1]), entry[2])
                    places = each.tensor.data_ptr(), table.data_ptr(), row
                    _refused(launch(entry[0], programs, self._stream(table.get_device()), *places, *each[1:]))
                else:
                    about = each.inner, each.stride, table, row, count
                    _refused(launch_reads({key: entry}, self._stream, (each.tensor,), (each.elements,), 0, *about))

        if is_wide:  # it has a kernel of its own, which known numbers get only through the driver
            compiled = self._launch_read(source, rows, position, count)
            if self.checks is not None:
                TorchReader().read(source, rows, position, count)
        else:
            is_proven = self._is_proven(key, device, lambda: rows_read(device, known(), ordinary, key[4]))
            compiled = self._launch_read(source, rows, position, count)
            self._loaded.add(key)
            if not is_proven:
                return
        sizes = bytes((8, 8, 4, *(8 if size >= INT32 else 4 for size in source[1:])))
        self._keep_read(
            key,
            self._tried(key, compiled, sizes, device, TrialWay.READ, *about, layout),
            device,
            (*about, layout),
            lambda entry: rows_read(device, known(), functools.partial(direct, entry), key[4]),
        )

    def _launch_read(self, source: TensorSource, rows: torch.Tensor, position: int, count: bool) -> Any:
        tensor, elements, inner, stride = source
        kind, block, constants = constants_of(tensor.dtype, count, layout_of(elements, stride))
        view = tensor if kind.read_as is tensor.dtype else tensor.view(kind.read_as)
        ordinary = self._kernel.read[(min(-(-elements // block), self._most_programs(tensor.device)),)]
        return ordinary(view, rows, position, elements, inner, stride, *constants, **_OPTIONS)

    def _ordinary_two(
        self, source: TensorSource, other: TensorSource, rows: torch.Tensor, position: int, count: bool
    ) -> None:
        key, device, about = key_of_two(source, rows, count), rows.device, (source.tensor.dtype, count)
        known = functools.partial(known_numbers, *about, False, True)

        def ordinary(sources: list[TensorSource], table: torch.Tensor) -> None:
            for at in range(0, len(sources), 2):
                self._launch_two(sources[at], sources[at + 1], table, FIRST_ROW + at, count)

        def direct(entry: _Launched, sources: list[TensorSource], table: torch.Tensor) -> None:
            tensors, elements = [each.tensor for each in sources], [each.elements for each in sources]
            _refused(launch_reads({key: entry}, self._stream, tensors, elements, 0, 0, 0, table, FIRST_ROW, count))

        is_proven = self._is_proven(key, device, lambda: rows_read(device, known(), ordinary))
        compiled = self._launch_two(source, other, rows, position, count)
        self._loaded.add(key)
        if not is_proven:
            return
        sizes = bytes((8, 8, 8, 4, 4, 4, 4))
        self._keep_read(
            key,
            self._tried(key, compiled, sizes, device, TrialWay.TWO, *about, 0),
            device,
            (*about, 0),
            lambda entry: rows_read(device, known(), functools.partial(direct, entry)),
        )

    def _launch_two(
        self, source: TensorSource, other: TensorSource, rows: torch.Tensor, position: int, count: bool
    ) -> Any:
        kind, block, constants = constants_of(source.tensor.dtype, count, 0)
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
        kernel: bytes | None,
        device: torch.device,
        about: tuple[torch.dtype, bool, int],
        check: Callable[[_Launched], FoundExpected],
    ) -> None:
        if kernel is not None:
            entry = kernel, constants_of(*about)[1], self._most_programs(device)
            if self._is_proven_direct(key, device, lambda: check(entry)):
                self.reads[key] = entry

    def read_many(self, readings: GroupedReadings, rows: torch.Tensor) -> None:
        """One launch for all tensors of one dtype and layout, as torch's foreach operations do it.

        A table on the device says which programs read which tensor. It is copied there without waiting.
        """
        for variant, programs, tensors, number in self._tables_of(readings, rows):
            key = rows.device, "many", variant, *(each.data_ptr() % 16 == 0 for each in tensors)
            if not self._launched(self._kernels.get(key), programs, tensors, number):
                self._ordinary_many(key, variant, programs, tensors, number)

    def _tables_of(self, readings: GroupedReadings, rows: torch.Tensor) -> Iterator[tuple[int, int, _ManyTensors, int]]:
        """(variant, programs, the kernel's first arguments, number of tensors) of each launch"""
        make = tables if _native_tables is None else _native_tables
        earlier, groups = make(readings.entries, share_of, self._most_programs(rows.device), _ROWS)
        table = _on(rows.device, b"".join([earlier, *(entries for _, _, entries in groups)]))
        at = _ROWS
        for variant, programs, entries in groups:
            number = len(entries) // ENTRY.size
            yield variant, programs, (table[at:], table, rows), number
            at += number * _ENTRY

    def _ordinary_many(
        self, key: tuple[Any, ...], variant: int, programs: int, tensors: _ManyTensors, number: int
    ) -> None:
        parts, device = parts_of(variant), tensors[2].device
        known = functools.partial(known_numbers, *parts[:2], parts[2] != 0, bool(variant & 2), BLOCKS)

        def ordinary(readings: GroupedReadings, table: torch.Tensor) -> None:
            # of more elements it would be this variant
            for _, programs, tensors, number in self._tables_of(readings, table):
                self._launch_many(variant, programs, tensors, number)

        def direct(kernel: bytes, readings: GroupedReadings, table: torch.Tensor) -> None:
            for _, programs, tensors, number in self._tables_of(readings, table):
                if not self._launched(kernel, programs, tensors, number):
                    raise RuntimeError("the driver refused a launch")

        def check(read: Callable[[GroupedReadings, torch.Tensor], None]) -> FoundExpected:
            if variant & 1:
                return rows_kept(device, known(), read)
            return rows_read(device, known(), lambda sources, table: read(_readings_of(sources, parts[1]), table))

        is_proven = self._is_proven(key, device, lambda: check(ordinary))
        compiled = self._launch_many(variant, programs, tensors, number)
        if not is_proven:
            return
        way, sizes = TrialWay.KEPT if variant & 1 else TrialWay.MANY, bytes((8, 8, 8, 4))
        kernel = self._tried(key, compiled, sizes, device, way, *parts)
        self._keep(key, kernel, device, lambda kernel: check(functools.partial(direct, kernel)))

    def _launch_many(self, variant: int, programs: int, tensors: _ManyTensors, number: int) -> Any:
        kind, _, constants = constants_of(*parts_of(variant))
        options = self._kernel.element(kind.read_as), bool(variant & 2), *constants, bool(variant & 1)
        return self._kernel.read_many[(programs,)](*tensors, number, *options, **_OPTIONS)

    def pack(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        packed = rows.new_empty(count, 3)
        key = (rows.device, "pack", rows.data_ptr() % 16 == 0, packed.data_ptr() % 16 == 0)
        if not self._launched(self._kernels.get(key), -(-count // _PACK_BLOCK), (rows, packed), count):
            self._ordinary_pack(key, rows, packed, count)
        return packed

    def _ordinary_pack(self, key: tuple[Any, ...], rows: torch.Tensor, packed: torch.Tensor, count: int) -> None:
        device = rows.device

        def ordinary(table: torch.Tensor, count: int) -> torch.Tensor:
            target = table.new_empty(count, 3)
            self._launch_pack(table, target, count)
            return target

        def direct(kernel: bytes, table: torch.Tensor, count: int) -> torch.Tensor:
            target = table.new_empty(count, 3)
            if not self._launched(kernel, -(-count // _PACK_BLOCK), (table, target), count):
                raise RuntimeError("the driver refused a launch")
            return target

        is_proven = self._is_proven(key, device, lambda: rows_packed(device, ordinary, key[2]))
        compiled = self._launch_pack(rows, packed, count)
        if not is_proven:
            return
        kernel = self._tried(key, compiled, bytes((8, 8, 4)), device, TrialWay.PACK, torch.float32)
        self._keep(key, kernel, device, lambda kernel: rows_packed(device, functools.partial(direct, kernel), key[2]))

    def _launch_pack(self, rows: torch.Tensor, packed: torch.Tensor, count: int) -> Any:
        return self._kernel.pack[(-(-count // _PACK_BLOCK),)](rows, packed, count, _PACK_BLOCK, **_OPTIONS)

    def _launched(self, kernel: bytes | None, programs: int, tensors: Sequence[torch.Tensor], *numbers: int) -> bool:
        if kernel is None:
            return False
        stream = self._stream(tensors[0].get_device())
        return launch(kernel, programs, stream, *[each.data_ptr() for each in tensors], *numbers) == 0

    def _keep(
        self,
        key: tuple[Any, ...],
        kernel: bytes | None,
        device: torch.device,
        check: Callable[[bytes], FoundExpected],
    ) -> None:
        if kernel is not None and self._is_proven_direct(key, device, lambda: check(kernel)):
            self._kernels[key] = kernel

    # -- proofs -------------------------------------------------------------------------------------------------

    def _is_proven(self, key: Any, device: torch.device, run: Run) -> bool:
        return self.checks is None or self.checks.is_proven(key, device, run)

    def _is_proven_direct(self, key: Any, device: torch.device, run: Run) -> bool:
        if self.checks is None:
            return True
        is_proven = self.checks.is_proven_direct(("direct", key), device, run)
        if self.checks.wrong_direct is not None:
            self._launcher.turn_off("through the driver they read known numbers wrongly")
            self._forget_direct()
        return is_proven

    def _forget_direct(self) -> None:
        for kernels in (self.reads, self._kernels, self._in_trial):
            kernels.clear()

    def _tried(
        self, key: Any, compiled: Any, sizes: bytes, device: torch.device, way: TrialWay, *about: Any
    ) -> bytes | None:
        """What an ordinary launch has returned, for `launch`, if its trial has passed."""

        def begin(kernel: bytes) -> KernelTrial:
            stream = self._stream(-1 if device.index is None else device.index)
            return KernelTrial(way, functools.partial(launch, kernel, way.programs, stream), device, *about)

        kernel = self._in_trial.get(key) or self._launcher.tried(key, compiled, sizes, begin)
        if kernel is not None:
            self._in_trial[key] = kernel
        elif self._launcher.is_off:
            self._forget_direct()
        return kernel

    def _most_programs(self, device: torch.device) -> int:
        """As many as keep the device's memory busy: a tensor gets no more."""
        most = self._programs.get(device)
        if most is None:
            most = 3
            if device.type == "cuda":
                most = 4 * torch.cuda.get_device_properties(device).multi_processor_count
            self._programs[device] = most
        return most


def _readings_of(sources: list[TensorSource], count: bool) -> GroupedReadings:
    return GroupedReadings([WaitingTensors(sources, FIRST_ROW, count)], sources[0].tensor.device)


def _refused(answer: object) -> None:
    """Raise RuntimeError if the driver has not launched all."""
    if answer not in (None, 0):
        raise RuntimeError(f"the driver refused a launch ({answer})")


def _on(device: torch.device, integers: bytes) -> torch.Tensor:
    """Integers on the device, without waiting: torch keeps the pinned memory until the copy is done."""
    table = torch.frombuffer(bytearray(integers), dtype=torch.int64)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
