"""gpuwatch's replacements in torch and in Python, within a rank. All go through a ledger, which can undo them.

Several watchers of a process may stand in the place of one function, around each other, and leave in any order.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

# Calls a function right after the first import of a module, so that gpuwatch never imports torch before the script.
#
# A script may set OMP_NUM_THREADS or other variables that torch reads at its import.


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


@dataclass
class _ReplacedFunction:
    owner: Any
    name: str
    around: Callable[[Any], Any]
    before: Any
    ours: Any


_replaced: list[_ReplacedFunction] = []
"""The replaced functions of this process, in the order of replacement."""


def replaced() -> dict[str, list[str]]:
    """All that is replaced now: full name of the class or module -> its attributes, in alphabetical order."""
    found: dict[str, set[str]] = {}
    for patch in _replaced:
        found.setdefault(_full_name(patch.owner), set()).add(patch.name)
    return {owner: sorted(names) for owner, names in sorted(found.items())}


def _full_name(owner: Any) -> str:
    """A class's, or a module's."""
    return owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"


def _raised(part: str, error: Exception) -> None:
    raise error


class PatchLedger:
    """The functions that a watcher has replaced, and other changes to undo when it leaves.

    To replace a function for the life of the process, use a ledger and drop it.
    """

    def __init__(self, on_fault: Callable[[str, Exception], None] = _raised) -> None:
        self._on_fault = on_fault
        self._undo: list[Callable[[], object]] = []

    def replace(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        """Replace the class's or module's own attribute of this name by `around(before)`.

        A name that this torch does not have is a fault, and nothing is replaced.
        """
        before = vars(owner).get(name)
        if before is None:
            lost = LookupError(f"this torch has no {_full_name(owner)}.{name}: calls through it are not seen")
            self._on_fault("attach", lost)
            return
        patch = _ReplacedFunction(owner, name, around, before, around(before))
        setattr(owner, name, patch.ours)
        _replaced.append(patch)
        self.at_undo(lambda: _take_out(patch))

    def at_undo(self, call: Callable[[], object]) -> None:
        """Have this called as well."""
        self._undo.append(call)

    def undo(self) -> None:
        """Restore all, the last first. A later replacement by other code stays, and still calls ours."""
        while self._undo:
            self._undo.pop()()


def allow_global_hooks() -> None:
    """torch warns where a compiled model is called while there are hooks of all modules: ours do no harm there."""
    warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")


def _take_out(patch: _ReplacedFunction) -> None:
    _replaced.remove(patch)
    old, new = patch.ours, patch.before
    for other in _replaced:  # those of other watchers go around what was there before
        if other.owner is patch.owner and other.name == patch.name and other.before is old:
            old, other.before = other.ours, new
            new = other.ours = other.around(new)
    if vars(patch.owner).get(patch.name) is old:
        setattr(patch.owner, patch.name, new)
