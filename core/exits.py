"""Exit codes of `gpuwatch launch` and `gpuwatch check`: a contract with the scripts that call them."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a caller may branch on. As in a shell, a run that signal N ended exits with 128 + N."""

    CLEAN = 0
    SCRIPT_FAILED = 1
    USAGE = 2
    PREFLIGHT_FAILED = 3
    OVERFLOW = 4
    LOST = 5
    UNKNOWN = 6
    SIGNAL = 128


EXIT_OF_KIND = {
    "clean": ExitCode.CLEAN,
    "crash": ExitCode.SCRIPT_FAILED,
    "preflight": ExitCode.PREFLIGHT_FAILED,
    "overflow": ExitCode.OVERFLOW,
    "hang": ExitCode.LOST,
    "lost": ExitCode.LOST,
    "unknown": ExitCode.UNKNOWN,
}

RANK_OVERFLOW = 94
"""What a rank ends with that gpuwatch ends because of an overflow: no script is likely to use it."""
