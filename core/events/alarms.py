"""An alarm of a rank, and the values that are no alarm: warned of, skipped, waived, or led nowhere."""

from __future__ import annotations

from typing import Literal

import msgspec

from ..frames import FramePhase
from .looked_again import LookedAgain, OptimizerStep
from .run_position import RankEvent


class IssuedMoment(msgspec.Struct, frozen=True):
    """What a rank had issued when its frames had the number `seq`: see Where."""

    seq: int
    clock: dict[str, int] = {}
    sent: dict[str, dict[int, int]] = {}
    received: dict[str, dict[int, int]] = {}


class NotedCollective(msgspec.Struct, frozen=True):
    """One of the last collectives that a rank had issued on a process group."""

    group: str
    number: int
    operation: str
    dtype: str
    was_read: bool
    """The script has waited for it, and what came out was read then; or its device reads that."""


class Anomaly(RankEvent, frozen=True, tag="anomaly"):
    """The first frame of a batch with a non-finite value that is not an expected one."""

    frame: int
    module: str
    cls: str
    phase: FramePhase
    role: str
    value: str
    dtype: str
    shape: list[int] | None = None
    inputs_finite: bool = True
    weights_finite: bool = True
    aborts: bool = False
    cause: str = ""
    """Why an expected value became an alarm: `GradScaler skipped 12 steps in a row (scale 16)`."""
    collectives: int = 0
    """How many collectives were issued during the module's call."""
    optimizer: OptimizerStep | None = None
    """The optimizer whose step came before a weight was found non-finite, if it is known."""
    again: LookedAgain | None = None
    """What a second look at the module has found. Only a rank's first alarm has it."""
    moments: list[IssuedMoment] = []
    """What the rank had issued before, the latest last. Only a rank's first alarm has it."""
    collectives_before: list[NotedCollective] = []
    """The last ones on each process group when the alarm was raised. Only a rank's first alarm has them."""
    looks: bool = False
    """The rank goes on for up to SECOND_RUN_S: a SecondRun or a ForwardCaptured follows."""


class RangeWarning(RankEvent, frozen=True, tag="warned"):
    """A value near overflow or in underflow: the first of its kind in one row of one module.

    All are finite but a loss of float16 (core/judge.py).
    """

    kind: str
    """`near overflow` or `underflow`"""
    module: str
    cls: str
    phase: FramePhase
    role: str
    dtype: str
    abs_max: float | None = None
    headroom: float | None = None
    zeros: float | None = None
    subnormals: float | None = None


class ScalerSkip(RankEvent, frozen=True, tag="scaler_skip"):
    """A GradScaler has skipped an optimizer step because of non-finite gradients. `scale` is the scale that they had.

    `module`, `role` and `value` are those of the first bad gradient that was seen in the batch.
    """

    scale: float
    in_a_row: int
    module: str | None = None
    cls: str | None = None
    role: str | None = None
    value: str | None = None


class IgnoredAlarm(RankEvent, frozen=True, tag="ignored"):
    """The first alarm of one row of one module that a rule of the user's (`--ignore`) has waived."""

    pattern: str
    module: str
    role: str
    value: str


LedNowhere = Literal["", "taken away", "no gradient", "not trained"]
"""Why a bad value is a notice and no alarm.

"": nan of a mask of -inf, and a call around it took it away. `taken away`: a call around it returned something that
cannot come of it. `no gradient`: a weight that no output shows, and that gets no gradient. `not trained`: a model that
no optimizer holds and no backward reached returned it.
"""


class AbsorbedValue(RankEvent, frozen=True, tag="absorbed"):
    """The first bad value of one row of one module that led nowhere."""

    module: str
    cls: str
    role: str
    value: str
    dtype: str
    by: str = ""
    """Name of the module that took it away."""
    why: LedNowhere = ""


class MaskReturned(RankEvent, frozen=True, tag="mask"):
    """The first -inf in one output of one module that is no alarm, as masks are made of it."""

    module: str
    cls: str
    role: str


AlarmEvent = Anomaly | RangeWarning | ScalerSkip | IgnoredAlarm | AbsorbedValue | MaskReturned
