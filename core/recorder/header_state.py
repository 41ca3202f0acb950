"""What a recorder's header says of its rank, as a beat has it. Any of its numbers may be damaged."""

from __future__ import annotations

import time
from typing import Any, get_args

from msgspec.structs import replace

from ..events.definitions import ModuleDef
from ..wire.beat import HooksText, RankState
from . import layout
from .layout import AnomalyFlag, HeadField, HooksState, RankPhase

_HOOKS: dict[int, HooksText] = dict(zip(HooksState, get_args(HooksText), strict=True))
SEEN = (AnomalyFlag.SEEN, AnomalyFlag.WRITTEN)
"""The rank has seen an anomaly, readable or not."""
_MOST_PID = 1 << 22
_COUNTED = (
    HeadField.RECORDS_LOST,
    HeadField.ROWS_LOST,
    HeadField.ROWS_INTERRUPTED,
    HeadField.IGNORED,
    HeadField.SCALER_SKIPS,
    HeadField.WARNED,
    HeadField.BATCHES_SKIPPED,
    HeadField.ABSORBED,
    HeadField.FAULTS,
    HeadField.NAMES_LOST,
    HeadField.CALLS_LEFT_OUT,
    HeadField.HOOKS_GONE,
    HeadField.UNSEEN_CHILD,
    HeadField.CALLING_CHILD,
)
"""Fields that are never below 0."""
_SHOWN_AS_THEY_ARE = {
    name: HeadField[name.upper()]
    for name in RankState.__struct_fields__
    if name.upper() in HeadField.__members__ and name != "steps_timed"
}
"""Fields that RankState has by the same name. Its count of timed steps is of those that the agent has taken."""


def _phase(number: int) -> RankPhase:
    return RankPhase(number) if number in RankPhase._value2member_map_ else RankPhase.STARTING


def is_garbage(fields: tuple[int, ...]) -> bool:
    """Whether the head says what no writer writes: it accuses nobody, and something was lost."""
    return (
        any(fields[field] not in known for field, known in layout.SEALED.items())
        or any(fields[field] < 0 for field in _COUNTED)
        or max(fields[HeadField.UNSEEN_CHILD], fields[HeadField.CALLING_CHILD]) > _MOST_PID
    )


def _process_id(number: int) -> int:
    return number if 0 <= number <= _MOST_PID else 0


def state_of(fields: tuple[int, ...], rank: int, attempt: int, module: ModuleDef | None, damaged: int) -> RankState:
    """The state of a rank for a beat. `fields`: the integers of the header; `damaged`: entries of the log."""
    as_they_are: dict[str, Any] = {name: fields[field] for name, field in _SHOWN_AS_THEY_ARE.items()}
    return replace(
        RankState(**as_they_are),
        rank=rank,
        attempt=attempt,
        phase=_phase(fields[HeadField.PHASE]).name.lower(),
        module=module.name if module is not None else None,
        cls=module.cls if module is not None else None,
        records_lost=fields[HeadField.RECORDS_LOST] + damaged + is_garbage(fields),
        age_s=max(0.0, (time.monotonic_ns() - fields[HeadField.MOVED_NS]) / 1e9),
        hooks=_HOOKS.get(fields[HeadField.HOOKS], "none"),
        overflow=fields[HeadField.ANOMALY] in SEEN,
        unseen_child=_process_id(fields[HeadField.UNSEEN_CHILD]),
        calling_child=_process_id(fields[HeadField.CALLING_CHILD]),
        left=fields[HeadField.LEFT] == layout.seal(1),
        passed_unseen=fields[HeadField.PASSED_UNSEEN] != layout.seal(0),
        has_frames=fields[HeadField.HAS_FRAMES] > 0,
        groups_not_shown=max(0, fields[HeadField.GROUPS_NOT_SHOWN]),
    )
