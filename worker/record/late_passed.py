"""What passes between ranks in the memory of a device: read there in its place, and told of when the numbers come.

A collective or a message that is issued from a stream is read in that stream before it, and again when somebody has
waited for it. A backend that has synchronised the stream itself, as NCCL does, returns no work: what came out is then
read at once. Messages in a bundle have one work for all, and are read when somebody has waited for that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from ...core.events import RunPosition
from ...core.recorder.group_table import OPERATIONS
from ...core.recorder.layout import HeadField, seal
from ...core.values import NonFinite
from ..stats.device import is_on_device
from ..stats.passed_readings import PassedReading, PassedReadings
from ..stats.tensor_stats import CODES
from .closed_rows import ClosedMask, LateMasks
from .group_slots import NO_MESSAGE, GroupTable
from .passed import NOT_FINITE, NOTHING_LOOKED, NotedOperation, PassedLook, PassedValues, look_at, tensors_in
from .progress import RecorderLock
from .rows import RowWriter

_MESSAGES = {OPERATIONS.index("send"), OPERATIONS.index("recv")}


class PassedWhen(IntEnum):
    """When tensors are looked at."""

    GOES_IN = 0
    CAME_OUT = 1
    """Somebody has waited for the work."""
    ISSUED = 2
    """The call has returned, and nobody can wait for this operation alone."""


Given = PassedReading | PassedLook | None
"""What an operation was given, as far as it is known."""


class _LateValues(NamedTuple):
    """What a Reading is about."""

    passing: NotedOperation
    came_out: bool
    where: RunPosition
    given: Given
    tensors: list[tuple[int, int]]
    """(code of the dtype, elements) of each."""


class LatePassed:
    """Reads what passes in the memory of a device, and tells PassedValues of what is not finite."""

    def __init__(
        self,
        passed: PassedValues,
        rows: RowWriter,
        groups: GroupTable,
        lock: RecorderLock,
        on_fault: Callable[[str, Exception], None],
        masks: LateMasks,
    ) -> None:
        """`masks` is told of those that are read in the same way."""
        self._passed = passed
        self._masks = masks
        self._rows = rows
        self._groups = groups
        self._lock = lock
        self._on_fault = on_fault
        self._fields = groups.fields
        self._failed = False
        self._held: list[PassedReading] = []
        """They wait for the numbers of what their operation was given."""
        groups.on_bundle = self._bundle_ended

    def look(
        self, slot: int, number: int, operation: int, root: int, message: int, when: int, given: Given, tensors: Any
    ) -> Given:
        """Look at tensors that go into an operation of a place in the table, or came out of it.

        `given`: what this has returned for what went in.
        """
        if self._failed:
            return None
        try:
            with self._lock:
                return self._look(slot, number, operation, root, message, when, given, tensors)
        except Exception as error:
            self._failed = True
            self._fields[HeadField.PASSED_UNSEEN] = seal(1)
            self._on_fault("what passes", error)
            return None

    def _look(
        self, slot: int, number: int, operation: int, root: int, message: int, when: int, given: Given, tensors: Any
    ) -> Given:
        if operation in _MESSAGES and message == NO_MESSAGE:
            message = self._groups.last_in_bundle(slot)
            if message == NO_MESSAGE:
                return None
        found = list(tensors_in(tensors))
        if when == PassedWhen.ISSUED:
            outputs = slot, number, operation, root, message, given, [weakref.ref(tensor) for tensor in found]
            if self._groups.keep_in_bundle(slot, outputs):
                return None
        passing = self._passed.passing(slot, number, operation, root, message)
        if passing is None:
            return None
        came_out = when != PassedWhen.GOES_IN
        late = [tensor for tensor in found if is_on_device(tensor)]
        if late:
            return self._read(passing, came_out, given, late)
        look = look_at(found)
        if look.high == NOT_FINITE:
            known = (given if isinstance(given, PassedLook) else NOTHING_LOOKED) if came_out else look
            self._passed.note(slot, number, operation, root, message, came_out, *known, found)
        return look

    def _read(self, passing: NotedOperation, came_out: bool, given: Given, tensors: Sequence[torch.Tensor]) -> Given:
        readings = self._rows.passed_on(tensors[0].device)
        if readings is None:
            self._fields[HeadField.PASSED_UNSEEN] = seal(1)
            return None
        self._collect(readings)
        found = readings.read(tensors, None)
        if found is None:
            return None
        reading, read = found
        about = [(CODES.get(tensor.dtype, 0), tensor.numel()) for tensor in read]
        reading.about = _LateValues(passing, came_out, self._passed.where(), given, about)
        return reading

    def _bundle_ended(self, outputs: tuple[Any, ...]) -> None:
        """Somebody has waited for the bundle in which this was issued."""
        slot, number, operation, root, message, given, refs = outputs
        alive = [tensor for ref in refs if (tensor := ref()) is not None]
        if alive:
            self.look(slot, number, operation, root, message, PassedWhen.CAME_OUT, given, alive)

    # -- numbers that have come ---------------------------------------------------------------------------------

    def collect(self) -> None:
        """Tell of what is not finite among the numbers that have come. Never waits."""
        buffer = self._rows.device_buffer
        if buffer is not None:
            self._collect(buffer.passed)

    def settle(self) -> bool:
        """Whether all numbers have come, and were told of. Never waits."""
        buffer = self._rows.device_buffer
        if buffer is None:
            return True
        buffer.passed.flush()
        self._collect(buffer.passed)
        return not buffer.passed.outstanding

    def _collect(self, readings: PassedReadings) -> None:
        come = self._held + readings.collect()
        if readings.unseen:
            self._fields[HeadField.PASSED_UNSEEN] = seal(1)
        self._held = []
        for reading in come:
            about: _LateValues | ClosedMask | None = reading.about
            if about is None:  # an error came in between
                continue
            if isinstance(about, ClosedMask):
                self._masks.note(about)
            elif isinstance(about.given, PassedReading) and about.given.missing and not about.given.is_lost:
                self._held.append(reading)
            else:
                self._tell(reading, about)

    def _tell(self, reading: PassedReading, about: _LateValues) -> None:
        numbers = reading.numbers
        assert numbers is not None
        given = (about.given if about.came_out else reading) or NOTHING_LOOKED
        look = _look_of(given) if isinstance(given, PassedReading) else given
        bad = [
            (flags, *tensor)
            for (*_, meta), tensor in zip(numbers, about.tensors, strict=True)
            if (flags := meta & 0xFF)
        ]
        worst = max(bad, key=lambda each: bool(each[0] & NonFinite.NAN))
        self._passed.tell(about.passing, about.came_out, look, *worst, about.where)


def _look_of(reading: PassedReading) -> PassedLook:
    """As `look_at`."""
    found = NOTHING_LOOKED
    for (_, high, meta), (code, _) in zip(reading.numbers or (), reading.about.tensors, strict=False):
        if meta & 0xFF:
            return PassedLook(NOT_FINITE, code)
        if found.high < 0 or (found.dtype == code and found.high < high):
            found = PassedLook(high, code)
    return found
