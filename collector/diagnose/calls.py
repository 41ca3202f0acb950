"""The module calls of one forward: how they nest, and which tensors they were handed and returned.

Frames are in the order in which calls returned, so a call's children are the run of deeper frames right before it. Two
rows of one forward with the same value index are about the same tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from ...core.frames import Frame, Row, is_inside

_SYNCHRONISED = "SyncBatchNorm"


class Calls:
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
    def around(cls, frames: list[Frame], frame: Frame) -> Calls:
        """The calls around `frame`: those of its forward, or of its recomputed stretch."""
        if frame.phase != "recompute":
            return cls(other for other in frames if other.phase == "forward")
        position = frames.index(frame)
        start, end = position, position + 1
        while start and frames[start - 1].phase == "recompute":
            start -= 1
        while end < len(frames) and frames[end].phase == "recompute":
            end += 1
        return cls(frames[start:end])

    def parent(self, frame: Frame) -> Frame | None:
        """The call around this one; None if it has not returned or is not watched."""
        found = self._parents.get(frame.index)
        return found if found is not None and found.module == frame.parent else None

    def children(self, frame: Frame) -> list[Frame]:
        """The calls directly inside this one."""
        return self._children[frame.index]

    def previous_sibling(self, frame: Frame) -> Frame | None:
        """The last call of the same parent before this one."""
        return next(self.older_siblings(frame), None)

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
        for frame in self.frames:
            if frame.index >= before:
                return None
            for row in frame.outputs:
                if row.value == value >= 0:
                    return frame, row
        return None

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
