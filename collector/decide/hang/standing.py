"""What one rank was doing when it was asked: waiting for others, and in what, or something of its own. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ....core.records import RankLook, StackLine
from ....core.stalls import is_users
from ..words import doing

_COLLECTIVES = "/torch/distributed/distributed_c10d.py"
_DDP = "/torch/nn/parallel/distributed.py"
_AROUND_COLLECTIVES = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/c10d_logger.py",
    "/torch/distributed/_functional_collectives.py",
    "/torch/distributed/utils.py",
    "/torch/distributed/fsdp/",
    _DDP,
)
"""Where torch calls collectives from, of which some have no function in Python."""
_OWN_WORDS = frozenset({"wrapper", "inner", "decorate_context", "_fn", "__call__"})
"""Functions of torch around a collective that say nothing."""
_WAITS = (".wait(", "wait_tensor(", "synchronize(", "barrier(", "wait_for(")
_WAITS_FOR_DEVICE = (".item(", ".cpu(", ".tolist(", ".numpy(", "cuda.synchronize(")
"""Calls that a rank on a GPU stands in while its device waits for other ranks. In host memory they take no time."""
DEVICE = "a call that waits for the device"
BACKWARD = "the backward's reduction of gradients"
QUIET = 0.5
"""Share of a core. gloo and NCCL wait without using one; what computes uses all of it."""
_COMPUTES = 0.1
"""Share of a core, on a machine where several processes share one."""


@dataclass(frozen=True)
class Standing:
    """Where a rank stood."""

    rank: int
    kind: Literal["waits", "may wait", "stopped", "own", "unknown"]
    """`waits`: in a collective or its wait. `may wait`: for its device, or in a backward that uses no processor, which
    is what waiting for the gradients of others looks like. `stopped`: by a signal or a debugger. `own`: anything
    else."""
    operation: str
    """`all_reduce`, `wait`, `BACKWARD`, `DEVICE`; "" if it does not wait."""
    line: str
    """`train.py:41 in main: dist.all_reduce(loss)`, the innermost line that is the user's own; "" is unknown."""
    doing: str
    """Phase and module, as its recorder says: `in the forward of batch 4, in `net` (Net)`."""

    @property
    def waiting(self) -> bool:
        """Whether it waits for others, as far as can be seen."""
        return self.kind in ("waits", "may wait")


def computes(look: RankLook) -> bool:
    """Whether a rank that waits for nobody works, on a crowded node too: it is running, or has run."""
    return look.busy >= _COMPUTES or look.state == "R"


def standing_of(look: RankLook) -> Standing:
    """Classify one look.

    >>> standing_of(RankLook(Where(1, batch=4), 1, 60.0, "script", state="T")).kind
    'stopped'
    """
    line = _line(look.stack)
    does = ("leaving, " if look.phase in ("finished", "raised") else "") + doing(look)
    if look.state in ("T", "t"):
        return Standing(look.where.rank, "stopped", "", line, does)
    operation, sure = _operation(look)
    if operation:
        return Standing(look.where.rank, "waits" if sure else "may wait", operation, line, does)
    return Standing(look.where.rank, "own" if look.stack else "unknown", "", line, does)


def _operation(look: RankLook) -> tuple[str, bool]:
    """(what it waits in, whether that is sure); ("", False) if it does not."""
    stack = look.stack
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
        return ("DDP's own collective" if _DDP in inner.file else inner.function.lstrip("_")), True
    if any(word in inner.text for word in _WAITS_FOR_DEVICE):
        return DEVICE, False
    if any(word in inner.text for word in _WAITS):
        return "wait", True
    if inner.function == "_engine_run_backward" and look.busy < QUIET and look.state != "R":
        return BACKWARD, False
    return "", False


def _line(stack: list[StackLine]) -> str:
    """The innermost line of the user's own files; where there is none, of any file."""
    line = next((line for line in stack if is_users(line.shown)), stack[0] if stack else None)
    return line.shown.removeprefix(line.file.rpartition("/")[0] + "/") if line is not None else ""
