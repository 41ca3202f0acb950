"""Entry of a worker, started by torchrun's agent in place of the script: preflight, hooks, then the script.

gpuwatch.worker train.py --lr 1e-4
gpuwatch.worker -m package.train --lr 1e-4
gpuwatch.worker --exec program arguments        (torchrun's --no-python)
gpuwatch.worker --check                         (the preflight alone)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from ..core.errors import ExitCode
from ..core.identity import RankIdentity
from ..core.own_imports import path_as_given
from ..core.recorder.layout import RankPhase, file_name
from ..core.recorder.own_files import standard_streams_taken
from ..core.settings import VARIABLE, WorkerSettings
from ..core.tell import tell
from .patches import after_import
from .preflight.preflight_run import preflight_or_exit
from .script import ScriptTarget, run
from .session import WorkerSession, open_session, watch_the_ends


def main() -> NoReturn:
    """Run one rank. Ends the process."""
    arguments = sys.argv[1:]
    settings = WorkerSettings.from_environment()
    if settings is None:
        tell(f"gpuwatch.worker: expected {VARIABLE} from `gpuwatch launch`, found none")
        raise SystemExit(ExitCode.USAGE)
    session = _open_session(settings)
    if session is not None:
        _preflight(session, _script_file(arguments))
    path_as_given()
    if arguments[0] == "--check":
        _end_check(session)
    if arguments[0] == "--exec":
        if session is not None:
            session.enter(RankPhase.UNWATCHED)
        os.execvp(arguments[1], arguments[1:])
    if session is None:
        run(ScriptTarget.parse(arguments), lambda error: None, lambda code: None)
    session.enter(RankPhase.SCRIPT)
    after_import("torch", session.attach_hooks)
    run(ScriptTarget.parse(arguments), session.raised, session.finished)


def _open_session(settings: WorkerSettings) -> WorkerSession | None:
    """The session of this rank. None if its recorder cannot be created: then the training goes on unwatched."""
    identity = RankIdentity.from_environment()
    path = Path(settings.recorder_dir) / file_name(identity.rank, settings.attempt)
    try:
        session = open_session(settings, path, identity.rank, identity.local_rank, identity.world_size)
    except OSError as error:
        tell(f"gpuwatch: rank {identity.rank} goes on unwatched, no recorder: {error}")
        return None
    session.answer_with_stacks()
    watch_the_ends()
    return session


def _script_file(arguments: list[str]) -> str:
    """The script file, which should be the same on all ranks; "" if the arguments name no file."""
    return "" if arguments[0].startswith("-") else arguments[0]


def _end_check(session: WorkerSession | None) -> NoReturn:
    """End a check that this rank has passed."""
    if session is None:
        tell("gpuwatch: nothing was checked: the recorder of this rank could not be made")
        raise SystemExit(ExitCode.PREFLIGHT_FAILED)
    session.finished(ExitCode.CLEAN)
    raise SystemExit(ExitCode.CLEAN)


def _preflight(session: WorkerSession, script: str) -> None:
    if session.settings.preflight == "off":
        return
    with standard_streams_taken():
        preflight_or_exit(session, RankIdentity.from_environment(), script)
