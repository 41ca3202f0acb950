"""Distinguishes what a signal's handler has raised from gpuwatch's own errors.

Python runs a signal's handler between two bytecodes of the main thread, wherever that thread is: during a backward
that is often a hook of gpuwatch. What the handler raises (an alarm, a checkpoint at preemption, Ctrl-C) is the
script's, and the script waits for it. So code that runs within a rank and ends gpuwatch's own errors asks
`from_outside` first:

    try:
        ...
    except Exception as error:
        if from_outside(error):
            raise
        self._fault("forward hook", error)

tests/worker/test_own_errors.py finds code that does not. worker/native/errors.c is the same for C.
"""

from __future__ import annotations

# `signal.getsignal` makes enums of what this returns: asked for all signals, it took half a millisecond
import _signal  # type: ignore[import-not-found]  # typeshed has no stub of it
import inspect
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
_SIGNALS = tuple(map(int, signal.valid_signals()))


def from_outside(error: BaseException) -> bool:
    """Whether `error` was raised by a signal's handler, or is no error: KeyboardInterrupt, SystemExit.

    Python (`_PyErr_CheckSignalsTstate`) calls a handler with the number of the signal and the frame that it interrupts,
    which is the caller's frame of the handler. No other function gets that pair.
    """
    if not isinstance(error, Exception):
        return True
    handlers: set[CodeType] | None = None
    trace = error.__traceback__
    while trace is not None:
        if _interrupting(trace.tb_frame, error):
            return True
        if handlers is None:
            handlers = _handlers()
        if trace.tb_frame.f_code in handlers:  # one that has rebound its arguments
            return True
        trace = trace.tb_next
    return False


def handler_in(error: BaseException) -> int:
    """The signal whose handler has raised `error`, as far as its frame still shows it; 0 if there is none."""
    trace = error.__traceback__
    while trace is not None:
        if number := _interrupting(trace.tb_frame, error):
            return number
        trace = trace.tb_next
    return 0


class suppress_own(suppress):  # as contextlib.suppress, in whose place it stands
    """As contextlib.suppress, but what came `from_outside` goes on."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Whether the error ends here."""
        return error is not None and bool(super().__exit__(kind, error, trace)) and not from_outside(error)


def then_put_back(run: Callable[[], T], put_back: Callable[[], object]) -> T:
    """Call `run`, and then `put_back`, which is called once more where a signal's handler has raised within it.

    It is no context manager: a handler could raise between the parts of one, and then nothing would be put back.
    """
    try:
        result = run()
    finally:
        try:
            put_back()
        except BaseException:
            put_back()
            raise
    return result


def _interrupting(frame: FrameType, error: BaseException) -> int:
    """The signal of a handler's frame: the handler has interrupted its caller. 0 of any other frame."""
    code, caller = frame.f_code, frame.f_back
    if caller is None or not code.co_flags & inspect.CO_OPTIMIZED:  # a module's or a class's own frame
        return 0
    found = frame.f_locals
    if isinstance(found, dict):
        # before Python 3.13 this copy stays with the frame, and the frame of `except ... as error` with the error: the
        # two would keep each other, and all that the functions around them hold, until the next garbage collection
        for name in [name for name, value in found.items() if value is error]:
            del found[name]
    given: list[Any] = [found.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & inspect.CO_VARARGS:
        given += found.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount]) or ()
    return next((int(first) for first, second in pairwise(given) if second is caller and isinstance(first, int)), 0)


def _handlers() -> set[CodeType]:
    """The code of each handler that Python would call now."""
    found = set()
    for number in _SIGNALS:
        handler: Any = _signal.getsignal(number)
        if handler is None or isinstance(handler, int):  # set by other code than Python's; SIG_DFL or SIG_IGN
            continue
        while isinstance(handler, partial):
            handler = handler.func
        function = getattr(handler, "__func__", handler)
        if not hasattr(function, "__code__"):
            function = getattr(type(handler), "__call__", None)  # noqa: B004  # an object whose class has it
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            found.add(code)
    return found
