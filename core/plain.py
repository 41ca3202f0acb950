"""Text that a script controls, made safe to show: no control character reaches a terminal, and a name is one line.

A module may be called anything; `x\nVERDICT  clean` would else be a line of the report.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from .records import Fault

MOST = 200
"""Characters of a name."""
_CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_IN_A_LINE = re.compile(f"[{_CONTROL}\\n\\t]")
_IN_LINES = re.compile(f"[{_CONTROL}]")
_NAMES = frozenset(
    ("module", "cls", "role", "root", "error", "pattern", "dtype", "value", "kind", "phase", "part", "stage", "host")
)
"""Fields that hold a name; others hold text, which may have several lines."""

T = TypeVar("T")


def plain(name: str) -> str:
    r"""A name on one line, its middle left out if it is long.

    >>> plain("a\x1b[2Jb\n")
    'a\\x1b[2Jb\\n'
    """
    name = plain_line(name)
    return name if len(name) <= MOST else f"{name[: MOST // 2]}...{name[3 - MOST // 2 :]}"


def plain_line(text: str) -> str:
    """Text on one line, as long as it is."""
    return _IN_A_LINE.sub(_escaped, text)


def plain_lines(text: str) -> str:
    """Text of several lines without any other control character."""
    return _IN_LINES.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return repr(match.group())[1:-1]


def plain_fields(record: T) -> T:
    """A record with its names and texts made safe, those of records in it as well."""
    if not isinstance(record, msgspec.Struct):
        return record
    changed: dict[str, Any] = {}
    for field in record.__struct_fields__:
        value = getattr(record, field)
        if isinstance(value, str):
            new = (
                plain(value)
                if field in _NAMES
                else plain_line(value)
                if isinstance(record, Fault)
                else plain_lines(value)
            )
        else:
            new = _inside(value)
        if new is not value and new != value:
            changed[field] = new
    return msgspec.structs.replace(record, **changed) if changed else record


def _inside(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return plain_fields(value)
    if isinstance(value, list):
        return [plain_lines(entry) if isinstance(entry, str) else _inside(entry) for entry in value]
    return value
