"""How long the parts of each optimizer step take on the host: see core/recorder/step_table.py.

The hooks say where a part ends. A step is written only if all its parts were seen: a forward, and the end of the
backward before and after torch has waited for the gradients of other ranks. Nothing here waits for a device.
"""

from __future__ import annotations

import time

from ...core.recorder import step_table
from ...core.recorder.layout import STEP_BYTES, STEPS, STEPS_AT, Field
from ...core.recorder.writer import RecorderWriter

_now = time.monotonic_ns
_pack = step_table.ENTRY.pack_into
_WAITED, _TIMED = int(Field.WAITED_NS), int(Field.STEPS_TIMED)
_OUTSIDE, _FORWARD, _BACKWARD, _WAITING, _OPTIMIZER = range(len(step_table.PARTS))


class StepClock:
    """Of one rank. Time that it has waited in calls of Python (`Field.WAITED_NS`) is waiting, in whichever part."""

    def __init__(self, recorder: RecorderWriter) -> None:
        self._view = recorder.view
        self._fields = recorder.fields
        self._spent = [0] * len(step_table.PARTS)
        self._since = _now()
        self._waited = 0
        """WAITED_NS at `_since`."""
        self._forwards = False
        self._reduced = False
        """Whether the forward, and the end of a backward, were seen in this step."""
        self._is_forward_over = False
        """The forward has ended, and its backward has not."""

    def forward_begins(self) -> None:
        """A root's forward begins. What came before it was outside: the end of a step, or of another forward."""
        self._spend(_OUTSIDE)
        self._forwards = True

    def forward_ends(self) -> None:
        """A root's forward has ended."""
        self._spend(_FORWARD)
        self._is_forward_over = True

    def backward_ends(self) -> None:
        """All local gradients are there."""
        self._spend(_BACKWARD)
        self._is_forward_over = False

    def reduction_ends(self) -> None:
        """What torch does at the end of a backward is over: DDP has waited for the gradients of all ranks."""
        self._spend(_WAITING)
        self._reduced = True

    def optimizer_begins(self) -> None:
        """The optimizer's step begins. Between a backward and this a script clips gradients."""
        self._spend(_BACKWARD if self._is_forward_over else _OPTIMIZER)

    def step_ends(self, number: int) -> None:
        """The optimizer's step has ended, the `number`th one."""
        self._spend(_OPTIMIZER)
        spent = self._spent
        if self._forwards and self._reduced:
            count = self._fields[_TIMED] + 1
            _pack(self._view, STEPS_AT + count % STEPS * STEP_BYTES, count, number, *spent, count)
            self._fields[_TIMED] = count
        spent[:] = (0, 0, 0, 0, 0)
        self._forwards = self._reduced = self._is_forward_over = False

    def _spend(self, part: int) -> None:
        now, waited = _now(), self._fields[_WAITED]
        spent, others = self._spent, waited - self._waited
        if others:
            spent[_WAITING] += others
            self._waited = waited
        spent[part] += now - self._since - others
        self._since = now
