"""Runs a function wherever Python would run a signal's handler within some functions: at each place in turn.

CPython looks for signals where a function begins, when a call has returned, and where a loop goes back. A real signal
comes at one of these places by chance; a trace function comes to all of them.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterable
from functools import cache
from types import CodeType, FrameType
from typing import Any


@cache
def _looks_after(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions after which Python looks for signals."""
    looks = ("RESUME", "CALL", "JUMP_BACKWARD")
    return frozenset(each.offset for each in dis.get_instructions(code) if each.opname.startswith(looks))


def all_of(*owners: Any) -> set[CodeType]:
    """The code of the methods of classes, and of functions, with that of the functions in them."""
    found: set[CodeType] = set()
    for owner in owners:
        for each in vars(owner).values() if isinstance(owner, type) else [owner]:
            each = getattr(each, "fget", None) or getattr(each, "__wrapped__", each)
            if hasattr(each, "__code__"):
                _add(each.__code__, found)
    return found


def _add(code: CodeType, found: set[CodeType]) -> None:
    found.add(code)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            _add(each, found)


class _Interruption:
    def __init__(self, codes: Iterable[CodeType], at: int, handler: Callable[[], None]) -> None:
        self._codes, self._at, self._handler = set(codes), at, handler
        self._last: dict[FrameType, int] = {}
        self._seen = 0
        self.where = ""

    def call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code not in self._codes or self.where:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._trace

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self.where:
            return None
        if event == "opcode":
            last, self._last[frame] = self._last.get(frame, -1), frame.f_lasti
            if last in _looks_after(frame.f_code):
                self._seen += 1
                if self._seen > self._at:
                    self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                    self._handler()
        return self._trace


def interrupt(codes: Iterable[CodeType], work: Callable[[], Any], handler: Callable[[], None], at: int) -> str:
    """Do `work`, and run `handler` once, at the place of this number in the functions. Returns where; "" if nowhere."""
    there = _Interruption(codes, at, handler)
    before = sys.gettrace()
    sys.settrace(there.call)
    try:
        work()
    finally:
        sys.settrace(before)
    return there.where
