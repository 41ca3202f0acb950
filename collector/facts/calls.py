"""The module calls of one forward: how they nest, and which tensors they received and returned.

Frames are in the order in which calls returned, so a call's children are the run of deeper frames right before it. Two
rows of one forward with the same value index are about the same tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import NamedTuple

from ...core.frames import Frame, FramePhase, Row, RowKind, is_inside

_SYNCHRONISED = "SyncBatchNorm"


class FrameCalls:
    """The frames of one forward, or of one recomputed stretch of a forward."""

    def __init__(self, frames: Iterable[Frame]) -> None:
        self.frames = sorted(frames, key=lambda frame: frame.index)
        self._parents: dict[int, Frame] = {}
        self._children: dict[int, list[Frame]] = {}
        open_: list[Frame] = []
        for frame in self.frames:
            children: list[Frame] = []
            while open_ and is_inside(open_[-1], frame):
                children.append(open_.pop())
            self._children[frame.index] = children[::-1]
            for child in children:
                self._parents[child.index] = frame
            open_.append(frame)

    @classmethod
    def around(cls, frames: list[Frame], frame: Frame) -> FrameCalls:
        """The calls around `frame`: those of its forward, or of its recomputed stretch."""
        if frame.phase != FramePhase.RECOMPUTE:
            return cls(other for other in frames if other.phase == FramePhase.FORWARD)
        position = frames.index(frame)
        start, end = position, position + 1
        while start and frames[start - 1].phase == FramePhase.RECOMPUTE:
            start -= 1
        while end < len(frames) and frames[end].phase == FramePhase.RECOMPUTE:
            end += 1
        return cls(frames[start:end])

    def parent(self, frame: Frame) -> Frame | None:
        """The call around this one; None if it has not returned or is not watched."""
        found = self._parents.get(frame.index)
        return found if found is not None and found.module == frame.parent else None

    def children(self, frame: Frame) -> list[Frame]:
        """The calls directly inside this one."""
        return self._children[frame.index]

    def older_siblings(self, frame: Frame) -> Iterator[Frame]:
        """The calls of the same parent before this one, latest first."""
        for earlier in reversed(self.frames):
            if earlier.index >= frame.index:
                continue
            if earlier.depth < frame.depth:
                return
            if earlier.depth == frame.depth:
                yield earlier

    @property
    def exchange(self) -> bool:
        """Whether ranks exchange activations: the model is spread over ranks.

        They do if a call without children issues collectives, or if a module's own code does after its first child.
        FSDP gathers before the first child. SyncBatchNorm's collectives exchange no activations.
        """
        for frame in self.frames:
            children = self.children(frame)
            if not children and frame.collectives > 0 and frame.cls != _SYNCHRONISED:
                return True
            for earlier, later in pairwise(children):
                if 0 <= earlier.seq < begun(later):
                    return True
            if children and 0 <= children[-1].seq < frame.seq:
                return True
        return False

    def producer(self, value: int, before: int) -> tuple[Frame, Row] | None:
        """The first call to return this tensor, among the frames before index `before`."""
        earlier = takewhile(lambda frame: frame.index < before, self.frames)
        return next(((frame, row) for frame in earlier for row in frame.outputs if row.value == value >= 0), None)

    def outermost_with_input(self, frame: Frame, bad: Row) -> Frame:
        """The outermost call around `frame` that was handed the very same tensor."""
        holder = frame
        while (parent := self.parent(holder)) is not None and takes(parent, bad.value):
            holder = parent
        return holder


def takes(frame: Frame, value: int) -> bool:
    """Whether this tensor is among the call's arguments."""
    return value >= 0 and any(row.value == value for row in frame.inputs)


def returns(frame: Frame, value: int) -> bool:
    """Whether this tensor is among what the call returned."""
    return value >= 0 and any(row.value == value for row in frame.outputs)


def begun(frame: Frame) -> int:
    """How many collectives had been issued when the call began; -1 if unknown."""
    return frame.seq - frame.collectives if frame.seq >= 0 else -1


# Which calls and which code can have used a tensor that a call returned, from the frames of the forward.


@dataclass
class TensorUsers:
    """The possible users of a tensor."""

    calls: list[Frame] = field(default_factory=list)
    """Calls that received it; the outermost of nested calls."""
    own_code: list[str] = field(default_factory=list)
    """Modules whose own code may have used it."""
    returned: bool = False
    """The model has returned it."""
    unwatched: bool = False
    """It was handed to a module that is not watched, whose users are unknown."""
    value: int = -1
    """Value index of the tensor; of several tensors, the last."""
    takers: list[Frame] = field(default_factory=list)
    """Calls that were handed what own code has made. What that code made of the tensor may be among it."""
    explained: bool = True
    """Whether own code, wherever it made a tensor, had another one to work on: one that no call was handed."""

    def add(self, own: OwnCodeResult | None) -> None:
        """Add what own code has made; None: nothing that is known."""
        self.takers += own.takers if own is not None else []
        self.explained &= own is not None and own.explained

    @property
    def only_call(self) -> Frame | None:
        """The only call that can have used it; None if anything else can have."""
        return None if self.own_code else self._call

    @property
    def likely_call(self) -> Frame | None:
        """The only call that was handed it, where own code had something else to work on.

        `x + self.act(self.norm(x))`: `norm` was handed x, and own code has what `act` returned. It may use x, too.
        """
        return self._call if self.explained else None

    @property
    def _call(self) -> Frame | None:
        return self.calls[0] if len(self.calls) == 1 and not self.returned and not self.unwatched else None

    @property
    def scope(self) -> str:
        """The smallest module that holds all of the users."""
        if self.returned or self.unwatched:
            return ""
        names = [name for call in self.calls for name in (call.parent or "", call.module)]
        return common([*names, *self.own_code])


def users_of(calls: FrameCalls, made: list[Frame], roles: list[str]) -> TensorUsers:
    """The possible users of these outputs of these calls."""
    users = TensorUsers(unwatched=not made)
    for call in made:
        for row in call.outputs:
            if row.role not in roles:
                continue
            users.value = row.value
            if row.value >= 0:
                _add_users(calls, users, call, row.value)
                _add_maker(calls, users, call, row.value)
            else:
                users.unwatched = True
    return users


def users_inside(calls: FrameCalls, user: Frame, value: int) -> TensorUsers:
    """The possible users, inside a call, of a tensor that the call received."""
    inner = TensorUsers([child for child in calls.children(user) if _uses(child, value)], value=value)
    own = _own_code(calls, user, -1)
    if not inner.calls or own is not None:
        inner.own_code.append(user.module)
        inner.add(own)
    return inner


def _add_users(calls: FrameCalls, users: TensorUsers, call: Frame, value: int) -> None:
    """Add the users in the module that made the call, and in each module around it that returned the tensor."""
    inside, scope = call, calls.parent(call)
    while scope is not None:
        users.calls += [child for child in calls.children(scope) if child.index > inside.index and _uses(child, value)]
        own = _own_code(calls, scope, inside.index)
        if own is not None:
            users.own_code.append(scope.module)
            users.add(own)
        if not returns(scope, value):
            return
        inside, scope = scope, calls.parent(scope)
    if inside.parent is None:
        users.returned = True
    else:
        users.unwatched = True
        outermost = (other for other in calls.frames if calls.parent(other) is None)
        users.calls += [other for other in outermost if other.index > inside.index and _uses(other, value)]


def _add_maker(calls: FrameCalls, users: TensorUsers, call: Frame, value: int) -> None:
    """Add the call itself if it may have used its output: it has returned something else that it made.

    `weights = self.softmax(scores); return self.out(weights @ v), weights`: with nothing else returned, what it made of
    the tensor would lead nowhere.
    """
    handed = _values(call.inputs)
    if any(row.value != value and _can_lead_on(row) and row.value not in handed for row in call.outputs):
        users.own_code.append(call.module)
        users.add(_own_code(calls, call, -1))


class OwnCodeResult(NamedTuple):
    """A module's own code made a tensor between its calls; `takers` received it, `explained` as in TensorUsers."""

    takers: list[Frame]
    explained: bool


def _own_code(calls: FrameCalls, scope: Frame, since: int) -> OwnCodeResult | None:
    known, children, explained = _values(scope.inputs), calls.children(scope), True
    free: list[int] = []
    takers: list[Frame] = []
    for child in children:
        if child.index > since and any(_can_lead_on(row) and row.value not in known for row in child.inputs):
            takers.append(child)
            explained &= bool(free)
        known |= _values(child.outputs)
        returned = [row.value for row in child.outputs if _can_lead_on(row) and row.value >= 0]
        free += [value for value in returned if not any(_uses(other, value) for other in children)]
    made = any(_can_lead_on(row) and row.value not in known for row in scope.outputs)
    explained &= bool(free) or not made
    return OwnCodeResult(takers, explained) if takers or made else None


def _uses(call: Frame, value: int) -> bool:
    return takes(call, value) and not returns(call, value)


def _values(rows: list[Row]) -> set[int]:
    return {row.value for row in rows if row.value >= 0}


def _can_lead_on(row: Row) -> bool:
    if row.kind in (RowKind.NONE, RowKind.NOT_A_TENSOR, RowKind.EMPTY):
        return False
    return row.dtype.startswith(("float", "bfloat", "complex", "unknown"))


def common(names: list[str]) -> str:
    """The smallest module that has all of these in it.

    >>> common(["a.b", "a.b.c", "a"])
    'a'
    """
    parts = [name.split(".") if name else [] for name in names]
    shared = takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))
    return ".".join(level[0] for level in shared)
