"""What the cause of an overflow is decided from, and the words for samples that stand out."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.events.alarm_evidence import BadOperation, BatchSource, OddSamples, SecondRun
from ...core.text import joined
from ..facts.diagnosis import LocalDiagnosis, number_text
from ..facts.replicas import OddWeight, WildWeight
from ..facts.run_facts import RunFacts

_MOST_SHOWN = 8


@dataclass(frozen=True)
class CauseClues:
    """What is known beside the diagnosis."""

    facts: RunFacts
    first: LocalDiagnosis
    odd: OddWeight | None = None
    """A copy of a weight that differs, and is blamed."""
    earlier: OddWeight | None = None
    """The same of a module that was called before, where the place of the value is another one."""
    wild: WildWeight | None = None
    large: tuple[str, str] | None = None
    """(place, abs max) of the largest weight of a model that has not been trained yet, if it is very large."""
    ran: SecondRun | None = None
    operation: BadOperation | None = None
    """The one that made the value."""


def samples_text(odd: OddSamples, source: BatchSource | None = None) -> str:
    """`row 6 of 8 (dim 0)`, `sample 6 of 8 (index 77 of data set `DS`)`: only a loader tells that dim 0 is samples."""
    more = f" and {len(odd.indices) - _MOST_SHOWN} more" if len(odd.indices) > _MOST_SHOWN else ""
    numbers = f"{'s' if len(odd.indices) > 1 else ''} {joined(odd.indices[:_MOST_SHOWN])}{more} of {odd.size}"
    if source is None:
        return f"row{numbers} (dim 0)"
    return f"sample{numbers} ({origin_text(source, odd.indices)})"


def origin_text(source: BatchSource, positions: list[int]) -> str:
    """`index 77 of data set `DS``, `__key__ shard/3 of data set `Stream``: the samples at these positions of dim 0."""
    lists = {"index": [str(index) for index in source.indices]} if source.indices else source.keys
    shown = {name: joined([values[each] for each in positions[:_MOST_SHOWN]]) for name, values in lists.items()}
    return f"{joined([f'{name} {text}' for name, text in shown.items()])} of data set `{source.dataset}`"


def source_of(clues: CauseClues, odd: OddSamples) -> BatchSource | None:
    """Where the samples of dim 0 of what the model was handed come from; None if that is not known for each.

    What a module inside of the model was handed may be in another order.
    """
    return source_of_rows(clues, odd.size) if not odd.module else None


def source_of_rows(clues: CauseClues, size: int) -> BatchSource | None:
    """Likewise, of an argument of the model with so many rows."""
    first = clues.first
    sources = clues.facts.one(first.attempt, first.rank).batch_sources
    found = next((each for each in sources if each.where.batch == first.batch), None)
    if found is None:
        return None
    known = [found.indices] if found.indices else list(found.keys.values()) if found.in_order else []
    return found if known and all(len(values) == size for values in known) else None


def odd_text(clues: CauseClues, odd: OddSamples) -> str:
    """Which samples stand out, and how."""
    where = f"in {odd.role} of `{odd.module}`" if odd.module else f"in {odd.role} of the model"
    one = len(odd.indices) == 1
    how = {
        "large": f"{'has' if one else 'have'} abs max {number_text(odd.abs_max)}",
        "zero": f"{'is' if one else 'are'} all zero",
        "constant": f"{'is' if one else 'are'} constant ({number_text(odd.abs_max)})",
    }[odd.how]
    samples = samples_text(odd, source_of(clues, odd))
    others = f"the others at most {number_text(odd.highest)}"
    return f"{samples} of this batch of rank {clues.first.rank} {how} {where}, {others}"
