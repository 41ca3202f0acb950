"""What a run tells once of its version of torch. Pure.

torch 2.5: keyword arguments are not in the frames; frames are written by Python, which takes longer
torch 2.16 is newer than the newest that gpuwatch was tried with, 2.15
"""

from __future__ import annotations

import re

from .torch_names import COMPILED, NAMES, NEWEST, Release

ROWS_SINCE, GRADIENTS_SINCE = (2, 8), (2, 13)
"""The first releases whose graphs show inputs and outputs, and gradients: worker/compile/views.py has the reasons."""


def release_of(version: str) -> Release | None:
    """Of a version of torch; None if it is none.

    >>> release_of("2.13.0+cpu"), release_of("")
    ((2, 13), None)
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def not_seen_with(release: Release) -> list[str]:
    """What is not seen with a known release, each thing once."""
    lost = [one.lost for one in NAMES if not one.instead and not one.is_in(release)]
    compiled = not_seen_of_compiled(release)
    return list(dict.fromkeys([*lost, compiled] if compiled else lost))


NOT_SEEN_OF_BACKWARD = "gradients of a backward that compiled autograd runs are not looked into"


def not_seen_of_compiled(release: Release) -> str:
    """What a graph of torch.compile does not show with a release, which may be unknown; "" if it shows all."""
    if not ROWS_SINCE <= release <= NEWEST:
        return COMPILED
    return "gradients inside of compiled modules are not looked into" if release < GRADIENTS_SINCE else ""


def notes_on(version: str) -> list[str]:
    """Sentences without a full stop; none for a version with which all is as usual, or that is not known."""
    release = release_of(version)
    if release is None:
        return []
    name = f"torch {release[0]}.{release[1]}"
    if release > NEWEST:
        return [f"{name} is newer than the newest that gpuwatch was tried with, {NEWEST[0]}.{NEWEST[1]}"]
    lost = not_seen_with(release)
    return [f"{name}: {'; '.join(lost)}"] if lost else []
