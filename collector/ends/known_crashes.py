"""What to do about exceptions that many scripts meet, by their message, and where they were raised. Pure."""

from __future__ import annotations

import re
from pathlib import PurePath

from ...core.known_errors import explain
from ...core.recorder.stalls import is_users

_CALL = re.compile(r'^ *File "([^"]+)", line (\d+), in (\S+)', re.MULTILINE)
"""A call of a traceback, as Python prints it."""


def known_steps(message: str) -> list[str]:
    """What mends an exception with this message; [] if it is not known."""
    return [found.next for found in explain(message) if found.own][:1]


def known_lines(message: str) -> list[str]:
    """What the message means, as lines of evidence."""
    return [f"that message means: {found.sentence}" for found in explain(message) if found.own][:1]


def raised_at(traceback: str) -> str:
    """` at train.py:84 in main`: the innermost call of the script's own code in a traceback; "" if there is none."""
    calls = _CALL.findall(traceback)
    own = [f"{PurePath(path).name}:{line} in {name}" for path, line, name in calls if is_users(f"{path} in {name}")]
    return f" at {own[-1]}" if own else ""
