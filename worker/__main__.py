"""Entry of a worker, started by torchrun's agent in place of the script: preflight, hooks, then the script.

gpuwatch.worker train.py --lr 1e-4
gpuwatch.worker -m package.train --lr 1e-4
gpuwatch.worker --exec program arguments        (torchrun's --no-python)
gpuwatch.worker --check                         (the preflight alone)
"""

from __future__ import annotations

import atexit
import io
import os
import runpy
import signal
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from ..core.codes import RANK_OVERFLOW, Code, ExitCode, coded
from ..core.errors import JobEnded, OverflowDetected
from ..core.guest.own_files import standard_streams_taken
from ..core.guest.own_imports import give_way_to_script, path_as_given
from ..core.guest.tell import end_process, flush_streams, say, tell
from ..core.host import die_with_parent
from ..core.identity import RankIdentity
from ..core.recorder.layout import RankPhase, file_name
from ..core.settings import VARIABLE, WorkerSettings
from .folded_errors import folded, is_terminal
from .patches import after_import
from .preflight.preflight_run import preflight_or_exit
from .session import WorkerSession, open_session, watch_the_ends

try:
    from .native.recursion import first_frame
except ImportError:  # not built: the hooks' share of the recursion limit is not given back

    def first_frame() -> None:
        """The frames below the caller are ours: it is to be the first one (worker/native/recursion.c)."""


_LONGEST_THREADS_S = 30.0
"""How long a rank with an overflow waits for its threads: one may save a checkpoint, and one may never end."""


def main() -> NoReturn:
    """Run one rank. Ends the process."""
    arguments = sys.argv[1:]
    settings = WorkerSettings.from_environment()
    if settings is None:
        tell(coded(f"gpuwatch.worker: expected {VARIABLE} from `gpuwatch launch`, found none", Code.NESTED_RUN))
        raise SystemExit(ExitCode.USAGE)
    if settings.check_only:
        die_with_parent()
    session = _open_session(settings)
    if session is not None and settings.preflight != "off":
        # the script file should be the same on all ranks; "": the arguments name none
        script = "" if arguments[0].startswith("-") else arguments[0]
        with standard_streams_taken():
            preflight_or_exit(session, RankIdentity.from_environment(), script)
    path_as_given()
    if arguments[0] == "--check":
        if session is None:
            say(coded("nothing was checked: the recorder of this rank could not be made", Code.NO_RECORDER))
            raise SystemExit(ExitCode.PREFLIGHT_FAILED)
        session.finished(ExitCode.CLEAN)
        raise SystemExit(ExitCode.CLEAN)
    if arguments[0] == "--exec":
        if session is not None:
            session.enter(RankPhase.UNWATCHED)
        os.execvp(arguments[1], arguments[1:])
    if session is None:
        run(arguments, lambda error: None, lambda code: None)
    session.enter(RankPhase.SCRIPT)
    after_import("torch", session.attach_hooks)
    run(arguments, session.raised, session.finished, session.raise_kept)


def _open_session(settings: WorkerSettings) -> WorkerSession | None:
    """The session of this rank. None if its recorder cannot be created: then the training goes on unwatched."""
    identity = RankIdentity.from_environment()
    path = Path(settings.recorder_dir) / file_name(identity.rank, settings.attempt)
    try:
        session = open_session(settings, path, identity.rank, identity.local_rank, identity.world_size)
    except OSError as error:
        say(coded(f"rank {identity.rank} goes on unwatched, no recorder: {error}", Code.NO_RECORDER))
        return None
    session.answer_with_stacks()
    session.note_signals()
    watch_the_ends()
    return session


# The user's script runs as `__main__`, as Python itself would run it.


def run(
    arguments: list[str],
    raised: Callable[[BaseException], object],
    finished: Callable[[int], None],
    raise_kept: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Run `script args...` or `-m module args...`, call `raised` or `finished`, and end the process as Python would.

    `raise_kept` is called as the script's last line: it may raise.
    """
    try:
        try:
            _execute(arguments)
        except (OverflowDetected, JobEnded):  # the job ends by these, whatever else a handler has raised
            raise
        except BaseException:
            raise_kept()
            raise
        raise_kept()
    except SystemExit as stop:
        _tell(finished, int(stop.code if isinstance(stop.code, int) else stop.code is not None))
        if isinstance(stop, JobEnded):
            end_process(0)
        raise
    except BaseException as error:
        error.__traceback__ = _own_frames_removed(error.__traceback__)
        _die_of(error, is_kept=_tell(raised, error) is True)
    _tell(finished, 0)
    sys.exit(0)


def _tell(observer: Callable[[Any], object], what: object) -> object:
    """Call an observer. An error in it does not change how the script ends."""
    answer: object = None
    with suppress(Exception):
        answer = observer(what)
    return answer


def _execute(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        # `python -m` calls the same function, which runs the code in the module `__main__`
        if not _is_safe_path():
            sys.path.insert(0, os.getcwd())  # noqa: PTH109  # as Python does
        give_way_to_script()
        _fresh_main()
        sys.argv = arguments[1:]
        (lambda: first_frame())()  # as the function below
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]  # private, used by pdb and cProfile too
        return
    sys.argv = arguments[:]
    path = os.path.join(os.getcwd(), arguments[0])  # noqa: PTH118, PTH109  # as Python does, which leaves a ".." in it
    if Path(path).is_dir() or zipfile.is_zipfile(path):
        sys.path.insert(0, path)
        give_way_to_script()
        _fresh_main()
        (lambda: first_frame())()  # as the function below
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]  # what `python folder` calls
        return
    if not _is_safe_path():
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))  # noqa: PTH120  # what Python itself puts there
    give_way_to_script()
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        tell(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}")
        raise SystemExit(2) from None
    code = compile(source, path, "exec", dont_inherit=True)
    main = _fresh_main()
    exec("first_frame()", {"first_frame": first_frame})  # as the script below
    main.__file__ = path
    main.__dict__["__cached__"] = None
    main.__loader__ = SourceFileLoader("__main__", path)
    exec(code, main.__dict__)


def _is_safe_path() -> bool:
    """python -P, from 3.11"""
    return bool(getattr(sys.flags, "safe_path", False))


def _fresh_main() -> ModuleType:
    """A new `__main__` as Python makes it before it runs a script."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    main.__annotations__ = {}
    sys.modules["__main__"] = main
    return main


def _own_frames_removed(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback without gpuwatch's frames: from the script's first frame on."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return traceback


def _die_of(error: BaseException, *, is_kept: bool) -> NoReturn:
    """Print the exception with the current excepthook, and exit with the code that Python would give.

    `is_kept`: the recorder has its traceback, and so the report.
    """
    try:
        line = folded(error, RankIdentity.from_environment().rank) if is_kept and is_terminal() else ""
        if line:
            say(line)
        else:
            sys.excepthook(type(error), error, error.__traceback__)
    except Exception:
        sys.__excepthook__(type(error), error, error.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        # like Python, end by the signal itself, so that the parent sees an interrupted child
        atexit._run_exitfuncs()
        flush_streams()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    if isinstance(error, OverflowDetected):
        # its process groups still exist: a normal exit would run their destructors last, and those of gloo sometimes
        # abort the process (torch 2.13), so that the rank would be reported as lost
        end_process(RANK_OVERFLOW, _LONGEST_THREADS_S)
    sys.exit(1)
