"""What a reading is."""

from __future__ import annotations

Values = dict[tuple[str, str], float]
"""(what it is of, a key of METRICS) -> the figure; a count as it stands."""
