"""Errors of gpuwatch itself within a hook: they are recorded, and the training goes on."""

from __future__ import annotations

from collections.abc import Callable

from ...core.events import OwnFault, RunPosition
from ...core.recorder.layout import HeadField, HooksState
from ...core.recorder.writer import RecorderWriter
from ..patches import PatchLedger

_MAX_FAULTS = 20


class FaultRecorder:
    """Those of a rank. `_MAX_FAULTS` of them remove the hooks: so their ledger is made here."""

    def __init__(self, recorder: RecorderWriter, where: Callable[[], RunPosition]) -> None:
        self._recorder = recorder
        self._where = where
        self._count = 0
        self.patches = PatchLedger(self.record)

    def record(self, part: str, error: Exception) -> None:
        """An error has come up in this part."""
        self._count += 1
        try:
            if self._count <= _MAX_FAULTS:
                self._append(part, error)
            else:
                self._recorder.count_fault(part)
            if self._count == _MAX_FAULTS:
                self._recorder.fields[HeadField.HOOKS] = HooksState.DETACHED
        except Exception:  # the recorder is closed
            pass
        if self._count == _MAX_FAULTS:
            self.patches.undo()

    def _append(self, part: str, error: Exception) -> None:
        try:
            fault = OwnFault(self._where(), part, f"{type(error).__name__}: {error}")
        except Exception:
            self._recorder.count_fault(part)
        else:
            self._recorder.append(fault)
