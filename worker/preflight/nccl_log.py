"""What the known failure lines of NCCL's and gloo's logs mean. Pure."""

from __future__ import annotations

import msgspec


class Explanation(msgspec.Struct, frozen=True):
    """One cause, found in one line of a log."""

    sentence: str
    """The cause, without its full stop."""
    next: str
    """What to try next."""
    line: str
    """The line that says so."""
    own: bool
    """The fault is on the rank, GPU or host that wrote the line; else a peer's, the network's or the job's."""


def explain(text: str) -> list[Explanation]:
    """Every known cause in a log, each once, those that say most first."""
    raise NotImplementedError
