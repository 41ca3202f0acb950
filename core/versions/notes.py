"""What a run tells once of its version of torch. Pure.

torch 2.5: keyword arguments are not in the frames; frames are written by Python, which takes longer
torch 2.16 is newer than the newest that gpuwatch was tried with, 2.15
"""

from __future__ import annotations

import re

from .torch_names import COMPILED, NAMES, NEWEST, Release

LIMITS: tuple[tuple[Release, Release, str], ...] = (
    ((2, 5), (2, 7), COMPILED),
    ((2, 8), (2, 12), "gradients inside of compiled modules are not looked into"),
)
"""(the first and the last release of which it holds, what is not seen), where no name is missing: compile/views.py."""


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
    lost += [sentence for first, last, sentence in LIMITS if first <= release <= last]
    return list(dict.fromkeys(lost))


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
