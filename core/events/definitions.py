"""The names that a rank gives numbers in its recorder's log: each is interned once.

A row or a frame names its module, role and shape by number. The definitions here give the numbers their meaning.
"""

from __future__ import annotations

import msgspec


class RootDef(msgspec.Struct, frozen=True, tag="root"):
    """A root module. `ordinal` counts the roots of one class in the order of their first call."""

    id: int
    cls: str
    ordinal: int = 0

    @property
    def label(self) -> str:
        """`Net`, or `Net#2` for the second root of class Net."""
        return self.cls if self.ordinal == 0 else f"{self.cls}#{self.ordinal + 1}"


def split_label(label: str) -> tuple[str, int]:
    """(class, ordinal) of a root's label.

    >>> split_label("Net#2")
    ('Net', 1)
    """
    cls, _, number = label.partition("#")
    return cls, int(number) - 1 if number.isascii() and number.isdigit() else 0


class ModuleDef(msgspec.Struct, frozen=True, tag="module"):
    """A module under a root, named as the user wrote it ("" is the root itself)."""

    id: int
    root: int
    name: str
    cls: str


class SlotDef(msgspec.Struct, frozen=True, tag="slot"):
    """(module, role): what a row is about."""

    id: int
    module: int
    role: str


class ShapeDef(msgspec.Struct, frozen=True, tag="shape"):
    """A tensor shape."""

    id: int
    dims: tuple[int, ...]


Definition = RootDef | ModuleDef | SlotDef | ShapeDef
