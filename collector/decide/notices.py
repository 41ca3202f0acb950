"""What is worth telling beside the verdict: values near trouble, skipped steps, waived rows, the cost of watching."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ...core.events import IgnoredAlarm, RangeWarning
from ...core.frames import FramePhase, format_number
from ..report.sentence_parts import coarse_share_text

if TYPE_CHECKING:
    from ..facts.facts import RankFacts


def worst_first(warnings: list[tuple[int, RangeWarning]]) -> list[tuple[int, RangeWarning]]:
    """(rank, warning), the one with the least room first, and near overflow before underflow."""

    def badness(entry: tuple[int, RangeWarning]) -> tuple[Any, ...]:
        number, warned = entry
        near = warned.kind == "near overflow"
        lost = max(warned.subnormals or 0.0, warned.zeros or 0.0)
        left = warned.headroom if warned.headroom is not None else 1e9
        return (not near, left if near else -lost, number, warned.where.page, warned.module, warned.role)

    return sorted(warnings, key=badness)


def warning_text(warned: RangeWarning) -> str:
    """`near overflow: output of up (Linear) in batch 3: abs max 6.20e+04, 0.1 powers of two below float16's limit`."""
    phase = "" if warned.phase == FramePhase.FORWARD else f", {warned.phase}"
    place = f"{warned.role} of {warned.module or 'the root'} ({warned.cls}{phase}) in batch {warned.where.batch}"
    return f"{warned.kind}: {place}: {amount_text(warned)}"


def amount_text(warned: RangeWarning) -> str:
    """How close it was."""
    if warned.kind == "near overflow" and warned.headroom is not None:
        largest = format_number(warned.abs_max).strip()
        return f"abs max {largest}, {warned.headroom:.1f} powers of two below {warned.dtype}'s limit"
    shares = []
    if warned.subnormals:
        shares.append(f"{coarse_share_text(warned.subnormals)} subnormal")
    if warned.zeros:
        shares.append(f"{coarse_share_text(warned.zeros)} zeros")
    return f"{', '.join(shares) or 'lost precision'} in {warned.dtype}"


def warnings_of(rank: RankFacts) -> list[dict[str, Any]]:
    """For report.json, worst first."""
    return [
        {
            "kind": warned.kind,
            "module": warned.module,
            "class": warned.cls,
            "phase": warned.phase,
            "role": warned.role,
            "dtype": warned.dtype,
            "abs_max": warned.abs_max,
            "headroom": warned.headroom,
            "zeros": warned.zeros,
            "subnormals": warned.subnormals,
            "batch": warned.where.batch,
            "step": warned.where.step,
        }
        for _, warned in worst_first([(rank.rank, warned) for warned in rank.warned])
    ]


def scaler_of(rank: RankFacts) -> dict[str, Any] | None:
    """For report.json: what a GradScaler skipped, and where the first bad gradient was."""
    if not rank.skipped_steps:
        return None
    skips = rank.scaler_skips
    first = skips[0] if skips else None
    return {
        "skips": rank.skipped_steps,
        "last_scale": skips[-1].scale if skips else None,
        "in_a_row": max((skip.in_a_row for skip in skips), default=None),
        "module": first.module if first is not None else None,
        "class": first.cls if first is not None else None,
        "role": first.role if first is not None else None,
        "value": first.value if first is not None else None,
        "batch": first.where.batch if first is not None else None,
    }


def waived_of(rank: RankFacts) -> list[dict[str, Any]]:
    """For report.json: the first waived row of each rule and place."""
    found: dict[tuple[str, str, str], IgnoredAlarm] = {}
    for ignored in rank.ignored:
        found.setdefault((ignored.pattern, ignored.module, ignored.role), ignored)
    return [
        {
            "pattern": ignored.pattern,
            "module": ignored.module,
            "role": ignored.role,
            "value": ignored.value,
            "batch": ignored.where.batch,
        }
        for ignored in found.values()
    ]


def absorbed_of(rank: RankFacts) -> list[dict[str, Any]]:
    """For report.json: the first bad value of each module and role that led nowhere."""
    return [
        {
            "module": absorbed.module,
            "class": absorbed.cls,
            "role": absorbed.role,
            "value": absorbed.value,
            "dtype": absorbed.dtype,
            "by": absorbed.by,
            "why": absorbed.why,
            "batch": absorbed.where.batch,
        }
        for absorbed in rank.absorbed
    ]


def cost_of(rank: RankFacts) -> dict[str, Any] | None:
    """For report.json: medians of the time from one batch to the next."""
    cost = rank.cost
    if cost is None:
        return None
    found: dict[str, Any] = msgspec.structs.asdict(cost)
    del found["where"]
    found["ratio"] = cost.watched_ns / cost.plain_ns if cost.plain_ns > 0 else None
    return found


def passed_of(rank: RankFacts) -> list[dict[str, Any]]:
    """What was not finite and passed between this rank and others, the earliest first."""
    return [
        {"step": one.where.step, "batch": one.where.batch}
        | {name: getattr(one, name) for name in one.__struct_fields__ if name != "where"}
        for one in rank.passed
    ]
