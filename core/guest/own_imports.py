"""What gpuwatch imports is gpuwatch's, and what the job imports is the job's, also where both have the same name.

A job may have a `queue.py` or a `msgspec.py` in its working folder, beside its script or on its PYTHONPATH. Python
finds modules by name alone, so in a process that both share each of them has to find its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from ..signal_errors import from_outside

_START = str(Path(__file__).with_name("start.py"))
_MODULES = frozenset(sys.stdlib_module_names) | {"msgspec", "psutil", "pynvml", "typing_extensions"}
"""What a rank may import for us, beside torch and numpy, which are the script's own choice."""
_READ = "f=open(F,'rb');code=f.read();f.close()"
OWN_START = f"-cF={_START!r};{_READ};exec(compile(code,F,'exec'),{{'__name__':'__main__','__file__':F}})"
"""The same as an option of Python: torchrun prints the first word without a dash as the name of the script."""


def own_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs `main` of a module of gpuwatch in a Python of its own."""
    return [sys.executable, _START, module, *arguments]


class OwnImports(AbstractContextManager[None]):
    """Within it, imports are gpuwatch's; afterwards they are the script's again.

    `own_path` are the folders of sys.path that Python itself and its site-packages have put there.
    """

    def __init__(self, own_path: Sequence[str]) -> None:
        self._own_path = list(own_path)
        self._ours: dict[str, ModuleType] = {}
        """Modules that we have imported, and whose names are the script's."""
        self._theirs: dict[str, ModuleType] = {}
        self._path: list[str] = []
        self._known: Collection[str] = ()

    def __enter__(self) -> None:
        self._path = list(sys.path)
        sys.path[:] = [*self._own_path, *(folder for folder in self._path if folder not in self._own_path)]
        self._theirs = self._taken_out() | {name: sys.modules[name] for name in self._ours if name in sys.modules}
        sys.modules.update(self._ours)
        self._known = frozenset(sys.modules)

    def __exit__(self, *_: object) -> None:
        sys.path[:] = self._path
        for name in self._ours:
            sys.modules.pop(name, None)
        self.give_way(self._known)
        sys.modules.update(self._theirs)

    def give_way(self, known: Collection[str]) -> None:
        """Forget each module, but the `known` ones, that the script would find elsewhere."""
        before = [folder for folder in sys.path if folder not in self._own_path]
        cached = [folder for folder in before if folder in sys.path_importer_cache]
        new = {name for name in sys.modules if name not in known}
        for top in {name.partition(".")[0] for name in new} & _MODULES:
            if _is_found(top, before):
                self._ours |= _taken(top, new)
        for folder in before:  # the script may write a module there at once: make Python read the folder again
            if folder not in cached:
                sys.path_importer_cache.pop(folder, None)

    def _taken_out(self) -> dict[str, ModuleType]:
        found: dict[str, ModuleType] = {}
        for top in _MODULES & sys.modules.keys():
            origin = getattr(getattr(sys.modules[top], "__spec__", None), "origin", None) or ""
            is_own = any(origin.startswith(f"{folder}/") for folder in self._own_path)
            if origin.startswith("/") and not is_own and _is_found(top, self._own_path):
                found |= _taken(top, sys.modules)
        return found


def _taken(top: str, among: Iterable[str]) -> dict[str, ModuleType]:
    """Out of sys.modules: a module and those below it."""
    of_it = [name for name in among if name == top or name.startswith(f"{top}.")]
    return {name: sys.modules.pop(name) for name in of_it}


def _is_found(name: str, path: Sequence[str]) -> bool:
    """Whether there is such a module. A folder without Python in it hides none."""
    try:
        spec = PathFinder.find_spec(name, path)
    except Exception as error:  # a finder of the script's
        if from_outside(error):
            raise
        return False
    return spec is not None and spec.loader is not None and spec.origin is not None


_current: OwnImports | None = None
_given: list[str] | None = None
_started_with: Collection[str] = ()


def began(given: list[str] | None, own_path: list[str], started_with: Collection[str]) -> None:
    """This process was started by start.py, or is a rank of `gpuwatch run`."""
    global _current, _given, _started_with
    _current, _given, _started_with = OwnImports(own_path), given, started_with


def theirs_last() -> None:
    """In a command of ours, move PYTHONPATH's folders and the one that `python -m` puts first to the end of sys.path.

    See `path_as_given`.
    """
    global _given
    _given = list(sys.path)
    theirs = {os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)}  # noqa: PTH100
    if sys.path[:1] in ([""], [str(Path.cwd())]):
        sys.path.append(sys.path.pop(0))
    sys.path.sort(key=lambda folder: folder in theirs)


def own_imports() -> AbstractContextManager[None]:
    """Within it, imports are gpuwatch's. In a process that imports gpuwatch by itself they are as they are."""
    return _current if _current is not None else nullcontext()


def path_as_given() -> None:
    """Restore sys.path before torch is imported: the job's PYTHONPATH may choose which torch."""
    if _given is not None:
        sys.path[:] = _given


def give_way_to_script() -> None:
    """Let the script import its own modules. Call it once sys.path is as the script must see it."""
    if _current is not None:
        _current.give_way(_started_with)
