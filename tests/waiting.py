"""Waiting for an event: for five minutes, as no test depends on how fast its machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

WAIT_S = 300.0

Found = TypeVar("Found")


def until(
    condition: Callable[[], Found],
    what: str,
    state: Callable[[], object] = lambda: "",
    within_s: float = WAIT_S,
    look_s: float = 0.01,
) -> Found:
    """Ask until the answer is true, and return it.

    The failure says what was waited for, and what `state` returns then: what was seen in its place. `condition` may
    raise or fail if the event cannot come any more.
    """
    ends = time.monotonic() + within_s
    while not (found := condition()):
        if time.monotonic() > ends:
            pytest.fail(f"after {within_s:.0f} s not yet: {what}\n{state()}")
        time.sleep(look_s)
    return found
