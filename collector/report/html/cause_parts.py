"""What the page shows of a cause: the batch's samples as a strip, and what was tried as a table. Pure."""

from __future__ import annotations

from typing import NamedTuple

from ....core.events.alarm_evidence import CauseTrial, OddSamples
from ....core.frames import format_number
from ....core.text import numbers_text
from ..sentence_parts import counted
from ..verdict import OverflowCause

_MOST_CELLS = 128
_OF = {"operation": "the operation alone", "forward": "the forward"}
_CHANGED = {"nothing": "nothing", "samples": "samples that stand out replaced by another"}
"""Of others: a dtype in which it was computed."""


class SampleStrip(NamedTuple):
    """The rows of a batch along dim 0, those that stand out marked. The record has one number for all others."""

    title: str
    description: str
    cells: list[tuple[int, str, str]]
    """(index, `odd` or "", what is known of it); [] of a batch that is too long for a strip."""


class TrialRow(NamedTuple):
    """A trial in words."""

    of: str
    changed: str
    came: str


def sample_strip(cause: OverflowCause | None) -> SampleStrip | None:
    """None where the cause is no sample's."""
    odd = cause.sample if cause is not None else None
    if odd is None:
        return None
    texts = {True: f"abs max {_number(odd.abs_max)}", False: f"abs max at most {_number(odd.highest)}"}
    marked = set(odd.indices)
    cells = [(row, "odd" if row in marked else "", f"row {row}: {texts[row in marked]}") for row in range(odd.size)]
    title = f"{counted(odd.size, 'row')} of this batch, {odd.role}"
    return SampleStrip(title, _description(odd, texts), cells if odd.size <= _MOST_CELLS else [])


def _description(odd: OddSamples, texts: dict[bool, str]) -> str:
    rows = f"row{'s' if len(odd.indices) > 1 else ''} {numbers_text(odd.indices)}"
    before = f"; the batches before: at most {_number(odd.before)}" if odd.before is not None else ""
    return f"{rows}: {texts[True]}; the others: {texts[False]}{before}"


def trial_rows(cause: OverflowCause | None) -> list[TrialRow]:
    """In their order."""
    return [
        TrialRow(_OF.get(each.of, each.of), _CHANGED.get(each.changed, f"computed in {each.changed}"), _came(each))
        for each in (cause.trials if cause is not None else [])
    ]


def _came(trial: CauseTrial) -> str:
    if not trial.value:
        return f"did not run: {trial.note}" if trial.note else "did not run"
    return f"finite, abs max {_number(trial.abs_max)}" if trial.value == "finite" else trial.value


def _number(number: float | None) -> str:
    return format_number(number).strip()
