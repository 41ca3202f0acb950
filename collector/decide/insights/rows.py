"""From rows near overflow or in underflow, and from the steps that a GradScaler skipped."""

from __future__ import annotations

from collections.abc import Iterator

from ....core.frames import Mark, format_number
from ....core.records import Warned
from ....core.roles import GRADIENTS, parse_role
from ....core.values import DTYPE_MAX
from ...facts.facts import RankFacts
from ..notices import share_text
from .insight import Insight, modules_text, where_text

MANY_SKIPS = 5
"""Steps in a row. A scaler that settles skips one or two."""
_SMALL_SCALE = 1.0
_MOST_PAGES = 4
"""Of the ranks' pages so many are searched for gradients that a GradScaler checks."""

Group = list[tuple[int, Warned]]


def scaler_collapsing(ranks: list[RankFacts]) -> Iterator[Insight]:
    """Many skipped steps in a row, or a scale that has nothing left to give."""
    bad = {
        rank.rank: skip
        for rank in ranks
        for skip in rank.scaler_skips
        if skip.in_a_row >= MANY_SKIPS or skip.scale < _SMALL_SCALE
    }
    if not bad:
        return
    worst = max(bad.values(), key=lambda skip: (skip.in_a_row, -skip.scale))
    modules = list(dict.fromkeys(skip.module for skip in bad.values() if skip.module))
    first = f"; the first bad gradient was {worst.value} in {worst.role} of `{worst.module}`" if worst.module else ""
    yield Insight(
        "scaler_collapsing",
        f"GradScaler skipped {worst.in_a_row} steps in a row {where_text(bad, [r.rank for r in ranks])}, its scale was "
        f"down to {worst.scale:g}{first}",
        "A scale that only falls means gradients that are inf or nan at any scale: look at that module's backward.",
        sorted(bad),
        modules,
        min(skip.where.batch for skip in bad.values()),
    )


def warned_rows(ranks: list[RankFacts]) -> Iterator[Insight]:
    """One for each kind and dtype, of gradients and of outputs apart."""
    groups: dict[tuple[str, str, bool], Group] = {}
    for rank in ranks:
        for warned in rank.warned:
            is_gradient = parse_role(warned.role).kind in GRADIENTS
            groups.setdefault((warned.kind, warned.dtype, is_gradient), []).append((rank.rank, warned))
    everyone = [rank.rank for rank in ranks]
    for (kind, dtype, is_gradient), group in sorted(groups.items()):
        if kind == "near overflow":
            yield _near_overflow(group, dtype, is_gradient, everyone)
        else:
            yield _underflow(group, dtype, is_gradient, everyone, _scaler(ranks))


def _scaler(ranks: list[RankFacts]) -> bool | None:
    """Whether a GradScaler is in use; None where no gradient was received that could tell."""
    if any(rank.skipped_steps for rank in ranks):
        return True
    seen = False
    pages = [page for rank in ranks for page in rank.pages.values() if page.has_backward]
    for page in pages[:_MOST_PAGES]:
        for frame in page.frames:
            if frame.phase == "backward":
                for row in frame.rows:
                    if row.mark & Mark.SCALED:
                        return True
                    seen = True
    return False if seen else None


def _near_overflow(group: Group, dtype: str, is_gradient: bool, everyone: list[int]) -> Insight:
    modules = _modules(group)
    number, worst = min(
        group, key=lambda entry: (entry[1].headroom if entry[1].headroom is not None else 1e9, entry[0])
    )
    what = "gradients" if is_gradient else "outputs"
    largest = format_number(worst.abs_max).strip()
    limit = format_number(DTYPE_MAX[dtype]).strip() if dtype in DTYPE_MAX else "its limit"
    return Insight(
        "near_overflow",
        f"{what} of {modules_text(modules)} came close to {dtype}'s limit of {limit} {_where(group, everyone)}; the "
        f"first time at {largest} in {worst.role} of `{worst.module}`, rank {number}, batch {worst.where.batch}",
        "Compute these modules in bfloat16 or float32, or keep their values from growing.",
        _ranks(group),
        modules,
        _since(group),
    )


def _underflow(group: Group, dtype: str, is_gradient: bool, everyone: list[int], scaler: bool | None) -> Insight:
    modules = _modules(group)
    lost = max(max(warned.subnormals or 0.0, warned.zeros or 0.0) for _, warned in group)
    what = "gradients" if is_gradient else "outputs"
    text = (
        f"{what} of {modules_text(modules)} lie below {dtype}'s smallest normal number {_where(group, everyone)}, up "
        f"to {share_text(lost)} of their elements"
    )
    kind, next_ = "underflow", "Compute these modules in bfloat16 or float32, which reach further down."
    if is_gradient and dtype == "float16" and scaler is not True:
        kind = "no_scaler"
        text += ": no GradScaler is in use" if scaler is False else ": no GradScaler was seen"
        next_ = "Scale the loss (torch.amp.GradScaler), or compute in bfloat16."
    elif is_gradient and scaler:
        kind, next_ = "scaler_too_small", "The GradScaler's scale is too small for them: look at why it does not grow."
    return Insight(kind, text, next_, _ranks(group), modules, _since(group))


def _where(group: Group, everyone: list[int]) -> str:
    return f"{where_text(_ranks(group), everyone)} since batch {_since(group)}"


def _modules(group: Group) -> list[str]:
    return list(dict.fromkeys(warned.module for _, warned in group))


def _ranks(group: Group) -> list[int]:
    return sorted({number for number, _ in group})


def _since(group: Group) -> int:
    return min(warned.where.batch for _, warned in group)
