"""The lines that show the progress of the preflight, from the facts so far. No clock, no pipe."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.events.preflight_events import PreflightBegan, PreflightResult, PreflightStage
from ..core.wire.messages import AgentBody, AgentHello, EventMessage
from ..core.wire.pipe import PreflightOver, StageLine
from .decide.preflight_verdict import finding_line, findings_of, seconds_of, stage_order, worst
from .ends.missing_nodes import unheard_hosts
from .facts.fold import FactFold
from .facts.rank_facts import RankFacts
from .report.sentence_parts import counted

_MAX_WARNINGS = 8


@dataclass
class StageLines:
    """The preflight of the first attempt. Those of later attempts are in the report alone."""

    _folded: FactFold
    _told: dict[str, StageLine] = field(default_factory=dict)
    _is_new: bool = False
    """Something was heard since the last call of `due`."""
    _is_over: bool = False

    def __post_init__(self) -> None:
        results, ranks = self._results, self._folded.as_it_stands().ranks
        self._is_over = 0 < len(ranks) <= len(results)  # an earlier collector of this run has told it

    def on_message(self, body: AgentBody) -> None:
        """One message that came in, and that is or will be folded."""
        event = body.event if isinstance(body, EventMessage) else None
        self._is_new |= isinstance(body, AgentHello) or isinstance(
            event, PreflightBegan | PreflightStage | PreflightResult
        )

    @property
    def _ranks(self) -> list[RankFacts]:
        return self._folded.as_it_stands().of_attempt(0)

    @property
    def _results(self) -> list[PreflightResult]:
        return [rank.preflight for rank in self._ranks if rank.preflight is not None]

    @property
    def _expected(self) -> int:
        """The expected number of ranks, as far as it is known."""
        hellos = self._folded.as_it_stands().hellos
        known = sum(hello.nproc for hello in hellos)
        expected = max((hello.nproc * hello.min_nodes for hello in hellos), default=0)
        return max(known, expected, sum(bool(rank.begun or rank.stages) for rank in self._ranks))

    def due(self) -> list[StageLine | PreflightOver]:
        """The lines that have changed since the last call, in the order of the stages."""
        is_new, self._is_new = self._is_new, False
        if self._is_over or not is_new:
            return []
        if (results := len(self._results)) and results >= self._expected:
            return self.end()
        return list(self._changed(over=False))

    def end(self) -> list[StageLine | PreflightOver]:
        """The last lines: the preflight is over."""
        if self._is_over:
            return []
        self._is_over = True
        return [*self._changed(over=True), self._last()]

    def _changed(self, *, over: bool) -> list[StageLine]:
        ranks, expected = self._ranks, self._expected
        lines = []
        stages = {e.stage for rank in ranks for e in rank.begun} | {e.stage for rank in ranks for e in rank.stages}
        furthest = max(map(stage_order, stages), default=0)
        for name in sorted(stages, key=stage_order):
            ended = {rank.rank: event for rank in ranks for event in rank.stages if event.stage == name}
            begun = {rank.rank for rank in ranks if any(event.stage == name for event in rank.begun)} | ended.keys()
            # the common finding of a stage is known when the ranks begin the next one, or end
            finished = over or (len(ended) >= expected and stage_order(name) < furthest)
            grade = ""
            if finished:
                grades = [event.grade for event in ended.values()]
                grades += [finding.grade for finding in findings_of(ranks) if finding.stage == name]
                if len(begun) > len(ended):  # a stage that a rank never ended has failed or is unknown
                    failed = any(result.outcome == "failed" and result.stage == name for result in self._results)
                    grades.append("fail" if failed else "unknown")
                grade = worst(grades)
            # a rank that waits for the others has arrived
            done = len(begun if name == "arrive" and not finished else ended)
            seconds = round(max((event.seconds for event in ended.values()), default=0.0), 3)
            line = StageLine(name, done, expected, grade, seconds)
            known = self._told.get(name)
            if known != line and not (known is not None and known.grade and not over):
                self._told[name] = line
                lines.append(line)
        return lines

    def _last(self) -> PreflightOver:
        """One line for a launch that goes on to train. After a failed preflight or a check, the report says more."""
        results, facts = self._results, self._folded.as_it_stands()
        if not results:
            return PreflightOver()
        findings, outcomes = findings_of(self._ranks), {result.outcome for result in results}
        failed = ["fail"] if outcomes - {"ok", "skipped"} else []
        grade = worst(["ok", *(finding.grade for finding in findings), *failed])
        if facts.check_only or any(result.stops for result in results) or outcomes == {"skipped"}:
            return PreflightOver(grade)
        ranks, nodes = counted(self._expected, "rank"), counted(len(facts.hellos) + len(unheard_hosts(facts)), "node")
        noted = f", with {counted(len(findings), 'finding')}" if findings else ""
        if grade == "fail":
            noted = ", failed, and training starts anyway"
        text = f"preflight {grade}: {ranks} on {nodes} in {max(map(seconds_of, self._ranks)):.1f} s{noted}"
        lines = [f"  {finding_line(finding)}" for finding in findings[:_MAX_WARNINGS]]
        left = len(findings) - len(lines)
        return PreflightOver(grade, text, [*lines, *([f"  and {left} more in the report"] if left else [])])
