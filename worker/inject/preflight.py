"""The preflight of a rank that gpuwatch did not start: before its first process group, once all ranks are known."""

from __future__ import annotations

import sys
from pathlib import Path

from ...core.recorder.layout import RankPhase
from ...core.records import PreflightResult
from ...core.text.tell import tell
from ..preflight.run import preflight_or_exit
from ..session import Session
from .before_init import Entry, LeftOut
from .meeting_place import MeetingPlace


def preflight_before_init(session: Session, entry: Entry, local_rank: int | None) -> None:
    """Test this rank with all others. Ends the process where the training should not start; else returns.

    It leaves nothing behind: no group, no store, no variable. What fails of our own is raised.
    """
    settings = session.settings
    session.enter(RankPhase.PREFLIGHT)
    try:
        place = MeetingPlace(
            entry, local_rank, Path(settings.recorder_dir), settings.meets_at, settings.preflight_timeout_s
        )
        with place as identity:
            preflight_or_exit(session, identity, _script())
    except LeftOut as reason:
        leave_out(session, str(reason))
    finally:
        session.enter(RankPhase.SCRIPT)


def leave_out(session: Session, reason: str) -> None:
    """Say so, in the report and on stderr; "": another rank says it there."""
    session.recorder.append(PreflightResult(session.where(), "skipped", detail=reason))
    if reason:
        tell(f"gpuwatch: the preflight is left out: {reason}")


def _script() -> str:
    """The file that Python runs, which should be the same on all ranks."""
    path = Path(sys.argv[0] if sys.argv else "").absolute()
    return str(path) if path.is_file() else ""
