"""What only a comparison of ranks can judge: tensors that pass between them, and hashes of their replicas."""

from __future__ import annotations

from enum import IntFlag

from .read_tensors import ReducedElement
from .run_position import RankEvent

MOST_PASSED, MOST_PASSED_ALIKE = 512, 32
"""A rank sends so many PassedTensor in all, and of one operation with one peer in one group, of one size: a metric that
is nan leaves room for others. It may have seen more."""


class PassedTensor(RankEvent, frozen=True, tag="passed"):
    """A tensor that went into a collective, a send or a receive, or came out of it, and was not finite."""

    operation: str
    """As in core/recorder/group_table.py: `all_reduce`, `recv`."""
    group: str
    members: str
    """Ranks as text, `0-6:2,7`; "" is unknown."""
    number: int
    """Counts the collectives of its group; for a message, those between the same sender and receiver with its tag."""
    peer: int = -1
    """Rank in the job of the root, or of whom it is sent to or received from; -1: none, or not known."""
    tag: int = 0
    came_out: bool = False
    """False: it went in."""
    value: str = "nan"
    """`nan`, `+inf`, `-inf`, `inf`"""
    dtype: str = ""
    elements: int = 0
    given: str = ""
    """What this rank has put in: `finite`, `not finite`; "": nothing, or it was not inspected."""
    given_max: float | None = None
    """abs max of that, where it was finite."""
    element: str = ""
    """Which elements are not finite, in words; "" if it was not read again: on a device, or where one of its kind
    was reported before."""
    reduced: ReducedElement | None = None
    """In the batch of `--explain N`, of what came out."""


class HashFlag(IntFlag):
    """What happened to a tensor since it was hashed before."""

    REPLACED = 1
    """It is another object, or the first."""
    WRITTEN = 2
    """It was written in place, as far as torch's version counts that."""


class ReplicaHashes(RankEvent, frozen=True, tag="hashes"):
    """Hashes of the weights and buffers that a rank holds whole, when a batch of a root began, or at the end.

    Ranks that hold replicas have equal hashes. Shards have none.
    """

    table: int
    """Counts the tables of a root from 1."""
    hashes: bytes
    """uint32, little-endian, one for each line of the table."""
    flags: bytes
    """`HashFlag`, one byte for each."""
    tensors: list[str] = []
    """The table, where it is a new one: lines such as `w fc1.weight float32 [4, 4]`; `b` is a buffer."""


SharedEvent = PassedTensor | ReplicaHashes
