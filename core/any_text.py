"""Carries text that is no UTF-8, which messages cannot hold: a folder's name, in bytes that Python shows as surrogates.

Each such byte travels as a character of Unicode's last private plane, which no name has, and is given back.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

_FIRST, _CARRIED = 0xDC80, 0x10FF80
_SURROGATES = re.compile("[\ud800-\udfff]")
_CARRIERS = re.compile("[\U0010ff80-\U0010ffff]")
_MARKS = b"\xf4\x8f\xbe", b"\xf4\x8f\xbf"
"""How UTF-8 begins a carrier."""

T = TypeVar("T")


def plain_text(text: str) -> str:
    r"""For a reader: `w\udcff` where the byte 255 was."""
    return text.encode(errors="backslashreplace").decode()


def carried(message: object) -> Any:
    """The message as built-in values that can be encoded."""
    return _map(msgspec.to_builtins(message, builtin_types=(bytes,), str_keys=True), _carry)


def given_back(message: T, data: bytes, kind: Any) -> T:
    """The message as it was before `carried`. `data` is what it was decoded from, `kind` its type."""
    if not any(mark in data for mark in _MARKS):
        return message
    plain = msgspec.to_builtins(message, builtin_types=(bytes,), str_keys=True)
    back: T = msgspec.convert(_map(plain, _give_back), kind, builtin_types=(bytes,), str_keys=True)
    return back


def to_json(message: object) -> bytes:
    """As msgspec.json.encode."""
    try:
        return msgspec.json.encode(message)
    except UnicodeEncodeError:
        return msgspec.json.encode(carried(message))


def from_json(data: bytes, kind: type[T]) -> T:
    """As msgspec.json.decode."""
    return given_back(msgspec.json.decode(data, type=kind), data, kind)


def _map(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map(key, change): _map(each, change) for key, each in value.items()}
    return [_map(each, change) for each in value] if isinstance(value, list | tuple) else value


def _carry(text: str) -> str:
    return _SURROGATES.sub(lambda found: _carrier(ord(found[0])), text)


def _carrier(surrogate: int) -> str:
    byte = surrogate - _FIRST
    return chr(_CARRIED + byte) if 0 <= byte < 0x80 else f"\\u{surrogate:04x}"


def _give_back(text: str) -> str:
    return _CARRIERS.sub(lambda found: chr(ord(found[0]) - _CARRIED + _FIRST), text)
