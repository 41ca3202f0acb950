"""What to do about exceptions that many scripts meet, by their message, and where they were raised. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from ...core.known_errors import explain
from ...core.recorder.stalls import is_users
from .end_positions import calls_of


def known_steps(message: str) -> list[str]:
    """What mends an exception with this message; [] if it is not known."""
    return [found.next for found in explain(message) if found.own][:1]


def known_lines(message: str) -> list[str]:
    """What the message means, as lines of evidence."""
    return [f"that message means: {found.sentence}" for found in explain(message) if found.own][:1]


def raised_at(traceback: str) -> str:
    """` at train.py:84 in main`: the innermost call of the script's own code in a traceback; "" if there is none."""
    own = next((call for call in calls_of(traceback) if is_users(call.shown)), None)
    return f" at {replace(own, text='').short}" if own is not None else ""
