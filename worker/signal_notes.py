"""Notes which signals reach handlers of the script's, and who sent them: see worker/native/signals.c."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

from ..core.recorder.heard_signals import HEARD, HEARD_AT
from ..core.recorder.layout import HeadField
from ..core.recorder.writer import RecorderWriter
from ..core.signal_errors import suppress_own
from .patches import PatchLedger

try:
    from .native.signals import note_in, stand_before
except ImportError:  # not built: no signal is noted
    _IS_BUILT = False
else:
    _IS_BUILT = True

_is_replaced = False


def note_signals(recorder: RecorderWriter) -> None:
    """Write into this recorder from now on, for handlers that are there and that the script sets. Twice does no harm.

    Call it in the main thread. Signals that the script leaves at their default stay there, and so does Ctrl-C.
    """
    global _is_replaced
    if not _IS_BUILT:
        return
    note_in(recorder.memory, HEARD_AT, len(HEARD), 8 * HeadField.BATCH, os.getppid())
    if _is_replaced:  # code in C may stand before our handler by now: before that one, ours would call itself
        return
    _is_replaced = True
    for number in HEARD:
        if signal.getsignal(number) is not signal.default_int_handler:
            _note(number)
    PatchLedger().replace(signal, "signal", _noting)


def _noting(before: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(before)
    def set_handler(signalnum: Any, handler: Any) -> Any:
        replaced = before(signalnum, handler)
        if signalnum in HEARD and handler is not signal.default_int_handler:
            _note(signalnum)
        return replaced

    return set_handler


def _note(number: int) -> None:
    with suppress_own(Exception):  # one that is set in C, say
        stand_before(number, HEARD.index(number))
