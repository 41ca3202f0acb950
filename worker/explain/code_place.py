"""The place in the script's code that a frame is running: its file, line, and part of the line."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import islice
from linecache import getline
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

_PACKAGE = Path(__file__).parents[2]
_NOT_OF_USER = tuple(f"{folder}/" for folder in (Path(torch.__file__).parent, _PACKAGE / "worker", _PACKAGE / "core"))
_WITHOUT_FILE = ("<ipython", "<stdin>")
"""Names in brackets that stand for code of the user's. Others are generated code."""
_STDLIB, _PACKAGES = sysconfig.get_path("stdlib") + "/", ("/site-packages/", "/dist-packages/")

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


class CallSite(NamedTuple):
    """Where a call was made, as its frame has it. A frame itself would keep the script's tensors alive."""

    f_code: CodeType
    f_lasti: int

    @property
    def f_lineno(self) -> int:
        """0: not known."""
        lines = self.f_code.co_lines()
        return next((line for first, end, line in lines if first <= self.f_lasti < end and line is not None), 0)


def call_site(frame: FrameType | None) -> CallSite | None:
    """That of the innermost frame with code of the user's, from this one outwards; None if there is none."""
    found = call_sites(frame, 1)
    return found[0] if found else None


def call_sites(frame: FrameType | None, most: int) -> list[CallSite]:
    """Those of the innermost frames with code of the user's, from this one outwards."""
    found: list[CallSite] = []
    while frame is not None and len(found) < most:
        if is_of_user(frame):
            found.append(CallSite(frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return found


def function_name(code: CodeType) -> str:
    """`Trainer.step`; without the class before Python 3.11."""
    return str(getattr(code, "co_qualname", code.co_name))


def is_of_user(frame: FrameType) -> bool:
    """Whether it runs code of the script's own, or of a library that is not torch."""
    return is_users_file(frame.f_code.co_filename)


@lru_cache(1024)
def is_users_file(file: str) -> bool:
    """Whether a file has code of the script's own, or of a library that is not torch."""
    if file.startswith(_NOT_OF_USER) or (file.startswith("<") and not file.startswith(_WITHOUT_FILE)):
        return False
    return not file.startswith(_STDLIB) or any(packages in file for packages in _PACKAGES)


def place_of(module: str, frame: FrameType | CallSite) -> CodePlace:
    """What a frame is running now. The frame belongs to code of the user's, and the module is the innermost one."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = getline(file, line)
    return CodePlace(module, file, line, text.strip(), _columns_of(frame, text))


def _columns_of(frame: FrameType | CallSite, text: str) -> tuple[int, int] | None:
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
