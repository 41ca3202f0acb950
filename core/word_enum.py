"""An enum whose members are words: as text, in JSON and on the wire it is the word alone."""

from __future__ import annotations

from enum import Enum


class WordEnum(str, Enum):
    """Python 3.11's StrEnum."""

    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]  # as StrEnum has it
