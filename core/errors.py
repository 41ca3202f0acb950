"""The errors of the package. The command line prints the sentence of a `GpuwatchError` and exits with its code."""

from __future__ import annotations

from .exits import ExitCode


class GpuwatchError(Exception):
    """Something that gpuwatch has to tell the user in one sentence."""

    exit_code: ExitCode = ExitCode.SCRIPT_FAILED


class UsageError(GpuwatchError):
    """The user asked for something that cannot be done: what was expected, what was found, and the flag to change."""

    exit_code = ExitCode.USAGE


class OverflowDetected(GpuwatchError, ValueError):
    """A watched tensor holds inf or nan and the policy is `abort`.

    It is a `ValueError`, as the 21-frame class that users know raises one.
    """

    exit_code = ExitCode.OVERFLOW


class JobEnded(SystemExit):
    """Ends the job where it was asked to end (`--abort-after-batch`): exit code 0."""
