"""The kernels of worker/device/kernel.py on host memory, launched as Triton does it or through the driver's function.

`TorchReader` computes them. A fault changes what a launch is given, or what it leaves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from gpuwatch.worker.device.kernel_launcher import KernelLauncher
from gpuwatch.worker.device.tensor_source import KINDS, TensorSource
from gpuwatch.worker.device.torch_reader import COLUMNS, TorchReader

_READ = ("source", "rows", "position", "elements", "inner", "stride")
ARGUMENTS = {
    "read": _READ,
    "read_two": ("source", "other", "rows", "position", "elements", "others", "first"),
    "read_many": ("table", "earlier", "rows", "number"),
    "pack": ("rows", "packed", "number"),
}
CONSTANTS = {
    "read": ("KIND", "COUNT"),
    "read_two": ("ELEMENT", "KIND", "COUNT"),
    "read_many": ("ELEMENT", "ALIGNED", "KIND", "COUNT", "LAYOUT", "DEEP", "WIDE", "KEEP"),
    "pack": ("BLOCK",),
}
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)
Given = dict[str, Any]
"""The arguments and constants of a launch, by name; a pointer is an address."""


class KernelFault:
    """Nothing is wrong."""

    def before(self, name: str, given: Given) -> bool:
        """Change what a launch is given. False: the launch does nothing."""
        return True

    def elements(self, numbers: torch.Tensor) -> torch.Tensor:
        """What a kernel takes for the elements of a tensor."""
        return numbers

    def row(self, row: torch.Tensor) -> torch.Tensor:
        """What it leaves in place of a row (COLUMNS,)."""
        return row

    def packed(self, rows: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        """What it leaves in place of packed rows (n, 3). It has not reset the rows yet."""
        return packed


def at(address: int, words: int) -> torch.Tensor:
    """Integers of 8 bytes, in place."""
    return torch.frombuffer((ctypes.c_int64 * words).from_address(address), dtype=torch.int64)


class HostKernels:
    """`kernel` of a TritonReader."""

    INTERPRETED = False

    def __init__(self, ordinary: KernelFault | None = None, direct: KernelFault | None = None) -> None:
        self._faults = {"ordinary": ordinary or KernelFault(), "direct": direct or KernelFault()}
        self._compiled: dict[int, tuple[str, Given, tuple[int, ...]]] = {}
        self.launches = {"ordinary": 0, "direct": 0}
        self.read, self.read_two, self.read_many, self.pack = (_Kernel(self, name) for name in ARGUMENTS)
        self.cuLaunchKernel = LAUNCH(self._launch)

    @staticmethod
    def element(dtype: torch.dtype) -> torch.dtype:
        return dtype

    def launcher(self, **told: Callable[[str], None]) -> HostLauncher:
        """Launches these through C."""
        return HostLauncher(library=self, **told)

    # -- the driver's

    def cuFuncGetParamInfo(self, function: Any, index: Any, offset: Any, size: Any) -> int:
        sizes = self._compiled[function.value][2]
        if index.value >= len(sizes):
            return 1
        size._obj.value = sizes[index.value]
        return 0

    def _launch(self, function: int, *about: Any) -> int:
        name, constants, sizes = self._compiled[function]
        arguments = about[-2]
        places = (ctypes.c_void_p * len(sizes)).from_address(arguments)
        values = [
            int.from_bytes(ctypes.string_at(place, size), "little", signed=True)
            for place, size in zip(places, sizes, strict=True)
        ]
        self.run("direct", name, {**constants, **dict(zip(ARGUMENTS[name], values, strict=True))})
        return 0

    def compiled(self, name: str, constants: Given, sizes: tuple[int, ...]) -> SimpleNamespace:
        """The kernel for these constants, as Triton returns it."""
        about = name, constants, sizes
        function = next((one for one, each in self._compiled.items() if each == about), len(self._compiled) + 1)
        self._compiled[function] = about
        return SimpleNamespace(function=function, metadata=SimpleNamespace(num_warps=4, shared=0, num_ctas=1))

    # -- what they do

    def run(self, way: str, name: str, given: Given) -> None:
        self.launches[way] += 1
        fault = self._faults[way]
        with torch.no_grad(), torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
            if fault.before(name, given):
                {"read": _read, "read_two": _read_two, "read_many": _read_many, "pack": _pack}[name](fault, given)


class HostLauncher(KernelLauncher):
    """A KernelLauncher whose stream is the host's."""

    @staticmethod
    def stream(device: int) -> int:
        return 7


class _Kernel:
    def __init__(self, kernels: HostKernels, name: str) -> None:
        self._kernels, self._name = kernels, name

    def __getitem__(self, grid: tuple[int]) -> Callable[..., SimpleNamespace]:
        def launch(*arguments: Any, **options: Any) -> SimpleNamespace:
            names, constants = ARGUMENTS[self._name], CONSTANTS[self._name]
            fixed = dict(zip(constants, arguments[len(names) :], strict=False))
            if isinstance(arguments[0], torch.Tensor) and "KIND" in constants:
                fixed.setdefault("ELEMENT", arguments[0].dtype)
            given = arguments[: len(names)]
            values = [each.data_ptr() if isinstance(each, torch.Tensor) else int(each) for each in given]
            sizes = tuple(8 if isinstance(each, torch.Tensor) or abs(each) >= 1 << 31 else 4 for each in given)
            self._kernels.run("ordinary", self._name, {**fixed, **dict(zip(names, values, strict=True))})
            return self._kernels.compiled(self._name, fixed, sizes)

        return launch


def _read(fault: KernelFault, given: Given) -> None:
    _merge(fault, given, given["source"], given["position"], given["elements"], given["inner"], given["stride"])


def _read_two(fault: KernelFault, given: Given) -> None:
    for number, (source, elements) in enumerate(((given["source"], "elements"), (given["other"], "others"))):
        _merge(fault, given, source, given["position"] + number, given[elements], given[elements], 0)


def _read_many(fault: KernelFault, given: Given) -> None:
    for entry in at(given["table"], 8 * given["number"]).view(-1, 8).tolist():
        _, _, address, position, elements, inner, stride, before = entry
        if given["KEEP"] and not _is_bad_before(given, before):
            known = at(at(given["earlier"], 256)[position].item(), 3)
            at(given["rows"] + 8 * COLUMNS * position, 3).copy_(known)
        else:
            _merge(fault, given, address, position, elements, inner, stride)


def _is_bad_before(given: Given, position: int) -> bool:
    places = at(given["earlier"], 256).tolist()
    rows = (places[index] or given["rows"] + 8 * COLUMNS * index for index in range(position))
    return any(at(row, 3)[2].item() & 7 for row in rows)


def _pack(fault: KernelFault, given: Given) -> None:
    rows = at(given["rows"], COLUMNS * given["number"]).view(-1, COLUMNS)
    before = rows.clone()
    packed = TorchReader().pack(rows, given["number"])
    at(given["packed"], packed.numel()).view(-1, 3).copy_(fault.packed(before, packed))
    if getattr(fault, "resets_nothing", False):
        rows.copy_(before)


def _dtype_of(given: Given) -> torch.dtype:
    read_as = given["ELEMENT"]
    found = [dtype for dtype, each in KINDS.items() if each.code == given["KIND"] and each.read_as == read_as]
    return found[0] if given["KIND"] else read_as


def _merge(
    fault: KernelFault, given: Given, address: int, position: int, elements: int, inner: int, stride: int
) -> None:
    dtype = _dtype_of(given)
    if stride == -1:  # numbers of a compiled graph
        inner, stride = elements, 0
    extent = elements if stride == 0 else (elements // inner - 1) * stride + inner
    memory = (ctypes.c_char * (extent * dtype.itemsize)).from_address(address)
    numbers = torch.frombuffer(memory, dtype=dtype)
    flat = numbers if stride == 0 else numbers.as_strided((elements // inner, inner), (stride, 1)).reshape(-1)
    flat = fault.elements(flat)
    found = fault.row(TorchReader.row(TensorSource(flat, flat.numel(), flat.numel(), 0), bool(given["COUNT"])))
    row = at(given["rows"] + 8 * COLUMNS * position, COLUMNS)
    row[0], row[1], row[2] = min(row[0], found[0]), max(row[1], found[1]), row[2] | found[2]
    row[3:5] += found[3:5]
    row[5] = found[5] if given["COUNT"] else row[5]
