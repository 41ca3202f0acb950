"""Findings about a hang, and the ranks' positions behind them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from ...core.events.agent_events import RankLook
from ...core.events.rank_standing import GroupState, IssuedOperation, StackLine
from ...core.recorder.group_table import members_of
from ...core.recorder.layout import EARLIER_GROUPS
from ...core.recorder.operation_mismatch import IssuedKind, group_in, standing_at
from ...core.recorder.stalls import is_users
from ...core.text import ranks_text
from ...core.verdicts import Certainty
from ..facts.words import OUTSIDE, doing


@dataclass(frozen=True)
class HangPrognosis:
    """Whether a job that stands still can go on by itself."""

    kind: Literal["cannot go on", "all wait", "may go on"]
    """`cannot go on`: each rank waits for others, is stopped, or has left, and what they wait for never comes. `all
    wait`: as far as can be seen, and it may still come. `may go on`: a rank stands in code of its own, or was not
    seen."""
    free: list[int] = field(default_factory=list)
    """The ranks that may go on."""


@dataclass(frozen=True)
class HangFinding:
    """The finding of one round of asking all ranks."""

    statement: str
    certainty: Certainty
    ranks: list[int] = field(default_factory=list)
    """Those that the others wait for; [] where they are unknown, or there are none."""
    next: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    cause: str = ""
    """`did not come`, `left early`, `mismatch`, `order`, `all came`, `does not end`, `stopped`; "" where none of them
    is known."""
    may_end: bool = True
    """Whether the job may be ended for it at all: some rank waits for others, and none goes on."""
    outlook: HangPrognosis = field(default_factory=lambda: HangPrognosis("may go on"))
    instead: list[int] = field(default_factory=list)
    """Ranks that may be at fault in place of `ranks`."""

    @property
    def rank(self) -> int | None:
        """The only rank that can be at fault; None where several can be, or none."""
        return self.ranks[0] if len(self.ranks) == 1 and not self.instead else None

    @property
    def others(self) -> list[int]:
        """The ranks that can be at fault, where there are several."""
        return sorted([*self.ranks, *self.instead]) if self.rank is None else []


# What one rank was doing when it was asked: waiting for others, and in what, or something of its own. Pure.

_COLLECTIVES = "/torch/distributed/distributed_c10d.py"
_DDP = "/torch/nn/parallel/distributed.py"
_AROUND_COLLECTIVES = (
    _COLLECTIVES,
    "/torch/distributed/c10d_logger.py",
    "/torch/distributed/_functional_collectives.py",
    "/torch/distributed/utils.py",
    "/torch/distributed/fsdp/",
    _DDP,
)
"""Where torch calls collectives from, of which some have no function in Python."""
_DISPATCHER = ("/torch/_ops.py", "/torch/_library/")
"""torch's calls of an operation, between C++ and the function in Python that means it."""
_OWN_WORDS = frozenset({"wrapper", "inner", "decorate_context", "_fn", "__call__"})
"""Functions of torch around a collective that say nothing."""
_NAMES = {"wait_tensor": "a functional collective", "__new__": "a collective"}
"""What a function of torch around a collective is called in a sentence, where its own name says little."""
_WAITS = (".wait(", "wait_tensor(", "synchronize(", "barrier(", "wait_for(")
_WAITS_FOR_DEVICE = (".item(", ".cpu(", ".tolist(", ".numpy(", "cuda.synchronize(")
"""Calls that a rank on a GPU stands in while its device waits for other ranks. In host memory they take no time."""
_READS_DEVICE = re.compile(
    r"\.(to|cuda|nonzero|argwhere|any|all|equal|allclose|unique|masked_select|synchronize|wait|copy_)\("
    r"|\b(bool|float|int|print|len|str|repr|min|max|sum|sorted|format)\(|\b(if|while|assert|not|and|or|in)\b|\[|\bf[\"']"
)
"""What a line may have that waits for the device, where that is known to wait for others."""
_IS_OTHER_WAIT = re.compile(
    r"\b(sleep|recv|read|acquire|join|select|poll|connect|accept|input|communicate|system|run|get|open|write|flush|save|load"
    r"|request|urlopen|wait_for|result)\w*\("
)
_NOT_FOR_DEVICE = ("/torch/utils/data/", "/torch/serialization.py", "/torch/multiprocessing/", "/torch/distributed/")
"""Where torch waits for something else."""
DEVICE = "a call that synchronizes with the device"
BACKWARD = "the backward's reduction of gradients"
MESSAGE = "a send or a receive"
"""The rank waits for one of several that it has begun; its table describes the last of them."""
QUIET = 0.5
"""Share of a core. gloo and NCCL wait without using one; what computes uses all of it."""
_COMPUTES = 0.1
"""Share of a core, on a machine where several processes share one."""


Kind = Literal["waits", "may wait", "stopped", "away", "left", "unknown"]
_STOPPED = "stopped (by SIGSTOP, Ctrl-Z or a debugger)"


@dataclass(frozen=True)
class RankPosition:
    """Where a rank stood, by its stack, and what it shows of its process groups."""

    kind: Kind
    """`waits`: in a collective or its wait. `may wait`: for its device, or in a backward that uses no processor, which
    is what waiting for the gradients of others looks like. `stopped`: by a signal or a debugger. `away`: anything else,
    of its main thread; another thread may wait for others. `left`: it has ended with exit code 0. `unknown`: no stack
    could be had."""
    doing: str = ""
    """Phase and module, as its recorder says: `in the forward of batch 4, in `net` (Net)`."""
    operation: str = ""
    """`all_reduce`, `wait`, `BACKWARD`, `DEVICE`, `MESSAGE`; "" if it does not wait."""
    line: str = ""
    """`train.py:41 in main: dist.all_reduce(loss)`, the innermost line that is the user's own; "" is unknown."""
    groups: Sequence[GroupState] = ()
    failed: bool = False
    """It has ended, and where it has raised is where it waited."""

    @property
    def waiting(self) -> bool:
        """Whether it waits for others, as far as can be seen."""
        return self.kind in ("waits", "may wait")

    @property
    def what(self) -> str:
        """What it does, in words, the line first; "" if that is unknown."""
        if self.operation:
            return f"in {self.operation}"
        code = self.line.partition(": ")[2]
        return f"{self.what_short}: {code}" if code and self.kind != "stopped" else self.what_short

    @property
    def what_short(self) -> str:
        """The same without the code of the line: `at train.py:41 in main, after batch 4`."""
        if self.operation:
            return f"in {self.operation}"
        if self.kind == "stopped":
            return f"{_STOPPED}, {self.doing}"
        return f"at {self._at}, {self.doing.removeprefix(OUTSIDE)}" if ": " in self.line else self.doing

    @property
    def what_least(self) -> str:
        """Without where in the step that is: `at train.py:41 in main`; of a stopped rank, that it is stopped."""
        if self.operation or (self.kind != "stopped" and not self.place):
            return self.what_short
        return _STOPPED if self.kind == "stopped" else f"at {self._at}"

    @property
    def _at(self) -> str:
        """`train.py:41 in main`"""
        return self.line.partition(": ")[0]

    @property
    def place(self) -> str:
        """`train.py:41`, the file and the number of its line; "" is unknown."""
        return self._at.rpartition(" in ")[0]


def is_pending(groups: Iterable[GroupState]) -> bool:
    """Whether a rank's device waits for other ranks."""
    return any(group.pending for group in groups)


def has_left(look: RankLook) -> bool:
    """Whether a rank's process was gone after its script had ended: torchrun reports that when the others have ended.

    Had it failed, torchrun would have ended the others.
    """
    return look.phase == "finished" and look.state in ("", "Z", "X")


def computes(look: RankLook) -> bool:
    """Whether a rank that waits for nobody works, on a crowded node too: it is running, or has run."""
    if is_pending(look.groups) and position_of(look).kind == "waits":  # a host may spin while it waits for its device
        return False
    return look.busy >= _COMPUTES or look.state == "R"


def position_of(look: RankLook) -> RankPosition:
    """Classify one look.

    >>> position_of(RankLook(RunPosition(1, batch=4), 1, 60.0, "script", state="T")).kind
    'stopped'
    """
    does = ("leaving, " if look.phase in ("finished", "raised") else "") + doing(look)
    if look.moved and look.stack and look.phase not in ("finished", "raised"):
        does = "moving"  # where in its step that line was is not known
    operation, sure = ("", False) if look.state in ("T", "t") else _operation(look)
    if operation:
        kind: Kind = "waits" if sure else "may wait"
    else:
        kind = "stopped" if look.state in ("T", "t") else "away" if look.stack else "unknown"
    line = next((line for line in look.stack if is_users(line.shown)), look.stack[0] if look.stack else None)
    shown = line.shown.removeprefix(line.file.rpartition("/")[0] + "/") if line is not None else ""
    return RankPosition(kind, does, operation, shown, look.groups)


def _operation(look: RankLook) -> tuple[str, bool]:
    """(what it waits in, whether that is sure); ("", False) if it does not."""
    calls = [line for line in look.stack if not any(part in line.file for part in _DISPATCHER)]
    stack, device_waits = calls or look.stack, is_pending(look.groups)
    if not stack:
        return "", False
    for line in stack:
        if line.file.endswith(_COLLECTIVES) and not line.function.startswith("_") and line.function not in _OWN_WORDS:
            return line.function, True
        if not any(part in line.file for part in _AROUND_COLLECTIVES):
            break
    inner = stack[0]
    resting = look.state == "S" and look.busy < QUIET and not any("importlib" in line.file for line in stack)
    if resting and any(part in inner.file for part in _AROUND_COLLECTIVES):
        name = _NAMES.get(inner.function, inner.function.lstrip("_"))
        return ("DDP's own collective" if _DDP in inner.file else name), True
    if any(word in inner.text for word in _WAITS_FOR_DEVICE):
        return DEVICE, device_waits
    if inner.function == "_engine_run_backward" and (device_waits or (look.busy < QUIET and look.state != "R")):
        return BACKWARD, device_waits
    if device_waits and _may_wait_for_device(inner):
        return DEVICE, True
    if any(word in inner.text for word in _WAITS):
        placed = standing_at(look.groups)
        return MESSAGE if placed is not None and placed[1] < 0 else "wait", True
    return "", False


def _may_wait_for_device(inner: StackLine) -> bool:
    """Whether the innermost line is one that waits for the device when that waits."""
    if "/torch/" in inner.file:
        return not any(part in inner.file for part in _NOT_FOR_DEVICE)
    return bool(_READS_DEVICE.search(inner.text)) and not _IS_OTHER_WAIT.search(inner.text)


# Where ranks meet: one operation of one process group, which ranks stand in it, and which never began it. Pure.
#
# A collective's number is the same on all members of its group as long as they issue the same ones. So a member that
# has begun fewer than the number in which others wait did not come; and members that have begun different operations
# under one number do not match.


@dataclass(frozen=True)
class PendingOperation:
    """One operation in which at least one rank stands."""

    group: str
    """Name of the group."""
    members: tuple[int, ...]
    number: int
    operation: IssuedOperation | None
    """As the first rank that stands in it has begun it; None if that is not known any more."""
    waiting: list[int]
    missing: list[int]
    """Members that never began it."""
    untold: list[int]
    """Members whose position is unknown."""

    def text(self, world_size: int) -> str:
        """`all_reduce`, `all_reduce of group 1 (ranks 4-7)`, `send to rank 1`"""
        name = self.operation.operation if self.operation is not None and self.operation.operation else "a collective"
        if self.number < 0 and self.operation is None:  # torch has refused it
            return "a send or a receive"
        if self.number < 0 and self.operation is not None:
            whom = f"rank {self.peer}" if self.peer is not None else "any rank"
            return f"{name} {'to' if name == 'send' else 'from'} {whom}"
        return name + group_text(self.group, self.members, world_size)

    @property
    def peer(self) -> int | None:
        """The rank that it sends to or receives from; None if it is a collective, or any rank will do."""
        at = self.operation.peer if self.operation is not None else -1
        return self.members[at] if self.number < 0 and 0 <= at < len(self.members) else None


def group_text(name: str, members: Sequence[int], world_size: int) -> str:
    """` of group 1 (ranks 4-7)`; "" for the default group, which torch calls 0."""
    if len(members) < world_size:
        return f" of group {name} ({ranks_text(list(members))})"
    return f" of group {name} (all ranks)" if name != "0" else ""


def kind_text(kind: IssuedKind) -> str:
    """`all_reduce of 8 elements of float32`, `broadcast from the group's rank 0 of 3 elements of float32`"""
    operation, dtype, elements, root = kind
    text = operation
    if root >= 0:
        text += f" {'from' if operation in ('broadcast', 'scatter') else 'to'} the group's rank {root}"
    if elements >= 0:
        text += f" of {elements} element{'' if elements == 1 else 's'}"
    return text + (f" of {dtype}" if dtype else "")


def left_open(
    groups: Iterable[GroupState], tables: Mapping[int, Sequence[GroupState]], world_size: int
) -> tuple[GroupState, int] | None:
    """The collective of C++'s, such as DDP's, in which a waiting rank stands: the first that it has begun and another
    member has not. The table shows no end of these."""
    found = [(group, number) for group in groups if (number := _first_open(group, "issued", tables, world_size))]
    return min(found, key=lambda place: place[0].since_s, default=None)


def with_pending(tables: Mapping[int, Sequence[GroupState]], world_size: int) -> Mapping[int, Sequence[GroupState]]:
    """Add what a device cannot have completed where torch's recorder shows nothing, as with the backend nccl2.

    A device takes the collectives of a group in their order. All ranks' tables must note what C++ issues.
    """
    on_device = {(group.name, group.members) for groups in tables.values() for group in groups if group.phase == _GIVEN}
    if not on_device:
        return tables

    def seen(group: GroupState) -> GroupState:
        if group.pending is not None or (group.name, group.members) not in on_device:
            return group
        number = _first_open(group, _GIVEN, tables, world_size)
        return replace(group, pending=number, pending_s=group.since_s if number else 0.0)

    return {rank: [seen(group) for group in groups] for rank, groups in tables.items()}


_GIVEN = "on_device"


def _first_open(group: GroupState, phase: str, tables: Mapping[int, Sequence[GroupState]], world_size: int) -> int:
    """The first collective that the rank has begun and another member has not; 0 if there is none."""
    if group.phase != phase or group.pending is not None:
        return 0
    # nothing is known of a rank without a table
    counts = [begun_in(tables[rank], group) for rank in members_of(group.members, world_size) if tables.get(rank)]
    first = 1 + min((begun for begun in counts if begun is not None), default=group.begun)
    return first if first <= group.begun else 0


def meetings_of(
    tables: Mapping[int, Sequence[GroupState]], places: Mapping[int, tuple[GroupState, int]], world_size: int
) -> list[PendingOperation]:
    """The operations in which the ranks of `places` stand. `tables` has what each rank shows that is known."""
    found: dict[tuple[object, ...], PendingOperation] = {}
    for rank, (state, number) in sorted(places.items()):
        members = tuple(members_of(state.members, world_size))
        # each send and each receive is a meeting of its own
        key = (state.name, members, number, rank if number < 0 else None)
        if key in found:
            found[key].waiting.append(rank)
            continue
        meeting = found[key] = PendingOperation(state.name, members, number, _issued(state, number), [rank], [], [])
        if number < 0:
            _add_peer(meeting, rank, state, places)
            continue
        for member in members:
            begun = begun_in(tables[member], state) if member in tables else None
            if begun is None:
                meeting.untold.append(member)
            elif begun < number:
                meeting.missing.append(member)
    return list(found.values())


def operation_on_record(groups: Sequence[GroupState]) -> str:
    """`all_reduce`: the operation in which a rank or its device stands, by its table; "" if that does not show it."""
    place = standing_at(groups)
    issued = _issued(*place) if place is not None else None
    return issued.operation if issued is not None else ""


def awaited_text(position: RankPosition, world_size: int) -> str:
    """What a rank waits in, for a sentence: `all_reduce of group 1 (ranks 4-7)`; "" if it is not seen to wait.

    A host that synchronizes with its device tells of no collective itself: the rank's table does, or else the line.
    """
    place = standing_at(position.groups)
    if position.operation in ("", "wait", DEVICE) and place is not None and place[1] > 0:
        group, number = place
        members, issued = tuple(members_of(group.members, world_size)), _issued(group, number)
        return PendingOperation(group.name, members, number, issued, [], [], []).text(world_size)
    if position.operation == DEVICE and position.line:
        return f"the collective that its device is in (the host waits at {position.line})"
    return position.operation


def _issued(state: GroupState, number: int) -> IssuedOperation | None:
    return next((issued for issued in state.recent if issued.number == number), None)


def _add_peer(
    meeting: PendingOperation, rank: int, state: GroupState, places: Mapping[int, tuple[GroupState, int]]
) -> None:
    """The peer of a send or a receive is missing, unless it stands in the other half of it."""
    peer, members = meeting.peer, meeting.members
    if peer is None or meeting.operation is None:
        meeting.untold.extend(member for member in members if member != rank)
        return
    there, number = places.get(peer, (None, 0))
    other = _issued(there, number) if there is not None else None
    matches = (
        there is not None
        and other is not None
        and (there.name, there.members) == (state.name, state.members)
        and {other.operation, meeting.operation.operation} == {"send", "recv"}
        and (other.peer < 0 or (other.peer < len(members) and members[other.peer] == rank))
    )
    if not matches:
        meeting.missing.append(peer)


def begun_in(groups: Sequence[GroupState], like: GroupState) -> int | None:
    """Number of the last collective that a rank with these groups has begun in the group `like`.

    None where it is not known: the rank may have more groups than its table has room for (that of an earlier version).
    """
    state = group_in(groups, like.name, like.members)
    if state is None:
        return None if len(groups) >= EARLIER_GROUPS else 0
    return state.begun
