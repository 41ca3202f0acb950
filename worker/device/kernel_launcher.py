"""Launches compiled kernels through the driver, without Triton's wrapper in Python.

The driver does not check the arguments of a kernel, and a wrong address would end the training. So a kernel is launched
here only after two checks: the driver lists the expected parameters, and a trial gave the right
numbers. The host does not wait for the trial. Until it has passed, Triton launches the kernel.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Hashable
from enum import Enum
from typing import Any

import torch

from ...core.signal_errors import from_outside
from .grouped_readings import ENTRY
from .tensor_source import TensorSource
from .torch_reader import COLUMNS, LARGEST, TorchReader

# A trial: one launch of a kernel on a few known numbers, before it may read a tensor of the script.
#
# All pointers of a trial point into one small allocation. Even if the kernel took its arguments in another order, it
# would stay within that memory: each region is preceded by a valid entry of a table, and each free word is a valid
# address. What the kernel leaves in the memory is compared with what TorchReader leaves in a copy of it on the host.

Start = Callable[..., int]
"""start(argument, ...) launches `programs` of the way, and returns the driver's error."""


class TrialWay(Enum):
    """Which kernel of kernel.py is tried."""

    READ = "read"
    TWO = "read_two"
    MANY = "read_many"
    KEPT = "read_many with earlier numbers"
    PACK = "pack"

    @property
    def programs(self) -> int:
        """With which it is tried."""
        return 2 if self is TrialWay.TWO else 1


_WORDS = 2048
_ROWS, _SOURCE, _TABLE, _EARLIER, _PACKED, _KNOWN = 64, 256, 512, 640, 1024, 1088
"""Where the regions begin, in words of 8 bytes."""
_ELEMENTS = 37
_FEWER, _BETWEEN = 18, 16
"""The second of two tensors: its elements, and the bytes from the first one's address to its own."""
_ROW = 2
_AT = _ROWS + _ROW * COLUMNS
_FRESH = [LARGEST, 0, 0, 0, 0, 0]
_NUMBERS = [11, 22, 2 << 8]


class KernelTrial:
    """A launch that was started on the current stream."""

    def __init__(
        self,
        way: TrialWay,
        start: Start,
        device: torch.device,
        dtype: torch.dtype,
        count: bool = False,
        layout: int = 0,
    ) -> None:
        """Raises RuntimeError if the driver refuses the launch."""
        on_device = device.type == "cuda"
        self._memory = torch.empty(_WORDS, dtype=torch.int64, device=device)
        base = self._memory.data_ptr()
        before = torch.frombuffer(_words(base, dtype, 0 if layout == 0 else _ELEMENTS), dtype=torch.int64)
        if way is TrialWay.PACK:
            before[_ROWS : _ROWS + 2 * COLUMNS] = torch.tensor([1, 2, 3 << 8, 4, 5, 99, *_FRESH])
        elif way is not TrialWay.KEPT:
            fresh = _FRESH * way.programs
            before[_AT : _AT + len(fresh)] = torch.tensor(fresh)
        self._memory.copy_(before.pin_memory() if on_device else before, non_blocking=True)
        self._expected = _after(before, way, dtype, count)
        source, rows = base + 8 * _SOURCE, base + 8 * _ROWS
        if way is TrialWay.READ:
            error = start(source, rows, _ROW, _ELEMENTS, _ELEMENTS, 0 if layout == 0 else _ELEMENTS)
        elif way is TrialWay.TWO:
            error = start(source, source + _BETWEEN, rows, _ROW, _ELEMENTS, _FEWER, 1)
        elif way is TrialWay.PACK:
            error = start(rows, base + 8 * _PACKED, 2)
        else:
            error = start(base + 8 * _TABLE, base + 8 * _EARLIER, rows, 1)
        if error:
            raise RuntimeError(f"cuLaunchKernel returned {error}")
        self._found = torch.empty(_WORDS, dtype=torch.int64, device="cpu", pin_memory=on_device)
        self._found.copy_(self._memory, non_blocking=True)
        self._event: Any = None
        if on_device:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no annotation there
            self._event.record()

    def passed(self) -> bool | None:
        """Whether the memory is as expected; None while the numbers have not arrived. Does not wait."""
        if self._event is not None and not self._event.query():
            return None
        return bool(torch.equal(self._found, self._expected))


def _words(base: int, dtype: torch.dtype, stride: int) -> array[int]:
    """The memory before the launch, except for the rows."""
    words = array("q", [base + 8 * _KNOWN]) * _WORDS
    entry = array("q", [0, 1, base + 8 * _SOURCE, _ROW, _ELEMENTS, _ELEMENTS, stride, 1])
    assert len(entry) * 8 == ENTRY.size
    for region in (_ROWS, _SOURCE, _TABLE + len(entry), _TABLE, _EARLIER, _PACKED):
        words[region - len(entry) : region] = entry
    words[_KNOWN : _KNOWN + len(_NUMBERS)] = array("q", _NUMBERS)
    most = 1 if dtype is torch.bool else 0xFF
    numbers = bytes(37 * at + 11 & most for at in range(_ELEMENTS * dtype.itemsize))
    view = memoryview(words).cast("B")
    view[8 * _SOURCE : 8 * _SOURCE + len(numbers)] = numbers
    return words


def _after(before: torch.Tensor, way: TrialWay, dtype: torch.dtype, count: bool) -> torch.Tensor:
    """The memory after the launch."""
    after = before.clone()
    if way is TrialWay.PACK:
        packed = TorchReader().pack(after[_ROWS : _ROWS + 2 * COLUMNS].view(2, COLUMNS), 2)
        after[_PACKED : _PACKED + packed.numel()] = packed.flatten()
    elif way is TrialWay.KEPT:
        after[_AT : _AT + len(_NUMBERS)] = torch.tensor(_NUMBERS)
    else:
        rows = after[_ROWS : _ROWS + (_ROW + 2) * COLUMNS].view(-1, COLUMNS)
        for number, elements in enumerate((_ELEMENTS, _FEWER)[: way.programs]):
            numbers = before.view(dtype)[(_SOURCE * 8 + number * _BETWEEN) // dtype.itemsize :][:elements]
            TorchReader().read(TensorSource(numbers, elements, elements, 0), rows, _ROW + number, count)
    return after


# The launches, once a trial has passed.

try:
    from ..native.core import launch as launch
    from ..native.core import use_driver
except ImportError:  # gpuwatch was installed without a C compiler
    launch = use_driver = None  # type: ignore[assignment]

LAUNCHED_KERNEL = struct.Struct("@PIII8s0P")
"""Handle, threads of a program, bytes of shared memory, number of parameters and the size of each. As in native/."""
_MOST_HIDDEN = 2
"""Pointers behind the parameters: Triton's scratch memory, of which these kernels need none."""
_POINTER = 8
_LIBRARY = "libcuda.so.1"


class KernelLauncher:
    """The kernels of a process that may be launched directly."""

    def __init__(
        self,
        add_note: Callable[[str], None] = lambda note: None,
        library: Any = None,
        add_fault: Callable[[str], None] | None = None,
    ) -> None:
        """`library`: the driver's, with `cuLaunchKernel` and `cuFuncGetParamInfo`.

        `add_fault` is told of wrong numbers, `add_note` of a driver that cannot launch.
        """
        self._add_note = add_note
        self._add_fault = add_fault or add_note
        self._trials: dict[Hashable, tuple[bytes, KernelTrial] | None] = {}
        """None: refused, or passed"""
        self._library: Any = None
        try:
            if launch is None:
                raise OSError("the part in C was not built")
            self._library = library or ctypes.CDLL(_LIBRARY)
            use_driver(ctypes.cast(self._library.cuLaunchKernel, ctypes.c_void_p).value)
            self._parameter_info = self._library.cuFuncGetParamInfo  # drivers of CUDA 12.4 and later
        except (OSError, AttributeError) as error:
            if from_outside(error):
                raise
            self._refuse(str(error))

    @staticmethod
    def stream(device: int) -> int:
        """The handle of a device's current stream."""
        return torch._C._cuda_getCurrentRawStream(device)

    def tried(self, key: Hashable, compiled: Any, sizes: bytes, begin: Callable[[bytes], KernelTrial]) -> bytes | None:
        """The kernel for `launch`, if its trial has passed. The first call for a key starts the trial.

        `compiled`: Triton's compiled kernel, which has been loaded. `sizes`: of the expected parameters, in bytes.
        """
        if self._library is None or compiled is None:
            return None
        if key not in self._trials:
            self._trials[key] = None
            try:
                kernel = self._kernel_of(compiled, sizes)
                self._trials[key] = kernel, begin(kernel)
            except Exception as error:  # another Triton, or a driver that refuses the launch
                if from_outside(error):
                    raise
                self._refuse(f"{type(error).__name__}: {error}")
            return None
        kernel, trial = self._trials[key] or (b"", None)
        passed = trial.passed() if trial is not None else None
        if passed is not None:
            self._trials[key] = None
        if passed is False:
            self.turn_off("a trial gave other numbers")
        return kernel if passed else None

    def turn_off(self, why: str) -> None:
        """Launch nothing any more: it gave wrong numbers."""
        if self._library is not None:
            self._refuse(why, self._add_fault)

    def _refuse(self, why: str, tell: Callable[[str], None] | None = None) -> None:
        self._library = None  # what has failed once is not asked again
        (tell or self._add_note)(f"Triton launches gpuwatch's kernels ({why}), which takes more of the host's time")

    @property
    def is_off(self) -> bool:
        """Whether nothing is launched any more."""
        return self._library is None

    def _kernel_of(self, compiled: Any, sizes: bytes) -> bytes:
        """Raises ValueError if the kernel is not one that `launch` can launch."""
        metadata, function = compiled.metadata, compiled.function
        needed = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
        odd = [name for name in needed if getattr(metadata, name, 0)]
        if odd or getattr(metadata, "num_ctas", 1) != 1:
            raise ValueError(f"the kernel has {', '.join(odd) or 'clusters'}")
        found = self._parameters_of(function)
        hidden = found[len(sizes) :]
        if found[: len(sizes)] != sizes or len(hidden) > _MOST_HIDDEN or any(size != _POINTER for size in hidden):
            raise ValueError(f"the kernel's parameters have {[*found]} bytes, expected {[*sizes]}")
        threads = 32 * metadata.num_warps
        return LAUNCHED_KERNEL.pack(function, threads, metadata.shared, len(sizes), sizes)

    def _parameters_of(self, function: int) -> bytes:
        """The size of each parameter, as the driver has it."""
        found = bytearray()
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        while not self._parameter_info(
            ctypes.c_void_p(function), ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)
        ):
            found.append(size.value)
        return bytes(found)
