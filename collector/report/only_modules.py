"""A report with the frames of some modules only."""

from __future__ import annotations

from fnmatch import fnmatchcase

from msgspec.structs import replace

from ...core.frames import Frame
from .model import Report


def only_modules(report: Report, pattern: str) -> Report | None:
    """`pattern` is a shell's: `*.wo` fits `block.0.wo`. The root's name is empty. None if no frame fits."""

    def chosen(frames: list[Frame]) -> list[Frame]:
        return [frame for frame in frames if fnmatchcase(frame.module, pattern)]

    ranks = [
        replace(
            rank,
            frames=chosen(rank.frames),
            traces=[replace(page, frames=frames) for page in rank.traces if (frames := chosen(page.frames))],
        )
        for rank in report.ranks
    ]
    if not any(rank.frames or rank.traces for rank in ranks):
        return None
    return replace(report, ranks=ranks)
