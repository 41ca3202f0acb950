"""What gpuwatch takes of Python's recursion limit, it gives back: worker/native/recursion.c. Without it nothing is."""

from __future__ import annotations

try:
    from .native.core import call_begins, call_ends, first_frame, work_begins, work_ends
except ImportError:  # gpuwatch was installed without a C compiler

    def call_begins() -> None:
        """A forward pre-hook has begun. Until `work_ends` it may take some frames."""

    def work_begins() -> None:
        """A forward hook has begun. Until `call_ends` it may take some frames."""

    def work_ends() -> None:
        """The pre-hook ends."""

    def call_ends() -> None:
        """The forward hook ends."""

    def first_frame() -> None:
        """The frames below the caller are ours: it is to be the first one."""


__all__ = ["call_begins", "call_ends", "first_frame", "work_begins", "work_ends"]
