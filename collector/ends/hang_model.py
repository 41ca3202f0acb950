"""Findings about a hang, and the ranks' positions behind them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ...core.codes import Certainty
from ...core.events.agent_events import RankLook
from ...core.events.rank_standing import GroupState, StackLine
from ...core.recorder.group_table import members_of
from ...core.recorder.operation_mismatch import standing_at
from ...core.recorder.stalls import is_users
from ..facts.words import OUTSIDE, doing
from .pending_operations import PendingOperation, is_pending, operation_at


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


def operation_on_record(groups: Sequence[GroupState]) -> str:
    """`all_reduce`: the operation in which a rank or its device stands, by its table; "" if that does not show it."""
    place = standing_at(groups)
    issued = operation_at(*place) if place is not None else None
    return issued.operation if issued is not None else ""


def awaited_text(position: RankPosition, world_size: int) -> str:
    """What a rank waits in, for a sentence: `all_reduce of group 1 (ranks 4-7)`; "" if it is not seen to wait.

    A host that synchronizes with its device tells of no collective itself: the rank's table does, or else the line.
    """
    place = standing_at(position.groups)
    if position.operation in ("", "wait", DEVICE) and place is not None and place[1] > 0:
        group, number = place
        members, issued = tuple(members_of(group.members, world_size)), operation_at(group, number)
        return PendingOperation(group.name, members, number, issued, [], [], []).text(world_size)
    if position.operation == DEVICE and position.line:
        return f"the collective that its device is in (the host waits at {position.line})"
    return position.operation
