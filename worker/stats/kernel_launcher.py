"""Launches compiled kernels through the driver, without Triton's wrapper in Python.

The driver does not check the arguments of a kernel, and a wrong address would end the training. So a kernel is launched
here only after two checks: the driver lists the expected parameters, and a trial (kernel_trial.py) gave the right
numbers. The host does not wait for the trial. Until it has passed, Triton launches the kernel.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Hashable
from typing import Any

import torch

from .kernel_trial import KernelTrial

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

    def __init__(self, add_note: Callable[[str], None] = lambda note: None, library: Any = None) -> None:
        """`library`: the driver's, with `cuLaunchKernel` and `cuFuncGetParamInfo`."""
        self._add_note = add_note
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
                self._refuse(f"{type(error).__name__}: {error}")
            return None
        kernel, trial = self._trials[key] or (b"", None)
        passed = trial.passed() if trial is not None else None
        if passed is not None:
            self._trials[key] = None
        if passed is False:
            self._refuse("a trial gave other numbers")
        return kernel if passed else None

    def _refuse(self, why: str) -> None:
        self._library = None  # what has failed once is not asked again
        self._add_note(f"Triton launches gpuwatch's kernels ({why}), which takes more of the host's time")

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
