"""Which signals have reached handlers of a rank's script: a table in the header of its recorder.

An entry for each of `HEARD`, four integers of 8 bytes: when the signal first came from outside of the rank
(nanoseconds since the epoch, by its host's clock), the batch of then, the process that sent it, and when it first came
from the rank's parent, which is its launcher. worker/native/signals.c writes it.
"""

from __future__ import annotations

import signal
import struct

from ..events.rank_standing import HeardSignal
from .layout import ANOMALY_AT

HEARD = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGXCPU)
"""What schedulers and people send to have a job end, and a script may handle. The order is that of the entries."""
ENTRY = struct.Struct("<4q")
HEARD_AT = 640
HEARD_BYTES = ENTRY.size * len(HEARD)
assert HEARD_AT + HEARD_BYTES <= ANOMALY_AT
_MOST_PID = 1 << 22


def read_heard(table: bytes) -> list[HeardSignal]:
    """The entries in which a signal has come. Any bytes are read without harm.

    >>> read_heard(ENTRY.pack(0, 0, 0, 0) * 4 + ENTRY.pack(5, 3, 77, 0) + ENTRY.pack(0, 0, 0, 0))
    [HeardSignal(number=15, time_ns=5, batch=3, sender=77, parent_ns=0)]
    """
    found = []
    for number, (time_ns, batch, sender, parent_ns) in zip(HEARD, ENTRY.iter_unpack(table), strict=True):
        if (time_ns > 0 or parent_ns > 0) and 0 <= sender <= _MOST_PID:  # -1: one is being written
            found.append(HeardSignal(int(number), max(0, time_ns), max(-1, batch), sender, max(0, parent_ns)))
    return found
