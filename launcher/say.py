"""What a launch says to its user."""

from __future__ import annotations

import sys

from ..core.host import installed_torch
from ..core.versions.notes import notes_on


def say(text: str) -> None:
    """One line for the user; the script's own stdout stays untouched."""
    print(f"gpuwatch: {text}", file=sys.stderr, flush=True)


def tell_of_torch() -> None:
    """What is not seen with the torch of this environment, in a line; nothing where all is as usual."""
    for note in notes_on(installed_torch()):
        say(note)
