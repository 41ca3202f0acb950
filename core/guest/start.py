"""Starts a module of gpuwatch in a process of its own. Python runs this file by its path; nothing imports it.

    python core/guest/start.py gpuwatch.collector
    python -u -c"exec this file" -mgpuwatch.worker train.py --lr 1e-4        (own_imports.OWN_START)

`python -m` would import from the working folder first. That folder is the job's: a `zmq.py` or a `queue.py` there is
not ours. So this file imports nothing before that folder is out of sys.path, and it loads gpuwatch from where it lies.
"""

import sys

_STARTED_WITH = frozenset(sys.modules)
_HERE = __file__.rpartition("/")[0]
if not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):  # with -P or -I Python puts nothing there
    del sys.path[0]
_GIVEN = list(sys.path)

import os  # noqa: E402

_THEIRS = {os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)}  # noqa: PTH100  # pathlib takes longer
sys.path.sort(key=lambda folder: folder in _THEIRS)  # PYTHONPATH's folders come last

from importlib import import_module  # noqa: E402
from importlib.util import module_from_spec, spec_from_file_location  # noqa: E402


def _run_gpuwatch() -> None:
    root = _HERE.rsplit("/", 2)[0]
    spec = spec_from_file_location("gpuwatch", f"{root}/__init__.py", submodule_search_locations=[root])
    assert spec is not None and spec.loader is not None
    package = sys.modules["gpuwatch"] = module_from_spec(spec)
    spec.loader.exec_module(package)
    own_imports = import_module("gpuwatch.core.guest.own_imports")
    own_imports.began(_GIVEN, [folder for folder in _GIVEN if folder not in _THEIRS], _STARTED_WITH)
    name = sys.argv.pop(1)
    try:
        module = import_module(name.removeprefix("-m"))
        if hasattr(module, "__path__"):
            module = import_module(f"{module.__name__}.__main__")
    except ModuleNotFoundError as error:
        sys.stderr.write(f"gpuwatch: expected {error.name} in {sys.executable}, found none: install gpuwatch there\n")
        if name.startswith("-m"):
            _run_unwatched(sys.argv[1:])
        sys.exit(2)
    sys.exit(module.main())


def _run_unwatched(words: "list[str]") -> None:
    """A rank's Python is another one, by torchrun's PYTHON_EXEC, and has not what gpuwatch needs: the script can do
    without."""
    os.environ.pop("GPUWATCH_WORKER", None)
    if words[0] == "--exec":
        os.execvp(words[1], words[1:])
    if words[0] != "--check":
        os.execv(sys.executable, [sys.executable, "-u", *words])


try:
    _run_gpuwatch()
except KeyboardInterrupt:  # worker/__main__.py prints the traceback if the script raised it
    sys.excepthook = lambda *_: None
    raise
