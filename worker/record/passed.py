"""Inputs and outputs of collectives, sends and receives that are not finite.

Tensors are read when the operation begins and after the script has waited for it: those in host memory by worker/
native/group_look.c or `look_at`, others by LatePassed. Finite tensors are not recorded. These records never raise an
alarm.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import torch

from ...core.events.across_ranks import MOST_PASSED, MOST_PASSED_ALIKE, PassedTensor
from ...core.events.run_position import RunPosition
from ...core.frames import RowKind
from ...core.recorder.group_table import OPERATIONS
from ...core.recorder.layout import HeadField, seal
from ...core.signal_errors import from_outside
from ...core.values import DTYPE_NAMES, NonFinite, decode, name_of
from ..device.device import is_on_device, without_modes
from ..device.passed_readings import PassedReading, PassedReadings
from .bad_elements import NO_LOOK, CloserLook, KeptSummands
from .float_formats import CODES, FLOATS, FloatFormat
from .group_messages import NO_MESSAGE, GroupSlot, message_of
from .late_masks import ClosedMask, LateMasks
from .progress import RunProgress
from .rows import RowWriter
from .tensor_stats import TensorStats, in_memory, measure

NOT_LOOKED, NOT_FINITE = -1, -2
_ENCODINGS = {CODES[dtype]: kind.meta >> 8 & 0xFF for dtype, kind in FLOATS.items()}


class PassedLook(NamedTuple):
    """The bits of the largest number in some tensors, or NOT_LOOKED or NOT_FINITE, and the code of its dtype."""

    high: int
    dtype: int


NOTHING_LOOKED = PassedLook(NOT_LOOKED, 0)


def look_at(tensors: Any) -> PassedLook:
    """Read the tensors of a list, or of lists in it. The same as worker/native/group_look.c."""
    read = ((tensor, _in_host_memory(tensor)) for tensor in tensors_in(tensors))
    return _look_of((_measured(tensor), place[2].code) for tensor, place in read if place is not None)


def _look_of(readings: Iterable[tuple[tuple[int, ...], int]]) -> PassedLook:
    """Of (low, high, meta, ...) and the code of the dtype, of each tensor."""
    found = NOTHING_LOOKED
    for (_, high, meta, *_), code in readings:
        if meta & 0xFF:
            return PassedLook(NOT_FINITE, code)
        if found.high == NOT_LOOKED or (found.dtype == code and found.high < high):
            found = PassedLook(high, code)
    return found


def refs_to(tensors: Any) -> list[weakref.ref[Any]]:
    """Weak references to the tensors that can be read once they are written."""
    return [weakref.ref(tensor) for tensor in tensors_in(tensors) if is_on_device(tensor) or in_memory(tensor)]


def tensors_in(tensors: Any) -> Iterator[torch.Tensor]:
    """Those of a list, or of lists in it."""
    if tensors.__class__ is list:
        for each in tensors:
            yield from tensors_in(each)
    elif isinstance(tensors, torch.Tensor):
        yield tensors


class NotedOperation(NamedTuple):
    """An operation, as GroupTable has noted it."""

    group: GroupSlot
    operation: int
    number: int
    peer: int
    """Rank in the job; -1: none, or not known."""
    tag: int


@dataclass(eq=False, repr=False)
class PassedValues:
    """Records inputs and outputs that are not finite."""

    _progress: RunProgress
    summands: KeptSummands = field(default_factory=KeptSummands)

    def __post_init__(self) -> None:
        self._told: defaultdict[tuple[object, ...], int] = defaultdict(int)
        self._all = 0

    def note(
        self,
        slot: int,
        number: int,
        operation: int,
        root: int,
        message: int,
        came_out: bool,
        high: int,
        dtype: int,
        tensors: Any,
    ) -> None:
        """Record inputs or outputs of which some are not finite. `high` and `dtype` are those of a `PassedLook`."""
        passing = self.passing(slot, number, operation, root, message)
        found = [(t, _measured(t).meta & 0xFF) for t in tensors_in(tensors) if _in_host_memory(t) is not None]
        bad = [(tensor, flags) for tensor, flags in found if flags]
        if passing is not None and bad:
            tensor, flags = max(bad, key=lambda each: bool(each[1] & NonFinite.NAN))
            look = PassedLook(high, dtype)
            closer = partial(self.summands.look_closer, tensor, came_out)
            self.report(passing, came_out, look, flags, CODES.get(tensor.dtype, 0), tensor.numel(), closer=closer)

    def passing(self, slot: int, number: int, operation: int, root: int, message: int) -> NotedOperation | None:
        """The operation of a place in the table; None if its group is gone."""
        group = self._progress.groups.slot_at(slot)
        if group is None:
            return None
        if message < 0:
            return NotedOperation(group, operation, number, group.member(root), 0)
        number, member, tag = message_of(message)
        return NotedOperation(group, operation, number, group.member(member), tag)

    def report(
        self,
        passing: NotedOperation,
        came_out: bool,
        given: PassedLook,
        flags: int,
        dtype: int,
        elements: int,
        where: RunPosition | None = None,
        closer: Callable[[], CloserLook] = lambda: NO_LOOK,
    ) -> None:
        """Record it, unless enough of its kind were recorded. `where`: its place in the run; None: now."""
        with self._progress.lock:  # DDP reduces in the threads of autograd
            self._report(passing, came_out, given, flags, dtype, elements, where, closer)

    def _report(
        self,
        passing: NotedOperation,
        came_out: bool,
        given: PassedLook,
        flags: int,
        dtype: int,
        elements: int,
        where: RunPosition | None,
        closer: Callable[[], CloserLook],
    ) -> None:
        group, operation, number, peer, tag = passing
        key = (operation, group.number, peer, came_out, dtype, elements)
        if self._told[key] >= MOST_PASSED_ALIKE or self._all >= MOST_PASSED:
            return
        element, reduced = closer() if self.summands.is_on or not self._told[key] else NO_LOOK
        self._told[key] += 1
        self._all += 1
        high = given.high
        went_in = "" if high == NOT_LOOKED else "not finite" if high == NOT_FINITE else "finite"
        largest = decode(high, _ENCODINGS[given.dtype]) if high >= 0 and given.dtype in _ENCODINGS else None
        self._progress.recorder.append(
            PassedTensor(
                where or self._progress.where(),
                OPERATIONS[operation],
                group.name,
                group.members,
                number,
                peer,
                tag,
                came_out=bool(came_out),
                value=name_of(NonFinite(flags)),
                dtype=DTYPE_NAMES[dtype],
                elements=elements,
                given=went_in,
                given_max=largest,
                element=element,
                reduced=reduced,
            )
        )


def _in_host_memory(tensor: torch.Tensor) -> tuple[int, int, FloatFormat] | None:
    return None if is_on_device(tensor) else in_memory(tensor)


def _measured(tensor: torch.Tensor) -> TensorStats:
    # called from within a collective, where the script's own modes are on
    numbers = without_modes(measure, tensor)
    return numbers if numbers.content is RowKind.MEASURED else TensorStats(0, 0, 0, numbers.kind)


# Tensors in a device's memory that pass between ranks: read on the device, and recorded when the numbers arrive.
#
# A collective or a message that is issued from a stream is read in that stream before it, and again when the script has
# waited for it. A backend that has synchronised the stream itself, as NCCL does, returns no work: the outputs are then
# read at once. Messages in a bundle have one work for all, and are read when the script has waited for that work.


_MESSAGES = {OPERATIONS.index("send"), OPERATIONS.index("recv")}


class PassedWhen(IntEnum):
    """When tensors are read."""

    GOES_IN = 0
    CAME_OUT = 1
    """The script has waited for the work."""
    ISSUED = 2
    """The call has returned, and the script cannot wait for this operation alone."""


Given = PassedReading | PassedLook | None
"""The reading of an operation's inputs, as far as it is known."""


class _LateValues(NamedTuple):
    """The operation and the tensors of a reading."""

    passing: NotedOperation
    came_out: bool
    where: RunPosition
    given: Given
    tensors: list[tuple[int, int]]
    """(code of the dtype, elements) of each."""
    closer: list[CloserLook]
    """At each, in the batch of --explain N."""


@dataclass(eq=False, repr=False)
class LatePassed:
    """Reads inputs and outputs in the memory of a device, and hands those that are not finite to PassedValues."""

    _passed: PassedValues
    _rows: RowWriter
    _progress: RunProgress
    _masks: LateMasks
    """Gets the readings of masks, which are read in the same way."""

    def __post_init__(self) -> None:
        self._groups, self._fields = self._progress.groups, self._progress.fields
        self._failed = False
        self._groups.messages.on_bundle = self._bundle_ended

    def send_before(self) -> None:
        """A collective or message begins: send the numbers that were read before. Never raises."""
        if self._rows.device_buffer is None or self._failed:
            return
        try:
            with self._progress.lock:
                without_modes(self._rows.send_before_a_collective)
        except Exception as error:
            if from_outside(error):
                raise
            self._fails("device", error)

    def read(
        self, slot: int, number: int, operation: int, root: int, message: int, when: int, given: Given, tensors: Any
    ) -> Given:
        """Read the inputs or outputs of an operation that has a place in the table.

        `given` is the result of this method for the inputs.
        """
        if self._failed:
            return None
        try:
            with self._progress.lock:
                return self._look(slot, number, operation, root, message, when, given, tensors)
        except Exception as error:
            if from_outside(error):
                raise
            self._fails("what passes", error)
            return None

    def _fails(self, part: str, error: Exception) -> None:
        self._failed = True
        self._fields[HeadField.PASSED_UNSEEN] = seal(1)
        self._progress.faults.record(part, error)

    def _look(
        self, slot: int, number: int, operation: int, root: int, message: int, when: int, given: Given, tensors: Any
    ) -> Given:
        # a message of a bundle has no work of its own (GroupMessages.begun): this call's is the one that was begun last
        if operation in _MESSAGES and message == NO_MESSAGE:
            message = self._groups.messages.last_in_bundle(slot)
            if message == NO_MESSAGE:
                return None
        found = list(tensors_in(tensors))
        if when == PassedWhen.ISSUED:
            # weak: the bundle may never be waited for, and must not keep the tensors
            outputs = slot, number, operation, root, message, given, [weakref.ref(tensor) for tensor in found]
            if self._groups.messages.keep_in_bundle(slot, outputs):
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
        closer = [self._passed.summands.look_closer(tensor, came_out) for tensor in read if self._passed.summands.is_on]
        reading.about = _LateValues(passing, came_out, self._progress.where(), given, about, closer)
        return reading

    def _bundle_ended(self, outputs: tuple[Any, ...]) -> None:
        """The script has waited for the bundle in which this was issued."""
        slot, number, operation, root, message, given, refs = outputs
        alive = [tensor for ref in refs if (tensor := ref()) is not None]
        if alive:
            self.read(slot, number, operation, root, message, PassedWhen.CAME_OUT, given, alive)

    # -- numbers that have arrived ------------------------------------------------------------------------------

    def collect(self) -> None:
        """Record the numbers that have arrived and are not finite. Never waits."""
        buffer = self._rows.device_buffer
        if buffer is not None:
            self._collect(buffer.passed)

    def settle(self) -> bool:
        """Whether all numbers have arrived and were recorded. Never waits."""
        buffer = self._rows.device_buffer
        if buffer is None:
            return True
        buffer.passed.flush()
        self._collect(buffer.passed)
        return not buffer.passed.outstanding

    def _collect(self, readings: PassedReadings) -> None:
        for reading in tuple(readings.collect()):
            about: _LateValues | ClosedMask | None = reading.about
            if about is None:  # an error occurred in between
                readings.unseen = True
            elif isinstance(about, ClosedMask):
                self._masks.note(about)
            elif isinstance(about.given, PassedReading) and about.given.missing and not about.given.is_lost:
                # two streams may deliver an operation's outputs before its inputs: the event needs both
                continue
            else:
                self._tell(reading, about)
            if reading in readings.arrived:  # else a handler that communicates has dealt with it meanwhile
                readings.arrived.remove(reading)
        if readings.unseen:
            self._fields[HeadField.PASSED_UNSEEN] = seal(1)

    def _tell(self, reading: PassedReading, about: _LateValues) -> None:
        numbers = reading.numbers
        assert numbers is not None
        given = (about.given if about.came_out else reading) or NOTHING_LOOKED
        if isinstance(given, PassedReading):
            codes = (code for code, _ in given.about.tensors)
            given = _look_of(zip(given.numbers or (), codes, strict=False))
        read = zip(numbers, about.tensors, strict=True)
        bad = [(flags, *tensor) for (*_, meta), tensor in read if (flags := meta & 0xFF)]
        worst = max(bad, key=lambda each: bool(each[0] & NonFinite.NAN))
        closer = next((look for look in about.closer if look.element), NO_LOOK)
        self._passed.report(about.passing, about.came_out, given, *worst, about.where, lambda: closer)
