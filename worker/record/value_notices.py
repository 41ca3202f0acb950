"""What a rank tells of values that raise no alarm: near overflow, in underflow, hidden by a rule, without effect."""

from __future__ import annotations

from collections.abc import Callable

from ...core.events.alarms import AbsorbedValue, IgnoredAlarm, LedNowhere, MaskReturned, RangeWarning
from ...core.frames import Frame, Row, module_text
from ...core.recorder.layout import HeadField
from ...core.recorder.writer import OpenPage
from ...core.text import shown_name
from ...core.values import NonFinite, name_of
from .held_alarms import NonFiniteRow
from .progress import RunProgress

_MOST_TOLD = 256


class ValueNotices:
    """Counts them, and records an event for the first one of each module and role."""

    def __init__(self, progress: RunProgress, rule_for: Callable[[str, str], str]) -> None:
        """`rule_for`: the --ignore rule that covers (module, role)."""
        self._progress, self._rule_for = progress, rule_for
        self._recorder, self._fields = progress.recorder, progress.fields
        self._warned: set[tuple[str, ...]] = set()
        self._hidden: set[tuple[str, ...]] = set()
        self._absorbed: set[tuple[str, ...]] = set()
        self._masks: set[tuple[str, ...]] = set()

    def hide(self, bad: NonFiniteRow) -> None:
        """Count a row that an --ignore rule covers, and record an event for the first of its module and role."""
        self._fields[HeadField.IGNORED] += 1
        page, frame, row = bad
        if self._is_first(self._hidden, bad):
            rule = self._rule_for(frame.module, row.role)
            where = self._progress.where_of(page, frame)
            self._recorder.append(IgnoredAlarm(where, rule, frame.module, row.role, name_of(NonFinite(row.flags))))

    def led_nowhere(self, bad: NonFiniteRow, why: LedNowhere, by: str = "") -> None:
        """Count a bad value that led nowhere, and record an event for the first of its module and role.

        `by`: the module that has taken it away.
        """
        self._fields[HeadField.ABSORBED] += 1
        page, frame, row = bad
        if len(self._absorbed) < _MOST_TOLD and self._is_first(self._absorbed, bad):
            where, value = self._progress.where_of(page, frame), name_of(NonFinite(row.flags))
            self._recorder.append(AbsorbedValue(where, frame.module, frame.cls, row.role, value, row.dtype, by, why))

    def mask(self, returned: NonFiniteRow) -> None:
        """Record an event for the first -inf of its module and role that is a mask's."""
        page, frame, row = returned
        if len(self._masks) < _MOST_TOLD and self._is_first(self._masks, returned):
            where = self._progress.where_of(page, frame)
            self._recorder.append(MaskReturned(where, frame.module, frame.cls, row.role))

    def _is_first(self, known: set[tuple[str, ...]], row: NonFiniteRow, kind: str = "") -> bool:
        """Whether a row is the first of its module, role and kind. The next one is not."""
        key = (kind, self._recorder.names.root_label(row.page.root), row.frame.module, row.row.role)
        if key in known:
            return False
        known.add(key)
        return True

    def out_of_line(self, what: str, page: OpenPage, frame: Frame, row: Row) -> None:
        """Have the next steps watched whole, as a value of this row is out of line. `what`: in words."""
        place = f"{shown_name(row.role)} of {module_text(frame.module, frame.cls)}"
        self._progress.alert(self._progress.where_of(page, frame), f"{what} in {place}")

    def warn(self, kind: str, page: OpenPage, frame: Frame, row: Row) -> None:
        """Count a value near overflow or in underflow, and record an event for the first of its module and role."""
        self._fields[HeadField.WARNED] += 1
        if len(self._warned) < _MOST_TOLD and self._is_first(self._warned, NonFiniteRow(page, frame, row), kind):
            if kind == "near overflow":
                self.out_of_line(kind, page, frame, row)
            self._recorder.append(
                RangeWarning(
                    self._progress.where_of(page, frame),
                    kind,
                    frame.module,
                    frame.cls,
                    frame.phase,
                    row.role,
                    row.dtype,
                    abs_max=row.abs_max,
                    headroom=row.headroom,
                    zeros=row.zeros,
                    subnormals=row.subnormals,
                )
            )
