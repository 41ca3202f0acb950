"""gpuwatch's four Triton kernels, computed when the stream gets to their launch.

Triton compiles them for sm_90 and launches them as ever. What it loads is described to the library, so that the library
knows the bytes of its arguments. The numbers of a row come from gpuwatch's other reader (`TorchReader`): the tests of
worker/device hold it equal to the kernels. A kernel of anybody else is not described, and its launch is refused.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from .library import callbacks, library

_SIZES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u8": 1, "u16": 2, "u32": 4, "u64": 8}
_MODULE = "gpuwatch.worker.device.kernel"
_ROW, _ENTRY, _PACKED = 6, 8, 3
_LARGEST = (1 << 63) - 1
_NON_FINITE = 7
_described: dict[int, tuple[str, dict[str, Any], list[tuple[str, int]]]] = {}
"""Handle of a kernel -> (name, constants and the types of pointers, names and sizes of the arguments)"""


@functools.cache
def install() -> None:
    """Have each kernel described when Triton loads it."""
    from triton.compiler import compiler

    ordinary = compiler.CompiledKernel._init_handles

    def described(self: Any) -> None:
        fresh = self.module is None
        ordinary(self)
        if fresh and getattr(getattr(self.src, "fn", None), "__module__", "") == _MODULE:
            _describe(self)

    compiler.CompiledKernel._init_handles = described
    callbacks().run_kernel = run


def _describe(kernel: Any) -> None:
    names = list(kernel.src.fn.arg_names)
    constants = {names[key[0]] if isinstance(key, tuple) else key: value for key, value in kernel.src.constants.items()}
    arguments = [
        (name, 8 if kind.startswith("*") else _SIZES[kind])
        for name, kind in kernel.src.signature.items()
        if kind != "constexpr"
    ]
    pointers = {f"*{name}": kind[1:] for name, kind in kernel.src.signature.items() if kind.startswith("*")}
    _described[kernel.function] = kernel.name, {**constants, **pointers}, arguments
    sizes = (ctypes.c_int * len(arguments))(*[size for _, size in arguments])
    library().stand_in_describe(kernel.function, len(arguments), sizes)


def run(kernel: int, grid: tuple[int, int, int], address: int) -> None:
    """Compute a launch. `address`: of its arguments, 8 bytes each."""
    import torch

    name, constants, arguments = _described[kernel]
    given = dict(constants)
    for place, (argument, size) in enumerate(arguments):
        given[argument] = int.from_bytes(ctypes.string_at(address + 8 * place, size), "little", signed=True)
    with torch.no_grad(), torch._C.DisableTorchFunction():
        {"read": _read, "read_two": _read_two, "read_many": _read_many, "pack": _pack}[name](given)


def _integers(address: int, number: int) -> Any:
    return (ctypes.c_int64 * number).from_address(address)


def _read(given: dict[str, Any]) -> None:
    row = _integers(given["rows"] + 8 * _ROW * given["position"], _ROW)
    _merge(row, given["source"], given["count"], given["inner"], given["stride"], given, given["*source"])


def _read_two(given: dict[str, Any]) -> None:
    for at, (source, elements) in enumerate(((given["source"], given["count"]), (given["other"], given["others"]))):
        row = _integers(given["rows"] + 8 * _ROW * (given["position"] + at), _ROW)
        _merge(row, source, elements, elements, 0, given, given["*source"])


def _read_many(given: dict[str, Any]) -> None:
    for number in range(given["number"]):
        entry = _integers(given["table"] + 8 * _ENTRY * number, _ENTRY)
        _, _, address, position, elements, inner, stride, before = entry
        row = _integers(given["rows"] + 8 * _ROW * position, _ROW)
        if given["KEEP"] and _is_finite_before(given, before):
            known = _integers(_integers(given["earlier"], position + 1)[position], _PACKED)
            row[:_PACKED] = known[:]
        else:
            _merge(row, address, elements, inner, stride, given, str(given["ELEMENT"]))


def _is_finite_before(given: dict[str, Any], position: int) -> bool:
    places = _integers(given["earlier"], max(1, position))
    for index in range(position):
        row = _integers(places[index] or given["rows"] + 8 * _ROW * index, _PACKED)
        if row[2] & _NON_FINITE:
            return False
    return True


def _pack(given: dict[str, Any]) -> None:
    import torch
    from gpuwatch.worker.device.torch_reader import TorchReader

    from .views import View

    number = given["count"]
    rows = View(given["rows"], torch.int64, (number, _ROW), (_ROW, 1)).tensor()
    packed = View(given["packed"], torch.int64, (number, _PACKED), (_PACKED, 1)).tensor()
    packed.copy_(TorchReader().pack(rows, number))


def _merge(row: Any, address: int, elements: int, inner: int, stride: int, given: dict[str, Any], element: str) -> None:
    """What all programs of a launch merge into a row, together."""
    from gpuwatch.worker.device.tensor_source import TensorSource
    from gpuwatch.worker.device.torch_reader import TorchReader

    from .views import View

    if not elements:
        return
    dtype = _dtype(int(given["KIND"]), element)
    extent = elements if stride == 0 else (elements // inner - 1) * stride + inner
    source = TensorSource(View(address, dtype, (extent,), (1,)).tensor(), elements, inner, stride)
    low, high, meta, zeros, small, total = TorchReader.row(source, bool(given["COUNT"])).tolist()
    row[0], row[1], row[2] = min(row[0], low), max(row[1], high), row[2] | meta
    if given["COUNT"]:
        row[3], row[4], row[5] = row[3] + zeros, row[4] + small, total


@functools.cache
def _dtype(kind: int, element: str) -> Any:
    import torch
    from gpuwatch.worker.device.tensor_source import KINDS

    known = {"fp": "float", "bf": "bfloat", "in": "int", "ui": "uint", "i": "int", "u": "uint"}
    letters = element.rstrip("0123456789")
    read_as = getattr(torch, known.get(letters, letters) + element[len(letters) :])
    found = [dtype for dtype, each in KINDS.items() if each.code == kind and each.read_as == read_as]
    return found[0] if kind else read_as
