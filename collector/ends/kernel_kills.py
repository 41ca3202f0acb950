"""What the kernel did in a rank's memory cgroup, in words. Pure."""

from __future__ import annotations

from ...core.events.agent_events import WorkerExit
from ...core.text import size_text

_AT_LIMIT = 0.95
"""Of its limit: a cgroup that never used so much was not what lacked memory."""


def killed_step(host: str) -> str:
    """How to find out who sent a SIGKILL."""
    return f"SIGKILL comes from outside: look for an out-of-memory kill with: dmesg -T | grep -i oom (on {host})."


def memory_text(exit_: WorkerExit) -> str:
    """`its memory cgroup was out of memory (limit 1.4 GiB, used up to 1.4 GiB), and the kernel killed 1 process of it`.

    The kernel counts the processes that it kills, and does not say which. It counts those that it kills as the whole
    host lacks memory, too.
    """
    many, limit, peak = exit_.memory_kills, exit_.memory_limit, exit_.memory_peak
    killed = f"the kernel killed {many} process{'es' if many > 1 else ''} of"
    if not limit:
        return f"{killed} its memory cgroup for lack of memory; that has no limit, so its host lacked memory"
    if not peak:
        return f"{killed} its memory cgroup for lack of memory (limit {size_text(limit)})"
    sizes = f"limit {size_text(limit)}, used up to {size_text(peak)}"
    if peak < _AT_LIMIT * limit:
        return f"{killed} its memory cgroup for lack of memory on its host; the cgroup had enough ({sizes})"
    return f"its memory cgroup was out of memory ({sizes}), and {killed} it"
