"""After how long torch, or a watchdog, ends a rank that waits in a process group: the agent looks before that."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ...core.signal_errors import suppress_own

_HEARTBEAT, _MONITORS = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_ENABLE_MONITORING"


def timeout_ms(group: Any, environ: Mapping[str, str] = os.environ) -> int:
    """The shortest of its backends, in milliseconds; 0: not known, as with a backend that has none."""
    found: list[float] = []
    for device in getattr(group, "_device_types", ()):
        with suppress_own(Exception):  # a backend of somebody else's
            options = group._get_backend(device).options
            found.append(options._timeout.total_seconds())
            if "nccl" in str(options.backend).lower():
                found += _heartbeat_s(environ)
    shortest = min((seconds for seconds in found if seconds > 0), default=0.0)
    return int(min(shortest, 1e9) * 1000)


def _heartbeat_s(environ: Mapping[str, str]) -> list[float]:
    """Where the user has set it: by default it is no shorter than what a watchdog waits for a collective."""
    given = environ.get(_HEARTBEAT, "")
    return [float(given)] if given.isdecimal() and environ.get(_MONITORS, "1") not in ("0", "false", "no") else []
