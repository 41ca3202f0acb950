"""What was really called, and what may be said of it: clean implies that every call of every process was judged."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuwatch.collector.report.verdict import Verdict


@dataclass
class Call:
    """One module call of a job."""

    rank: int
    who: str
    """`rank 1, attempt 0, batch 2`, or the thread or child that made it."""
    judged: bool = False
    """Its numbers were inspected, and an alarm was raised if they were bad."""
    bad: bool = False
    skipped: bool = False
    """`--every` left it out, as the user wanted."""
    returned: bool = True
    """False: its process ended within it, and nothing came of it."""
    in_child: bool = False
    """A child process made it, which trains nothing."""


@dataclass
class Oracle:
    """Every call that there was."""

    calls: list[Call] = field(default_factory=list)

    def call(self, rank: int, who: str, *, bad: bool = False) -> Call:
        """A call that has begun."""
        made = Call(rank, who, bad=bad)
        self.calls.append(made)
        return made

    def against(self, verdict: Verdict) -> str:
        """Why a verdict cannot be true; "" if it can."""
        bad = [call.who for call in self.calls if call.bad]
        if verdict.kind == "overflow":
            ranks = {call.rank for call in self.calls if call.bad}
            return "" if verdict.rank in ranks or (ranks and verdict.rank is None) else f"not so: {verdict.statement}"
        if verdict.kind != "clean":
            return ""
        if bad:
            return f"bad values in {bad}, and it is told: {verdict.statement}"
        skips_said = "inspected" in verdict.statement or "skipped)" in verdict.statement
        child_said = verdict.certainty != "established" and "was not watched" in verdict.statement
        unseen = [
            call.who
            for call in self.calls
            if call.returned
            and not call.judged
            and not (call.skipped and skips_said)
            and not (call.in_child and child_said)
        ]
        if unseen:
            return f"nobody has judged {unseen}, and it is told: {verdict.statement}"
        return "" if self.calls else f"nothing was called, and it is told: {verdict.statement}"
