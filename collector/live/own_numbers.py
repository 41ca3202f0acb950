"""What the collector tells of itself in its metrics."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class OwnNumbers:
    """Of the collector itself."""

    waiting_messages: int = 0
    """Received, and not on the disk yet."""
    waiting_bytes: int = 0
    pages_not_kept: int = 0
    turned_away: dict[str, int] = field(default_factory=dict)
    """By reason."""
    metrics_faults: int = 0
    """How often these metrics could not be told."""
