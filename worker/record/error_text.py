"""An exception in words, as the recorder has it."""

from __future__ import annotations

import traceback

from ...core.signal_errors import from_outside

MESSAGE_CHARACTERS = 2000
TRACEBACK_CHARACTERS = 16000
"""The recorder has no more of a message, and no more of a traceback: its end."""


def error_texts(error: BaseException) -> tuple[str, str]:
    """(message, traceback), whole. The message is "" if the exception cannot say it."""
    try:
        message = str(error)
    except Exception as failure:  # the exception's __str__ raises
        if from_outside(failure):
            raise
        message = ""
    return message, "".join(traceback.format_exception(error))
