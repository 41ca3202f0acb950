"""A message with all its text made safe to show (core/text.py), before anything is made of it. Pure.

A script chooses the names of its modules, classes and arguments, the messages of its exceptions and its command line.
Text made safe here is safe in the verdict, the text, report.json and every later rendering. Names in definitions are
made safe where they are given to pages (core/recorder/pages.py).
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from ...core.events.definitions import RootDef, split_label
from ...core.text import is_shown, shown, shown_lines, shown_name

_NAMES = frozenset({"module", "cls", "role", "pattern", "error", "host", "node", "device", "dtype", "part", "stage"})
_SEVERAL_LINES = frozenset({"traceback", "message"})
_EXCEPTIONS = frozenset({"ScriptError", "ScriptExit", "GroupTeardown"})
"""Fields of an exception that are shown line by line, and the events that have them."""

_PLAIN = frozenset({int, float, bool, bytes, type(None)})

T = TypeVar("T")


def shown_body(body: T) -> T:
    """The same message; the very same object if all its text is safe."""
    result: T = _safe(body, "", type(body).__name__)
    return result


def _safe(value: Any, field: str, owner: str) -> Any:
    if isinstance(value, str):
        return value if is_shown(value) else _text(value, field, owner)
    if isinstance(value, msgspec.Struct):
        name = type(value).__name__
        changed = {}
        # of eight thousand ranks twice a second: so what holds no text is passed by
        for key in value.__struct_fields__:
            old = getattr(value, key)
            if type(old) not in _PLAIN and (safe := _safe(old, key, name)) is not old:
                changed[key] = safe
        return msgspec.structs.replace(value, **changed) if changed else value
    if isinstance(value, list):
        items = [_safe(item, field, owner) for item in value]
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    if isinstance(value, dict):
        entries = {_safe(key, "", owner): _safe(item, field, owner) for key, item in value.items()}
        same = all(new is old for new, old in zip(entries.values(), value.values(), strict=False))
        return value if same and entries.keys() == value.keys() else entries
    return value


def _text(text: str, field: str, owner: str) -> str:
    if field in _SEVERAL_LINES and owner in _EXCEPTIONS:
        return text if text.isprintable() else shown_lines(text)
    cls, ordinal = split_label(text)
    if field == "root" and RootDef(0, cls, ordinal).label == text:
        return RootDef(0, shown_name(cls), ordinal).label
    return shown_name(text) if field == "root" or field in _NAMES else shown(text)
