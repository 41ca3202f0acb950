"""What became of a rank, in words. report.json has the state and the exit code that these are made of."""

from __future__ import annotations

import signal

from ...core.codes import RANK_OVERFLOW
from ...core.signal_errors import from_outside
from .model import RankReport

RUNS_ON = "running when the launch was killed"
AT_OVERFLOW = "ended at its overflow"


def state_text(rank: RankReport, starter: str) -> str:
    """How a rank ended, or what it was doing when it was last heard. `starter` has started the ranks: `torchrun`.

    `stopped by torchrun`, `ended at its overflow`, `killed (SIGKILL)`, `raised KeyError`, `ended with code 3`,
    `script`, `running when the launch was killed`
    """
    code = rank.exit
    if rank.state == "aborted" or (rank.state == "failed" and code == RANK_OVERFLOW and rank.first_anomaly is not None):
        return AT_OVERFLOW
    if rank.state == "stopped":
        return stopped_text(starter)
    if rank.state == "running":
        return RUNS_ON
    if rank.state == "raised":
        error = str(rank.error.get("type", "")) if rank.error is not None else ""
        return f"raised {error}".rstrip()
    if rank.state in ("killed", "failed") and code is not None:
        return code_text(code)
    return rank.state


def stopped_text(starter: str) -> str:
    """`stopped by torchrun`"""
    return f"stopped by {starter}"


def code_text(code: int) -> str:
    """`killed (SIGKILL)` for -9, `ended with code 3`."""
    return f"killed ({signal_name(-code)})" if code < 0 else f"ended with code {code}"


def signal_name(number: int) -> str:
    """`SIGTERM` for 15."""
    try:
        return signal.Signals(number).name
    except ValueError as error:
        if from_outside(error):
            raise
        return f"signal {number}"
