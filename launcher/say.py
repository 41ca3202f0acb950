"""What a launch says to its user."""

from __future__ import annotations

from ..core.host import installed_torch
from ..core.text.tell import tell
from ..core.versions.notes import notes_on


def say(text: str) -> None:
    """One line for the user; the script's own stdout stays untouched."""
    tell(f"gpuwatch: {text}")


def tell_of_torch() -> None:
    """What is not seen with the torch of this environment, in a line; nothing where all is as usual."""
    for note in notes_on(installed_torch()):
        say(note)
