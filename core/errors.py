"""The errors of the package. The command line prints the sentence of a `GpuwatchError` and exits with its code."""

from __future__ import annotations

from .codes import Code, ExitCode, coded


class GpuwatchError(Exception):
    """An error that the user sees as one sentence, with its code at the end."""

    exit_code: ExitCode = ExitCode.SCRIPT_FAILED

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(code, text)
        self.code, self.text = code, text

    def __str__(self) -> str:
        return coded(self.text, self.code)


class UsageError(GpuwatchError):
    """A usage error. It says what was expected, what was found, and which flag to change."""

    exit_code = ExitCode.USAGE


class OutputLost(GpuwatchError):
    """What a command was called for cannot be printed. `is_wanted`: somebody still reads."""

    def __init__(self, error: Exception, *, is_wanted: bool) -> None:
        text = f"expected a stdout that can be written, found: {error}; where the command has --output, write to a file"
        super().__init__(Code.NOT_WRITABLE, text)
        self.is_wanted = is_wanted
        self.exit_code = ExitCode.USAGE if is_wanted else ExitCode.CLEAN


class OverflowDetected(GpuwatchError, ValueError):
    """A watched tensor holds inf or nan and the policy is `abort`.

    It is a `ValueError`, because transformers' DebugUnderflowOverflow raises one.
    """

    exit_code = ExitCode.OVERFLOW

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)

    __str__ = Exception.__str__


class JobEnded(SystemExit):
    """The job ends at the batch that `--abort-after-batch` names. The exit code is 0."""
