"""The shared library, which LD_PRELOAD has put into this process: what Python asks it, and what it asks Python."""

from __future__ import annotations

import atexit
import ctypes
import functools
import traceback
from collections.abc import Callable
from typing import Any

ASSERTED = 710  # cudaErrorAssert
_OPERATION = ctypes.CFUNCTYPE(None, ctypes.c_long, ctypes.c_int, ctypes.c_int)
_KERNEL = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p, ctypes.c_int
)


@functools.cache
def library() -> Any:
    """The library's functions."""
    found = ctypes.CDLL(None)
    found.stand_in_count.restype = ctypes.c_long
    found.stand_in_counter_name.restype = ctypes.c_char_p
    found.stand_in_contexts.restype = ctypes.c_ulong
    found.stand_in_issue.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_long]
    found.synchronize = found.stand_in_wait
    found.synchronize.argtypes = [ctypes.c_int, ctypes.c_void_p]
    found.stand_in_describe.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_int)]
    return found


def counts() -> dict[str, int]:
    """What this process has asked of its devices so far."""
    found: dict[str, int] = {}
    while (name := library().stand_in_counter_name(len(found))) is not None:
        found[name.decode()] = library().stand_in_count(len(found))
    return found


def fail(device: int, error: int = ASSERTED) -> None:
    """The device has met an error that stays: each call of the driver answers it from now on."""
    library().stand_in_fail(device, error)


def _raise_of(device: int) -> None:
    """Torch's own exception for the error of a device."""
    import torch

    with torch.cuda.device(device):
        torch.cuda.is_current_stream_capturing()


class Callbacks:
    """What a stream calls when an operation or a kernel is due. It calls with the GIL, from a thread of its own."""

    def __init__(self) -> None:
        self._pending: dict[int, Callable[[], None]] = {}
        self._number = 0
        self.run_kernel: Callable[[int, tuple[int, int, int], int], None] = lambda kernel, grid, arguments: None
        self._functions = _OPERATION(self._operation), _KERNEL(self._kernel)
        library().stand_in_set_python(*self._functions)
        atexit.register(library().stand_in_set_python, None, None)  # nothing calls into an interpreter that ends

    def issue(self, device: int, stream: int, compute: Callable[[], None]) -> None:
        """Have `compute` called when the stream gets there; a graph that is captured keeps it."""
        self._number += 1
        self._pending[self._number] = compute
        if library().stand_in_issue(device, stream, self._number):
            del self._pending[self._number]
            _raise_of(device)

    def _operation(self, number: int, is_captured: int, device: int) -> None:
        compute = self._pending[number] if is_captured else self._pending.pop(number)
        self._guarded(device, compute)

    def _kernel(self, kernel: int, x: int, y: int, z: int, arguments: int, device: int) -> None:
        self._guarded(device, lambda: self.run_kernel(kernel, (x, y, z), arguments))

    @staticmethod
    def _guarded(device: int, compute: Callable[[], None]) -> None:
        """An operation that raises is an assertion on the device: an index out of range, say."""
        try:
            compute()
        except BaseException:
            traceback.print_exc()
            fail(device)


@functools.cache
def callbacks() -> Callbacks:
    """Those of this process."""
    return Callbacks()
