"""After how long torch, or a watchdog, ends a rank that waits in a process group: the agent looks before that."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ...core.signal_errors import suppress_own

_HEARTBEAT, _MONITORS = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_ENABLE_MONITORING"
_HANDLING, _BLOCKING = "NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT"
"""Variables: the older names, in front of which torch has put its own."""


def timeout_ms(group: Any, environ: Mapping[str, str] = os.environ) -> int:
    """The shortest of its backends, in milliseconds; 0: not known, as with a backend that has none.

    Negative where it ends a `Work.wait()` alone: with TORCH_NCCL_BLOCKING_WAIT there is no watchdog, and a call that
    waits itself, such as `dist.barrier()` from torch 2.7 on, has no timeout.
    """
    found: list[float] = []
    sign = 1
    for device in getattr(group, "_device_types", ()):
        with suppress_own(Exception):  # a backend of somebody else's
            options = group._get_backend(device).options
            is_nccl = "nccl" in str(options.backend).lower()
            if not is_nccl or _ends_a_wait(environ):
                found.append(options._timeout.total_seconds())
            if is_nccl:
                found += _heartbeat_s(environ)
                sign = -1 if _waits_alone(environ) and not _heartbeat_s(environ) else sign
    shortest = min((seconds for seconds in found if seconds > 0), default=0.0)
    return sign * int(min(shortest, 1e9) * 1000)


def _ends_a_wait(environ: Mapping[str, str]) -> bool:
    """Whether NCCL's timeout does: the watchdog may have been told to report it alone, and no host waits then."""
    return _given(_HANDLING, environ) != "0" or _waits_alone(environ)


def _waits_alone(environ: Mapping[str, str]) -> bool:
    """Whether the host waits in `Work.wait()`, and torch starts no watchdog."""
    return _given(_BLOCKING, environ).lower() in ("1", "true", "yes", "y", "t")


def _given(which: str, environ: Mapping[str, str]) -> str:
    return next((environ[name] for name in (f"TORCH_{which}", which) if name in environ), "")


def _heartbeat_s(environ: Mapping[str, str]) -> list[float]:
    """Where the user has set it: by default it is no shorter than what a watchdog waits for a collective."""
    given = environ.get(_HEARTBEAT, "")
    return [float(given)] if given.isdecimal() and environ.get(_MONITORS, "1") not in ("0", "false", "no") else []
