"""What to do about exceptions that many scripts meet, by their message. Pure."""

from __future__ import annotations

from ...core.known_errors import explain


def known_steps(message: str) -> list[str]:
    """What mends an exception with this message; [] if it is not known."""
    return [found.next for found in explain(message) if found.own][:1]


def known_lines(message: str) -> list[str]:
    """What the message means, as lines of evidence."""
    return [f"that message means: {found.sentence}" for found in explain(message) if found.own][:1]
