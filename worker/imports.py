"""Calls a function right after the first import of a module, so that gpuwatch never imports torch before the script.

A script may set OMP_NUM_THREADS or other variables that torch reads at its import.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class _CallingLoader(importlib.abc.Loader):
    """Delegates to the module's own loader, and calls the function when the import has finished."""

    def __init__(self, loader: importlib.abc.Loader, finder: _ImportFinder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Restore the module's own loader: inspect and importlib.resources use it.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._finder.remove()
        self._loader.exec_module(module)
        self._finder.then()


class _ImportFinder(importlib.abc.MetaPathFinder):
    """Stays installed until the module is imported: importlib.util.find_spec only asks whether the module exists."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self.then = then
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name or self._searching:
            return None
        self._searching = True
        try:
            for finder in sys.meta_path:
                spec = finder.find_spec(fullname, path, target) if finder is not self else None
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _CallingLoader(spec.loader, self)
                    return spec
        finally:
            self._searching = False
        return None

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def after_import(name: str, then: Callable[[], None]) -> Callable[[], None]:
    """Call `then` when the import of module `name` has finished. Calls it at once if the module is imported already.

    Returns a function that gives up waiting. Until the import, or until it is called, `then` is kept alive.
    """
    finder = _ImportFinder(name, then)
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, finder)
    return finder.remove
