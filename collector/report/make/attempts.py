"""The other attempts of a job that torchrun restarted, and its earlier lives under the scheduler: a line for each."""

from __future__ import annotations

from ...decide.ending.verdict import ending_text
from ...decide.hang.verdict import hang_verdict
from ...decide.overflow.order import earliest
from ...decide.words import found_text
from ...facts.facts import RunFacts
from ..model import AttemptReport


def other_attempts(facts: RunFacts, attempt: int) -> list[AttemptReport]:
    """How every attempt but this one ended, in their order."""
    numbers = sorted({number for number, _ in facts.ranks} - {attempt})
    return [_report(facts, number) for number in numbers]


def _report(facts: RunFacts, attempt: int) -> AttemptReport:
    hang = hang_verdict(facts, attempt)
    if hang is not None and not any(rank.diagnosis is not None for rank in facts.of_attempt(attempt)):
        return AttemptReport(attempt, hang.statement, hang)
    return AttemptReport(attempt, _statement(facts, attempt))


def _statement(facts: RunFacts, attempt: int) -> str:
    diagnoses = [rank.diagnosis for rank in facts.of_attempt(attempt) if rank.diagnosis is not None]
    if diagnoses:
        first = earliest(diagnoses)[0]
        return f"rank {first.rank}: {found_text(first)}, batch {first.batch}"
    return ending_text(facts, attempt)
