"""What a launch says to its user."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """One line for the user; the script's own stdout stays untouched."""
    print(f"gpuwatch: {text}", file=sys.stderr, flush=True)
