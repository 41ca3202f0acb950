"""What a verdict on a peer's program is worth. Nothing here runs anything."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from gpuwatch.core.codes import ExitCode
from gpuwatch.tests.peers.programs import KnownFault, PeerProgram

PLACES = ("script",)
"""Kinds of cause that name the first bad variable and its line. The advice beside it may name the operation."""


class PeerGrade(Enum):
    """In the order of the table."""

    RIGHT = "right"
    LESS = "less"
    """It names the rank and the bad number, and neither its operation nor its cause; of a healthy program it says that
    it has seen nothing.
    """
    MISSED = "missed"
    """There was a bad number, and the verdict is clean or unknown."""
    WRONG = "wrong"
    OVER_SURE = "over-sure"
    FALSE_ALARM = "false alarm"
    CHANGED = "changed"
    """Weights, random numbers, steps or the exit code differ from the run without gpuwatch."""
    NOT_IN_SCOPE = "not in scope"
    NOT_RUN = "not run"
    """The program fails without gpuwatch, too."""

    @property
    def is_fault(self) -> bool:
        return self in (PeerGrade.WRONG, PeerGrade.OVER_SURE, PeerGrade.FALSE_ALARM, PeerGrade.CHANGED)


class EndedRun(NamedTuple):
    """One run of a program."""

    code: int
    records: list[dict[str, Any]]
    """What start.py wrote, a rank each."""
    report: dict[str, Any] | None
    log: str
    seconds: float = 0.0


class GradedRun(NamedTuple):
    program: PeerProgram
    grade: PeerGrade
    said: str
    log: str = ""
    seconds: tuple[float, float] | None = None
    """From start to exit: without gpuwatch, and with it."""

    @property
    def line(self) -> str:
        """`GRIST ID 38, searched: less: Rank 0 ...`"""
        return f"{self.program.source or 'rewritten'} {self.program.name}: {self.grade.value}: {self.said}"


def grade(program: PeerProgram, alone: EndedRun, watched: EndedRun | None) -> GradedRun:
    """Compare a run under gpuwatch with the one without, and its verdict with what is known of the program."""
    if watched is None or not alone.records:
        return GradedRun(program, PeerGrade.NOT_RUN, f"exit code {alone.code} without gpuwatch", alone.log)
    if watched.report is None:
        return GradedRun(program, PeerGrade.WRONG, f"no report, exit code {watched.code}", watched.log)
    verdict = watched.report["verdict"]
    has_bad = program.fault is KnownFault.NUMBER or any(record["bad"] is not None for record in alone.records)
    if not has_bad:
        return _of_healthy(program, alone, watched, watched.report)
    found, said = _of_bad_number(program, verdict)
    return GradedRun(program, found, said, "" if found is PeerGrade.RIGHT else json.dumps(verdict, indent=1))


def _of_healthy(program: PeerProgram, alone: EndedRun, watched: EndedRun, report: dict[str, Any]) -> GradedRun:
    verdict = report["verdict"]
    if verdict["kind"] not in ("clean", "unknown"):
        return GradedRun(program, PeerGrade.FALSE_ALARM, text_of(verdict), watched.log)
    changes = [
        name
        for name in ("steps", "weights", "leaves", "random")
        if [record[name] for record in alone.records] != [record[name] for record in watched.records]
    ]
    own_code = ExitCode.UNKNOWN if verdict["kind"] == "unknown" else alone.code  # as docs/report.md says
    if watched.code != own_code or changes:
        what = ", ".join(changes) or f"exit code {watched.code}"
        return GradedRun(program, PeerGrade.CHANGED, what, watched.log)
    found = PeerGrade.RIGHT if verdict["kind"] == "clean" else PeerGrade.LESS
    silent = program.fault is KnownFault.SILENT
    remarks = "".join(f" Remark {each['code']}: {each['text']}." for each in report["insights"])
    return GradedRun(program, PeerGrade.NOT_IN_SCOPE if silent else found, text_of(verdict) + remarks)


def _of_bad_number(program: PeerProgram, verdict: dict[str, Any]) -> tuple[PeerGrade, str]:
    said = text_of(verdict)
    cause = verdict.get("cause")
    if verdict["kind"] != "overflow":
        sure = verdict["certainty"] == "established" and verdict["kind"] != "clean"
        return (PeerGrade.OVER_SURE if sure else PeerGrade.MISSED), said
    if cause is None:
        return (PeerGrade.LESS if program.kinds else PeerGrade.RIGHT), said
    if cause["kind"] not in (*program.kinds, *PLACES):
        return (PeerGrade.OVER_SURE if cause["certainty"] == "established" else PeerGrade.WRONG), said
    if cause["kind"] in PLACES:
        said = " ".join([said, *(f"Next: {step}" for step in verdict["next"][:2])])
    return (PeerGrade.RIGHT if re.search(program.says, said) else PeerGrade.LESS), said


def text_of(verdict: dict[str, Any]) -> str:
    """What a reader is told in two lines: the statement, and the cause with its kind and certainty."""
    cause = verdict.get("cause")
    lines = [verdict["statement"]]
    if cause is not None:
        lines.append(f"[{cause['kind']}, {cause['certainty']}] {cause['statement']}")
    return " ".join(" ".join(lines).split())


def table_of(found: Sequence[GradedRun]) -> str:
    """A row for each source, as docs/accuracy.md has it."""
    head = [grade.value for grade in PeerGrade]
    lines = [
        f"| source | programs | {' | '.join(head)} | seconds, median: alone | watched |",
        f"|---|---|{'---|' * (len(head) + 2)}",
    ]
    for source in dict.fromkeys(graded.program.source for graded in found):
        of_it = [graded for graded in found if graded.program.source == source]
        lines.append(_row(source or "rewritten", of_it))
    return "\n".join([*lines, _row("**all**", found)])


def _row(name: str, graded: Sequence[GradedRun]) -> str:
    counted = Counter(each.grade for each in graded)
    timed = [each.seconds for each in graded if each.seconds is not None]
    times = [f"{statistics.median(seconds):.1f}" for seconds in zip(*timed, strict=True)] or ["-", "-"]
    return f"| {name} | {len(graded)} | {' | '.join([*(str(counted[grade]) for grade in PeerGrade), *times])} |"
