"""From a verdict to the number that the launches exit with."""

from __future__ import annotations

import signal

from ..core.exits import EXIT_OF_KIND, ExitCode
from .report.model import Report


def exit_code(report: Report) -> int:
    """The exit code that a verdict stands for."""
    verdict = report.verdict
    if verdict.kind == "interrupted" and verdict.signal is not None:
        number = verdict.signal.removeprefix("signal ")  # one without a name
        return int(ExitCode.SIGNAL) + (int(number) if number.isdigit() else int(signal.Signals[verdict.signal]))
    code = EXIT_OF_KIND.get(verdict.kind, ExitCode.SCRIPT_FAILED)
    if report.run.check_only and code is not ExitCode.CLEAN:  # there is no script that could have failed by itself
        code = ExitCode.PREFLIGHT_FAILED
    return int(code)
