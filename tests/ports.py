"""Ports that belong to one test, although other tests of this host look for free ones at the same time."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

LOCKS = Path(tempfile.gettempdir()) / f"gpuwatch-tests-ports-{os.getuid()}"


@contextmanager
def ports_of_this_test(candidates: Iterable[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """The first of `candidates` whose ports are all free; they are locked until the block ends.

    A port is locked by an exclusive lock on a file of its name, which every test takes before it looks whether the
    port is free: "nobody listens now" alone is true for two tests at once.
    """
    LOCKS.mkdir(exist_ok=True)
    for numbers in candidates:
        with ExitStack() as held:
            if all(_lock(number, held) and _is_free(number) for number in numbers):
                yield numbers
                return
    pytest.fail("no free port")


def _lock(number: int, held: ExitStack) -> bool:
    lock = held.enter_context((LOCKS / str(number)).open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_free(number: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", number))
        except OSError:
            return False
    return True
