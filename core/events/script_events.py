"""What the user's script did: how it ended, and how it set up its process groups."""

from __future__ import annotations

from .rank_standing import StackLine
from .read_tensors import ScriptTensor
from .run_position import RankEvent


class ScriptError(RankEvent, frozen=True, tag="script_error"):
    """The user's script raised; `module` is the innermost module that was running."""

    error: str
    message: str
    traceback: str
    module: str | None = None
    peer_failure: bool = False
    """The exception says only that another rank is gone."""
    tensors: list[ScriptTensor] = []
    """Those in the script's variables, bad ones first, if the message speaks of nan and one of them is not finite."""
    handler: int = 0
    """The signal whose handler raised it; 0: none."""


class ScriptExit(RankEvent, frozen=True, tag="script_exit"):
    """The user's script ended or called sys.exit."""

    code: int
    tensors: list[ScriptTensor] = []
    """As in ScriptError; [] for code 0."""
    handler: int = 0
    """The signal whose handler called sys.exit; 0: none."""
    message: str = ""
    """What the script gave sys.exit to print: `sys.exit("loss is nan")`; "" where it gave a number or nothing."""


class OverflowRaised(RankEvent, frozen=True, tag="overflow_raised"):
    """The first OverflowDetected was raised in the user's script. One that catches it goes on."""


class ExitCall(RankEvent, frozen=True, tag="exit_call"):
    """The script ends its process by sys.exit with an error code, or by os._exit."""

    line: StackLine
    """Where its own code does, as the innermost call that is."""


class LeftGroup(RankEvent, frozen=True, tag="left_group"):
    """The script has destroyed its default process group by itself, and every number of before was judged."""


class GroupTeardown(RankEvent, frozen=True, tag="teardown"):
    """The script destroys its default process group while it handles an exception: that may be about to end it."""

    error: str
    message: str
    traceback: str
    peer_failure: bool = False
    """The exception says only that another rank is gone."""


class MeshCoordinates(RankEvent, frozen=True, tag="mesh"):
    """Where the rank is in a DeviceMesh whose dimensions have names."""

    coordinates: dict[str, int]


ScriptEvent = ScriptError | ScriptExit | OverflowRaised | ExitCall | LeftGroup | GroupTeardown | MeshCoordinates
