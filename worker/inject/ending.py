"""How a process ends that gpuwatch did not start: heard at its exit, with what Python itself keeps of it.

Of the script's process Python keeps the exception that nobody caught (sys.last_value), and not the code of a
SystemExit: the launcher's side sees that from outside. A child of multiprocessing runs its finalizers while the
exception is on its way.
"""

from __future__ import annotations

import atexit
import sys

from ...core.recorder.layout import RankPhase
from ..session import Session


def tell_the_end(session: Session) -> None:
    """Record how this process ends, when it does."""
    util = sys.modules.get("multiprocessing.util")
    process = sys.modules.get("multiprocessing.process")
    if util is not None and process is not None and process.parent_process() is not None:
        util.Finalize(None, _child_ends, args=(session,), exitpriority=-100)
    else:
        atexit.register(_script_ends, session)


def _script_ends(session: Session) -> None:
    if not session.is_ours:
        return
    error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException) and not isinstance(error, SystemExit):
        session.raised(error)
    else:
        session.settle()
        session.enter(RankPhase.FINISHED)


def _child_ends(session: Session) -> None:
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code and isinstance(error.__context__, Exception):  # torch.multiprocessing.spawn has written it down
            session.raised(error.__context__)
        else:
            session.finished(code)
    elif error is not None:
        session.raised(error)
    else:
        session.finished(0)
