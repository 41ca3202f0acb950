"""How long the rank's look for an operation and its trials took, after the alarm."""

from __future__ import annotations

import time


class SpentTime:
    """Adds up the time within it: `with spent: ...`. It is not entered twice at a time."""

    def __init__(self) -> None:
        self._before_s = 0.0
        self._began: float | None = None

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._before_s, self._began = self.seconds, None

    @property
    def seconds(self) -> float:
        """So far, with the part that is running."""
        running = time.monotonic() - self._began if self._began is not None else 0.0
        return self._before_s + running
