"""A process of a run that has trained, or called a module, and is no rank.

Where a rank has its number, it has one below 0: made of its process id and its host.
"""

from __future__ import annotations

import zlib

_PID_BITS = 22
"""/proc/sys/kernel/pid_max is never larger."""
_HOST_BITS = 20


def number_of_process(pid: int, host: str) -> int:
    """What stands for it where a rank has its number.

    >>> pid_of_number(number_of_process(4242, "node7"))
    4242
    """
    return -((zlib.crc32(host.encode()) % (1 << _HOST_BITS)) << _PID_BITS | pid)


def is_rank(number: int) -> bool:
    """False for a process that is none."""
    return number >= 0


def pid_of_number(number: int) -> int:
    """The process id of one that is no rank."""
    return -number % (1 << _PID_BITS)


def rank_name(number: int) -> str:
    """How a sentence calls it: `rank 3`, `process 4242 (no rank)`."""
    return f"rank {number}" if is_rank(number) else f"process {pid_of_number(number)} (no rank)"
