"""Enums whose members are words, or rows of a table with a word in front."""

from __future__ import annotations

from enum import Enum


class WordEnum(str, Enum):
    """Python 3.11's StrEnum: as text, in JSON and on the wire a member is its word alone.

    A member may be a row of a table: its word, and the columns that the class annotates, in their order.
    """

    def __new__(cls, word: str, *columns: object) -> WordEnum:  # noqa: D102  # a member's row
        member = str.__new__(cls, word)
        member._value_ = word
        for name, value in zip(cls.__annotations__, columns, strict=True):
            setattr(member, name, value)
        return member

    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]  # as StrEnum has it
