"""How a node agent tells a rank that it has forecast an overflow: a count in the header, which the rank reads.

It is the one integer of a recorder that the agent writes. The rank only compares it with what it was, so no value of it
does harm: at worst the rank watches more.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from ..signal_errors import suppress_own
from .layout import HeadField


def tell_forecasts(recorder: Path, count: int) -> None:
    """Write how many forecasts there are. The file may be gone, as the rank may have ended: then nobody needs it."""
    with suppress_own(OSError):
        descriptor = os.open(recorder, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, struct.pack("<q", count), 8 * HeadField.FORECASTS)
        finally:
            os.close(descriptor)
