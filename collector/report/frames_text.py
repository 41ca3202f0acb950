"""Frames as a report prints them: the 21-frame table, with the gradients of one module under one title.

abs min  abs max  metadata
                  encoder.fc1 Linear
3.82e-08 2.17e+00 weight
8.11e-02 4.10e+01 output
                  encoder.fc1 Linear (backward)
0.00e+00 6.10e-05 grad output zeros 12% subnormal 3%
0.00e+00      inf grad weight
"""

from __future__ import annotations

from ...core.frames import HEADER, NAME_INDENT, Frame, Row, format_row
from ..decide.notices import share_text


def frames_text(frames: list[Frame]) -> str:
    """The table of several frames under its header."""
    lines = [HEADER]
    before: tuple[str, str] | None = None
    for frame in frames:
        if (
            frame.module,
            frame.phase,
        ) != before or frame.phase == "forward":  # each call of a forward has its own title
            lines.append(f"{NAME_INDENT} {title_of(frame)}")
        before = (frame.module, frame.phase)
        lines += [row_text(row) for row in frame.rows]
    return "\n".join(lines)


def title_of(frame: Frame) -> str:
    """Name and class, and the phase if that is not the forward."""
    return frame.title if frame.phase == "forward" else f"{frame.title} ({frame.phase})"


def row_text(row: Row) -> str:
    """A row as a line, with the shares of zeros and subnormals where they were counted."""
    shares = [f"{name} {share_text(share)}" for name, share in _shares(row) if share]
    return " ".join([format_row(row), *shares])


def _shares(row: Row) -> list[tuple[str, float | None]]:
    return [("zeros", row.zeros), ("subnormal", row.subnormals)]
