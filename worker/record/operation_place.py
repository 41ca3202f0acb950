"""An operation of a process group that has begun, and the kinds of calls that begin or end one."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from .float_formats import CODES
from .group_messages import NO_MESSAGE, GroupSlot


class GroupCall(IntEnum):
    """The kind of a method of a process group, or of a work."""

    COLLECTIVE = 0
    P2P = 1
    BARRIER = 2
    """A collective that has ended when the call returns, and that the group's own counter counts by its messages."""
    WAIT = 3
    BLOCK = 4
    """A wait of the current stream: the host goes on."""


@dataclass
class OperationPlace:
    """An operation that has begun."""

    slot: GroupSlot
    number: int
    message: int = NO_MESSAGE
    """The result of `GroupMessages.begun`."""
    operation: int = 0
    root: int = -1
    given: tuple[int, int] = (-1, 0)
    """passed.Look"""
    late: Any = None
    """The result of LatePassed.read for the inputs."""
    outputs: list[weakref.ref[Any]] = field(default_factory=list)
    """Those of its output tensors that can be read."""
    before: tuple[int, int] = (0, 0)
    """Of a message: what the slot had of the one before it (P2P_WHAT, P2P_ELEMENTS)."""
    is_counted: bool = False
    """Of a message: GroupMessages has counted it."""


def described(tensor: Any) -> tuple[int, int]:
    """Code of a tensor's dtype, and its elements; (0, 0) for None."""
    return (CODES.get(tensor.dtype, 0), tensor.numel()) if tensor is not None else (0, 0)
