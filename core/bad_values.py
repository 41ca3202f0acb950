"""What becomes of a bad value within one forward: it leads to what the model returns, or a call takes it away. Pure.

A call that returns an inf or a nan is undecided for as long as the calls around it have not returned:

- the call around it returns something that cannot come of it: the value was taken away (`nan_to_num`, `where`,
  `masked_fill`, `min`, or nobody used it). It is a notice, and no alarm;
- the call around it returns a bad value as well: now the next call outwards decides;
- there is no call around it, or the forward has ended in another way: it is an alarm, where it was made.

nan stays nan or is taken away, and an inf stays an inf or becomes nan. So an inf never comes of a nan.

The page shows the values that a later call is handed. If that call returns something bad, the value is undecided from
there on, even if an earlier call had taken it away.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import or_

from .frames import Frame, FramePhase, Row, RowKind, is_inside
from .roles import RoleKind
from .values import NonFinite

_INFINITE = NonFinite.POSINF | NonFinite.INF
_ANY_INFINITE = _INFINITE | NonFinite.NEGINF
NAMED_BY_SCRIPT = "detect_overflow"
"""The class of a frame of a tensor that the script asked about: a bad value in it is an alarm at once."""


@dataclass(eq=False)
class BadValue:
    """A bad value, where it was made."""

    frame: Frame
    row: Row
    within: Frame
    """The outermost call around it that has returned a bad value: its own at first."""
    out_of_mask: bool = False
    """nan of a mask of -inf, which no other call has made anything else of."""


class BadValues:
    """The bad values of a page, in the order in which they were made."""

    __slots__ = ("_known", "_taken", "undecided")

    def __init__(self) -> None:
        self.undecided: list[BadValue] = []
        self._known: dict[int, BadValue] = {}
        """Index of a bad value in the page -> what it comes of."""
        self._taken: set[tuple[str, str]] = set()
        """(module, role) of what was taken away."""

    def returns(self, frame: Frame, alarm: Row | None) -> tuple[BadValue | None, tuple[BadValue, ...]]:
        """A call of a forward has returned. `alarm`: a bad value in its outputs, if it is to blame or passes it on.

        Returns (the value that became an alarm, the values that the call took away).
        """
        taken = self._decide(frame, alarm)
        if alarm is None:
            return None, taken
        found = self._of(frame, alarm)
        for row in frame.outputs:
            if row.flags and row.value >= 0:
                self._known[row.value] = found
        if frame.cls == NAMED_BY_SCRIPT:
            return self._blame(found), taken
        if frame.parent is not None:
            return None, taken
        if frame.phase != FramePhase.RECOMPUTE:
            return self._blame(found), taken
        if (found.frame.module, found.row.role) in self._taken:  # in the forward that is run again
            self.undecided.remove(found)
        elif not found.out_of_mask:
            return self._blame(found), taken
        return None, taken

    def end(self) -> BadValue | None:
        """The forward has ended, so no further call decides. Returns the first undecided value: it is an alarm."""
        for bad in [bad for bad in self.undecided if not bad.out_of_mask]:
            self.undecided.remove(bad)
            if (bad.frame.module, bad.row.role) not in self._taken:  # in the forward that is run again
                return bad
        return None

    def _blame(self, found: BadValue) -> BadValue:
        self.undecided.remove(found)
        return found

    def _decide(self, frame: Frame, alarm: Row | None) -> tuple[BadValue, ...]:
        """What this call makes of the bad values inside of it; those that it has taken away."""
        outputs = frame.outputs
        if not self.undecided or not outputs:  # a call that raised has returned nothing
            return ()
        readable = all(row.kind in (RowKind.MEASURED, RowKind.EMPTY, RowKind.NONE) for row in outputs) and any(
            row.kind == RowKind.MEASURED for row in outputs
        )
        flags = _flags_of(outputs)
        taken: list[BadValue] = []
        left: list[BadValue] = []
        for bad in self.undecided:
            if not is_inside(bad.within, frame):
                left.append(bad)
            elif readable and not _may_come_of(bad, flags):
                taken.append(bad)
            elif not bad.out_of_mask or alarm is not None:  # else a rule of the user's covers what it has become
                bad.within = frame
                bad.out_of_mask &= alarm is None
                left.append(bad)
        self.undecided = left
        self._taken |= {(bad.frame.module, bad.row.role) for bad in taken}
        return tuple(taken)

    def _of(self, frame: Frame, alarm: Row) -> BadValue:
        """The bad value that this one comes of, undecided from now on."""
        inside = [bad for bad in self.undecided if bad.within is frame]
        if inside:
            return next((bad for bad in inside if not bad.out_of_mask), inside[0])
        handed = [row for row in frame.inputs if row.flags]
        nan = [row for row in handed if row.flags != NonFinite.NEGINF]
        new_inf = any(row.flags & _INFINITE for row in frame.outputs)
        passed_on = [self._known[row.value] for row in nan if row.value in self._known]
        masked = next((bad for bad in self.undecided if bad.out_of_mask), None)
        found = next((bad for bad in passed_on if _may_lead_to(bad, frame, alarm)), None)
        if found is not None:
            found.out_of_mask &= len(passed_on) == len(nan)
        elif nan and masked is not None and not new_inf and not passed_on:
            found = masked
            found.out_of_mask = False
        else:
            found = BadValue(frame, alarm, frame, bool(handed) and not nan and not new_inf)
        if found not in self.undecided:
            found.within = frame
            self.undecided.append(found)
        return found


def _flags_of(rows: Iterable[Row]) -> NonFinite:
    return reduce(or_, (NonFinite(row.flags) for row in rows))


def _may_lead_to(bad: BadValue, frame: Frame, alarm: Row) -> bool:
    """Whether a bad value that the call was handed may have caused its output."""
    flags = _flags_of([alarm, *frame.outputs] if alarm.role_kind is RoleKind.WEIGHT else [alarm])
    return _may_come_of(bad, flags) and not (bad.out_of_mask and flags & _INFINITE)


def _may_come_of(bad: BadValue, flags: NonFinite) -> bool:
    """Whether a bad value inside the call may have caused its output."""
    if flags & NonFinite.NAN:
        return True
    return bool(not bad.out_of_mask and flags & _ANY_INFINITE and bad.row.flags & _ANY_INFINITE)
