"""Whether earlier runs of the folder ended as this one, or named the same GPU or node. Pure."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence

import msgspec

from ...core.verdicts import VerdictKind
from ..report.model import RunReport, Verdict

_NOTHING_TO_COMPARE = frozenset({VerdictKind.CLEAN, VerdictKind.INTERRUPTED, VerdictKind.UNKNOWN})
_ORDINALS = ("second", "third", "fourth", "fifth")
_MOST_NAMED = 3
_CALL = re.compile(r'^ *File "(?:.*/)?(.*)", line \d+, in (.*)(?:\n +(.*))?', re.MULTILINE)
"""A call of a traceback: the file's name, the function, the source."""


class RunOutcome(msgspec.Struct, frozen=True):
    """How a run ended, in few words: `verdict.json` of its folder."""

    run: str
    ended: str | None
    exit_code: int
    kind: VerdictKind
    certainty: str
    statement: str
    rank: int | None = None
    host: str | None = None
    gpu: str | None = None
    module: str | None = None
    phase: str | None = None
    fingerprint: str = ""
    """What runs with the same fault have in common, 8 hexadecimal digits; "" where nothing is wrong or known."""
    nodes: int = 1
    bad_nodes: list[str] = []
    """The nodes that the verdict blames, by the scheduler's names."""

    @property
    def device(self) -> str:
        """`GPU-1234 of gpu-2`, or the node among several; "" is unknown."""
        return f"{self.gpu} of {self.host}" if self.gpu else (self.host or "") if self.nodes > 1 else ""


def outcome_of(report: RunReport, exit_code: int) -> RunOutcome:
    """`exit_code` is that of the launches."""
    run, verdict = report.run, report.verdict
    said = (verdict.kind, verdict.certainty, verdict.statement, verdict.rank, verdict.host, verdict.gpu)
    place = (verdict.module, verdict.phase, fingerprint_of(report), run.nnodes, verdict.bad_nodes)
    return RunOutcome(run.id, run.ended, exit_code, *said, *place)


def fingerprint_of(report: RunReport) -> str:
    """From the kind and the place of the verdict, without ranks, batches and other numbers.

    The place is the model, module, phase and role; of an exception its type and the line that raised it; else it is the
    statement.
    """
    verdict = report.verdict
    if verdict.kind in _NOTHING_TO_COMPARE:
        return ""
    place = [verdict.root, verdict.module, verdict.phase, verdict.role]
    if verdict.module is None:
        errors = (rank.error for rank in report.everyone if rank.rank == report.named and rank.error)
        error = next(errors, None)
        calls = _CALL.findall(str(error.get("traceback", ""))) if error is not None else []
        raised = [str(error.get("type", "")), *(calls[-1] if calls else ())] if error is not None else []
        place = [*(raised or [_without_numbers(verdict)]), verdict.stage]
    return hashlib.sha256("\0".join(part or "" for part in (verdict.kind, *place)).encode()).hexdigest()[:8]


def _without_numbers(verdict: Verdict) -> str:
    """The statement without the numbers and the host in it."""
    return re.sub(r"[0-9][0-9., -]*", "#", verdict.statement.replace(verdict.host or "\0", "#"))


def seen_before(outcome: RunOutcome, earlier: Sequence[RunOutcome]) -> list[str]:
    """Sentences; `earlier` are runs of the same folder, the latest first."""
    lines = []
    alike = [other for other in earlier if outcome.fingerprint and other.fingerprint == outcome.fingerprint]
    if alike:
        where = f"{_times(alike)} at the same place, as in {_named(alike)}"
        lines.append(f"{where}. All of them: gpuwatch runs --like {outcome.run}")
    there = [other for other in earlier if outcome.device and other.device == outcome.device and other.fingerprint]
    if outcome.fingerprint and there:
        lines.append(f"{_times(there)} on {outcome.device}, as in {_named(there)}")
    return lines


def blamed_in(earlier: Sequence[RunOutcome]) -> Counter[str]:
    """How many of these runs blame each node."""
    return Counter(node for other in earlier for node in other.bad_nodes)


def _times(others: Sequence[RunOutcome]) -> str:
    number = len(others)
    return f"For the {_ORDINALS[number - 1]} time" if number <= len(_ORDINALS) else f"For the {number + 1}th time"


def _named(others: Sequence[RunOutcome]) -> str:
    names = [f"run {other.run}" + (f" ({other.ended[:10]})" if other.ended else "") for other in others[:_MOST_NAMED]]
    return ", ".join(names) + (f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else "")
