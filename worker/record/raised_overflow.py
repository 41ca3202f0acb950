"""What a rank raises where an overflow ends its job, and what it says there."""

from __future__ import annotations

import sys

from ...core.errors import OverflowDetected
from ...core.events.alarms import Anomaly
from ...core.frames import LOSS_CLASS, FramePhase, module_text
from ...core.roles import RoleKind, parse_role
from ...core.text import shown_name
from .names import CALL

_LAUNCHED = "the combined report follows when all ranks have ended."
_ALONE = "report() of the watch shows the frames."
_GO_ON = "To go on training after an overflow: --on-overflow continue"


def ends_by_another_watch() -> bool:
    """Whether the call ends by what another watch of the model has raised. torch warns of what later hooks raise."""
    # this runs in a hook that torch calls while it handles that error (_call_impl, always_call)
    error = sys.exc_info()[1]
    at = error.__traceback__ if isinstance(error, OverflowDetected) else None
    return at is not None and at.tb_frame.f_code is CALL  # else the script handles an earlier one


def clause_of(anomaly: Anomaly, made: str = "") -> str:
    """What a rank has found, for the message of its OverflowDetected. `made`: where it was made, as a clause."""
    cause = f" ({anomaly.cause})" if anomaly.cause else ""
    if anomaly.phase == FramePhase.LOSS:
        when = "backward" if anomaly.where.root == LOSS_CLASS else "after the forward of batch"
        where = f"the loss, {when} {anomaly.where.batch}"
        return f"rank {anomaly.where.rank}: {anomaly.value} in {where}{cause}{f'; {made}' if made else ''}"
    module = module_text(anomaly.module, anomaly.cls)
    is_output = parse_role(anomaly.role).kind is RoleKind.OUTPUT
    handed = ", which was handed a non-finite input" if is_output and not anomaly.inputs_finite else ""
    return (
        f"rank {anomaly.where.rank}: {anomaly.value} in {shown_name(anomaly.role)} of {module}{handed}, "
        f"{anomaly.phase} of batch {anomaly.where.batch}{cause}{f'; {made}' if made else ''}"
    )


def raised_text(found: str, *, launched: bool) -> str:
    """The message of OverflowDetected, in the options of the command line. `found`: see `clause_of`."""
    return f"gpuwatch: {found}; {_LAUNCHED if launched else _ALONE} {_GO_ON}"
