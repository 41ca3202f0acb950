"""Many cases in one test, without a folder, fixtures and reports for each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(*what: object) -> Iterator[None]:
    """A failure names the case. The traceback of what went wrong in it stands above.

    for number in NUMBERS:
        with case(number):
            assert number + 0 == number
    """
    try:
        yield
    except Exception as error:
        raise AssertionError(f"in the case {', '.join(map(repr, what))}: {error}") from error
