"""What a launch says to its user."""

from __future__ import annotations

from ..core.text.tell import tell


def say(text: str) -> None:
    """One line for the user; the script's own stdout stays untouched."""
    tell(f"gpuwatch: {text}")
