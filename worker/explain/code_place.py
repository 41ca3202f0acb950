"""The place in the script's code that a frame is running: its file, line, and part of the line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from linecache import getline
from types import FrameType
from typing import NamedTuple

_InstructionColumns = tuple[int | None, int | None, int | None, int | None]
"""First line, last line, first byte, and the byte behind the last one: of one instruction."""
_CODE_UNIT = 2
"""Bytes of a code unit. CPython numbers instructions in bytes (f_lasti), and co_positions has an entry per unit."""


class CodePlace(NamedTuple):
    """Where an operation was called."""

    module: str
    file: str = ""
    line: int = 0
    code: str = ""
    columns: tuple[int, int] | None = None
    """The first character of the operation in `code`, and the one behind its last; None: not known."""


def place_of(module: str, frame: FrameType) -> CodePlace:
    """What a frame is running now. The frame belongs to code of the user's, and the module is the innermost one."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = getline(file, line)
    return CodePlace(module, file, line, text.strip(), _columns_of(frame, text))


def _columns_of(frame: FrameType, text: str) -> tuple[int, int] | None:
    """The part of a line, without the line's indent, that a frame is running.

        h = s.n(x); a = s.q(h) @ s.k(h)    (16, 31): a product, when it runs
        total = sum(                       (8, 12): a call of several lines has its first line's part

    None before Python 3.11 and with `python -X no_debug_ranges`. Also None if the file is no longer what was compiled,
    as far as the columns show it.
    """
    positions: Callable[[], Iterable[_InstructionColumns]] | None = getattr(frame.f_code, "co_positions", None)
    if positions is None:
        return None
    unit = max(0, frame.f_lasti) // _CODE_UNIT
    first_line, last_line, first, end = next(islice(positions(), unit, None), (None,) * 4)
    if first_line is None or last_line is None or first is None or end is None or first_line != frame.f_lineno:
        return None
    code, indent = text.strip(), len(text) - len(text.lstrip())
    begins = _characters(text, first) - indent
    ends = _characters(text, end) - indent if last_line == first_line else len(code)
    return (begins, ends) if 0 <= begins < ends <= len(code) else None


def _characters(text: str, count: int) -> int:
    """How many characters the first `count` bytes of a line are. The compiler counts bytes of UTF-8."""
    data = text.encode("utf-8", "surrogatepass")
    return len(data[:count].decode("utf-8", "replace")) if count <= len(data) else len(text) + 1
