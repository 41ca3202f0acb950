"""Reductions over the bits of host memory: `read_floats` and `below` of worker/native, or of NumPy without it.

torch's operations would make several passes and a temporary as large as the tensor. The NumPy functions run in the
calling thread. The native ones read large tensors with torch's own threads.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import numpy
import torch

from ...core.signal_errors import from_outside
from ...core.values import DTYPE_CODES, SIGN_MASK

CHUNK = 1 << 16
"""Elements that are read at once: the scratch array fits in the cache, and no temporary is as large as the tensor."""

_SMALL = 1 << 13
_OPENMP = ("GOMP_parallel", "omp_get_max_threads", "omp_in_parallel", "omp_get_thread_num", "omp_get_num_threads")
_TYPES = {2: "<i2", 4: "<i4", 8: "<i8"}
_FLOATS = {DTYPE_CODES[encoding.name.lower()]: (mask, encoding << 8) for encoding, mask in SIGN_MASK.items()}
"""Code of a dtype (core/values.py) -> all its bits but the sign, and the `meta` of a finite tensor."""


class _HostMemory:
    """A range of memory as an object that NumPy can wrap."""

    __slots__ = ("__array_interface__",)

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def _array(address: int, count: int, size: int) -> Any:
    """`count` integers of `size` bytes at an address. Valid while the owner of the memory lives.

    `tensor.numpy()` would make its storage impossible to resize, and FSDP resizes its storages.
    """
    if size not in _TYPES:
        raise TypeError("expected elements of 2, 4 or 8 bytes")
    return numpy.asarray(
        _HostMemory({"shape": (count,), "typestr": _TYPES[size], "data": (address, True), "version": 3})
    )


_scratches = threading.local()
"""Scratch arrays of CHUNK elements by their types: autograd may call from several threads."""


def slow_read_floats(address: int, count: int, dtype: int) -> tuple[int, int, int]:
    """(low, high, meta) of `count` floats (core/values.py), without the flags of non-finite ones. Raises TypeError."""
    if dtype not in _FLOATS:
        raise TypeError("expected the code of float32, float16, bfloat16 or float64")
    mask, meta = _FLOATS[dtype]
    array = _array(address, count, (mask.bit_length() + 1) // 8)
    if count <= _SMALL:
        if not count:
            return mask, 0, meta
        clear = array & mask
        return int(clear.min()), int(clear.max()), meta
    scratches: dict[str, Any] = vars(_scratches)
    scratch = scratches.get(array.dtype.str)
    if scratch is None:
        scratch = scratches[array.dtype.str] = numpy.empty(CHUNK, array.dtype)
    low, high = mask, 0
    step = -(-count // -(-count // CHUNK))  # equal parts: a small last part would cost as much as a whole one
    for start in range(0, count, step):
        part = array[start : start + step]
        clear = numpy.bitwise_and(part, mask, out=scratch[: part.size])
        low = min(low, int(clear.min()))
        high = max(high, int(clear.max()))
    return low, high, meta


def slow_below(address: int, count: int, size: int, limit: int) -> tuple[int, int]:
    """How many are zero, and how many are below `limit` (zeros included), without their sign bits. Raises TypeError."""
    array = _array(address, count, size)
    mask = (1 << (8 * size - 1)) - 1
    zeros = small = 0
    for start in range(0, count, CHUNK):
        clear = array[start : start + CHUNK] & mask
        zeros += clear.size - int(numpy.count_nonzero(clear))
        small += int(numpy.count_nonzero(clear < limit))
    return zeros, small


def _use_threads() -> None:
    """Have the extension read large tensors with torch's own OpenMP threads, if torch was built with OpenMP."""
    try:
        library = ctypes.CDLL(torch._C.__file__)  # also finds the symbols of the libraries it links to
        found = [ctypes.cast(library[name], ctypes.c_void_p).value for name in _OPENMP]
    except (OSError, AttributeError) as error:  # another operating system, or another OpenMP library
        if from_outside(error):
            raise
        return
    use_threads(*found)
    os.register_at_fork(after_in_child=use_threads)  # a forked process has only one thread


try:
    from ..native.core import below as below
    from ..native.core import read_floats as read_floats
    from ..native.core import use_threads as use_threads
except ImportError:  # gpuwatch was installed without a C compiler
    below, read_floats = slow_below, slow_read_floats
else:
    _use_threads()
