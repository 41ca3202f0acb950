"""Frames and stacks of the ranks beside each other, as the text and the page both show them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from msgspec.structs import replace

from ...core.frames import HEADER, NAME_INDENT, Frame, FramePhase, Row, RowKind, format_number, format_row
from ...core.recorder.stalls import is_users
from ...core.text import ranks_text
from ...core.values import SHOWN_STATISTICS
from .model import RankReport, RunReport
from .sentence_parts import coarse_share_text, grouped

# The frames of one rank: the 21-frame table, with the gradients of one module under one title.
#
# abs min  abs max  metadata
# encoder.fc1 Linear
# 3.82e-08 2.17e+00 weight
# 8.11e-02 4.10e+01 output
# encoder.fc1 Linear (backward)
# 0.00e+00 6.10e-05 grad output zeros 12% subnormal 3%
# 0.00e+00      inf grad weight


def frames_text(frames: list[Frame]) -> str:
    """The table of several frames under its header. Each call of a forward has its own title."""
    lines = [HEADER]
    before: tuple[str, str] | None = None
    for frame in frames:
        if (frame.module, frame.phase) != before or frame.phase == FramePhase.FORWARD:
            lines.append(f"{NAME_INDENT} {title_of(frame)}")
        before = (frame.module, frame.phase)
        lines += [format_row(row) + _statistics_text(row) for row in frame.rows]
    return "\n".join(lines)


def _statistics_text(row: Row) -> str:
    shown = [(label, getattr(row, name), is_share) for name, label, is_share in SHOWN_STATISTICS]
    return "".join(f" {label} {coarse_share_text(n) if is_share else f'{n:.2e}'}" for label, n, is_share in shown if n)


def title_of(frame: Frame) -> str:
    """Name and class, and the phase if that is not the forward. `loss` for what a backward began from."""
    if frame.phase == FramePhase.LOSS:
        return frame.module
    return frame.title if frame.phase == FramePhase.FORWARD else f"{frame.title} ({frame.phase})"


# abs max of each module's outputs, rank by rank, at the same point of the training.


class ModuleCell(NamedTuple):
    """One module on one rank."""

    text: str
    """`6.55e+04`, `nan`, `inf`, or `-` without a number"""
    bad: bool = False
    value: float | None = None
    """abs max; None where it is non-finite or was not measured"""
    headroom: float | None = None
    """Powers of two between it and the dtype's largest number"""


class SideBySideRow(NamedTuple):
    """One frame on all ranks that are compared."""

    title: str
    module: str
    cells: list[ModuleCell]


class SideBySide(NamedTuple):
    """Rows in the order of the calls, columns of ranks: first the shown rank, then the others."""

    what: str
    batch: int
    columns: list[RankReport]
    rows: list[SideBySideRow]
    left_out: int
    """Further comparable ranks, which have no column."""


def rank_to_show(report: RunReport, rank: int | None = None) -> RankReport | None:
    """The rank whose frames are shown first: the requested one, else the verdict's, else any."""
    wanted = rank if rank is not None else report.named
    if wanted is None:
        return next((r for r in report.ranks if r.frames), None)
    return next((r for r in report.everyone if r.rank == wanted and r.frames), None)


def side_by_side(report: RunReport, shown: RankReport, most_ranks: int, most_rows: int) -> SideBySide | None:
    """None if there is no other rank to compare with."""
    if not shown.frames_comparable:
        return None
    others = [r for r in report.ranks if r.frames and r.frames_comparable and r is not shown]
    columns = [shown, *others[: most_ranks - 1]]
    if len(columns) < 2:
        return None
    by_rank = [{frame_key(frame): frame for frame in rank.frames} for rank in columns]
    return SideBySide(
        "outputs" if all(frame.phase == FramePhase.FORWARD for frame in shown.frames) else "outputs and gradients",
        shown.frames[-1].batch,
        columns,
        [
            SideBySideRow(_title(frame), frame.module, [cell_of(frames.get(frame_key(frame))) for frames in by_rank])
            for frame in shown.frames[-most_rows:]
        ],
        len(others) - (len(columns) - 1),
    )


def can_be_compared(report: RunReport) -> bool:
    """Whether modules of two ranks can stand side by side."""
    if report.by_module is not None and len(report.by_module.ranks) > 1:
        return True
    shown = rank_to_show(report)
    return shown is not None and side_by_side(report, shown, 2, 1) is not None


def frame_key(frame: Frame) -> tuple[str, str, str | int]:
    """Identifies the same frame on two ranks. Gradients come in another order on each rank."""
    by_index = frame.phase == FramePhase.FORWARD or not frame.rows
    return frame.module, frame.phase, frame.index if by_index else frame.rows[0].role


def _title(frame: Frame) -> str:
    if frame.phase == FramePhase.LOSS:
        return frame.module
    title = f"{frame.module or '(root)'} {frame.cls}"
    if frame.phase != FramePhase.FORWARD:
        title += f" {frame.rows[0].role if len(frame.rows) == 1 else f'({frame.phase})'}"
    return title


def cell_of(frame: Frame | None) -> ModuleCell:
    """abs max over the outputs of a forward, over all rows of another frame."""
    if frame is None:
        return ModuleCell("-")
    rows = frame.outputs if frame.phase in (FramePhase.FORWARD, FramePhase.RECOMPUTE) else frame.rows
    rows = [row for row in rows if row.kind == RowKind.MEASURED]
    if not rows:
        return ModuleCell("-")
    for name, bad in (("nan", any(r.nan for r in rows)), ("inf", any(r.posinf or r.neginf for r in rows))):
        if bad:
            return ModuleCell(name, True)
    largest = max(rows, key=lambda row: row.abs_max or 0.0)
    return ModuleCell(format_number(largest.abs_max or 0.0), False, largest.abs_max or 0.0, largest.headroom)


# A report with the frames of some modules only.


def only_modules(report: RunReport, pattern: str) -> RunReport | None:
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


# The ranks' stacks when they were asked for their positions.

_MOST_THREADS = 6
_MOST_CALLS = 12
"""Most lines of each stack in the text. report.json has more."""


class RankStack(NamedTuple):
    """A rank's calls, innermost first, and what its other threads do."""

    rank: int
    stack: list[str]
    threads: list[str]


StackGroups = list[tuple[list[str], list[RankReport | RankStack]]]
"""(stack, the ranks that stand there)"""


def stacks_of(ranks: Iterable[RankReport | RankStack]) -> StackGroups:
    """Ranks that stand at the same place share one stack."""
    alike = grouped((rank for rank in ranks if rank.stack), lambda rank: tuple(rank.stack))
    return [(list(stack), found) for stack, found in alike.items()]


def stacks_text(ranks: Iterable[RankReport | RankStack], most: int = _MOST_CALLS) -> Iterator[str]:
    """Lines: at most that many of each stack, as Python prints them, with the innermost call last."""
    for stack, alike in stacks_of(ranks):
        names = ranks_text(rank.rank for rank in alike)
        further = "" if is_users(stack[0]) else "further "
        yield f"Stack of {names}, innermost call last ({further}calls inside torch are left out)"
        calls = own_lines(stack)
        if len(calls) > most:
            yield f"  ... {len(calls) - most} outer calls"
        yield from (f"  {line}" for line in reversed(calls[:most]))
        threads = next((rank.threads for rank in alike if rank.threads), [])
        yield from (f"  other {line}" for line in threads[:_MOST_THREADS])


def own_lines(stack: list[str]) -> list[str]:
    """The innermost call, and below it the user's own lines; [] of an empty stack."""
    return list(dict.fromkeys([*stack[:1], *(line for line in stack if is_users(line))]))
