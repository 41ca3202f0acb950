"""Python imports this at its start, in every process below `gpuwatch run`: the folder of this file is on PYTHONPATH.

It runs the `sitecustomize` that it hides, if there is one, and leaves no trace of itself in sys.path or sys.modules. It
imports nothing. A process that never looks for torch pays for no more than that.
"""

import os
import sys

_VARIABLE = "GPUWATCH_RUN"  # core/recorder/run_folder.py
_JOIN = "GPUWATCH_JOIN"  # core/recorder/run_folder.py
_finders: "list[object]" = sys.meta_path  # type: ignore[assignment]  # naming the right type needs imports
_HERE = os.path.dirname(__file__)  # noqa: PTH120  # pathlib takes longer to import than all that is done here


class _AtTorch:
    """A finder that finds no module itself: at the first import of torch, it starts gpuwatch."""

    def find_spec(self, name: str, path: "list[str] | None" = None, target: object = None) -> object:
        if name != "torch":
            return None
        if self in _finders:
            _finders.remove(self)
            _begin()
            for finder in sys.meta_path:  # gpuwatch's own is the first now
                spec = finder.find_spec(name, path)
                if spec is not None:
                    return spec
        return None


def _begin() -> None:
    folder = os.environ.get(_VARIABLE)
    if not folder or not os.path.isdir(folder):  # noqa: PTH112  # as above
        folder = _join()
    if not folder:
        return
    try:
        from gpuwatch.core.guest import own_imports

        own_imports.began(None, _OWN_PATH, ())
        with own_imports.own_imports():
            from gpuwatch.worker.joining import begin
    except Exception as error:
        _tell(folder, error)
        return
    try:
        begin(folder, _HERE)
    except Exception as error:
        _tell(folder, error)


def _join() -> "str | None":
    """The run is another host's: its folder here, if that host lets others join."""
    path = os.environ.get(_JOIN)
    if not path:
        return None
    try:
        from gpuwatch.worker.joining import join
    except Exception as error:
        reason = f"{sys.executable}: {type(error).__name__}: {error}: install gpuwatch into that Python, too"
        try:
            sys.stderr.write(f"gpuwatch: process {os.getpid()} goes on unwatched: {reason}\n")
        except (OSError, ValueError, AttributeError):  # a full disk, a pipe without a reader, closed
            pass
        return None
    return join(path)


def _tell(folder: str, error: Exception) -> None:
    """This Python cannot be watched: say why, for the report, and let it go on."""
    try:
        with open(os.path.join(folder, f"unwatched-{os.getpid()}"), "w") as file:  # noqa: PTH118, PTH123  # as above
            file.write(f"{sys.executable}: {type(error).__name__}: {error}")
    except OSError:
        pass


sys.path[:] = [folder for folder in sys.path if folder != _HERE]
_ON_PATH = [os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)]  # noqa: PTH100
_OWN_PATH = [folder for folder in sys.path if folder not in _ON_PATH]
"""Folders that the script did not put on sys.path; its own folder comes after these."""
if _VARIABLE in os.environ:
    _finders.insert(0, _AtTorch())
sys.path_importer_cache.pop(_HERE, None)
sys.modules.pop("sitecustomize", None)
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401  # the one that was hidden; without one, its absence is what Python expects
