"""Installs the stand-in in a process once it has imported torch, and gpuwatch's kernels once Triton is there.

A file `stand_in_cuda.pth` in the environment's site-packages imports this module at the start of each Python. It does
nothing unless STAND_IN_CUDA is set.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _install_operations() -> None:
    from . import operations

    operations.install()


def _install_kernels() -> None:
    from . import triton_kernels

    triton_kernels.install()


def _make_the_device_tests_small() -> None:
    module = sys.modules["gpuwatch.worker.device.accelerator"]
    cuda = module.CudaAccelerator  # type: ignore[attr-defined]
    cuda.sizes = cuda.sizes._replace(matmul=256, repeats=2)  # a GPU's takes hours here
    module._LOAD_SIZE, module._TRANSFER_BYTES = 256, 1 << 20  # type: ignore[attr-defined]


def _have_inductor_call_operations() -> None:
    config = sys.modules["torch._inductor.config"]
    if hasattr(config, "fallback_by_default"):  # torch 2.11 has it
        config.fallback_by_default = True  # in place of Triton kernels, which nobody computes here


_AFTER: dict[str, Callable[[], None]] = {
    "torch": _install_operations,
    "torch._inductor.config": _have_inductor_call_operations,
    "triton.compiler.compiler": _install_kernels,
    "gpuwatch.worker.device.accelerator": _make_the_device_tests_small,
}


class _Loader(importlib.abc.Loader):
    """The module's own loader, and then the function that `_AFTER` has for the module."""

    def __init__(self, loader: Any, name: str) -> None:
        self._loader = loader
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader  # type: ignore[union-attr]
        self._loader.exec_module(module)
        _AFTER[self._name]()


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _AFTER:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                spec.loader = _Loader(spec.loader, name)
                return spec
        return None


if os.environ.get("STAND_IN_CUDA") and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())
