"""One launch of a kernel on a few known numbers, before it may read a tensor of the script.

All pointers of a trial point into one small allocation. Even if the kernel took its arguments in another order, it
would stay within that memory: each region is preceded by a valid entry of a table, and each free word is a valid
address. What the kernel leaves in the memory is compared with what TorchReader leaves in a copy of it on the host.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from .torch_reader import COLUMNS, ENTRY, LARGEST, TensorSource, TorchReader

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
