"""The lines that show the progress of the preflight: a fold over messages, without clock or pipe.

hear(body) takes every message; due() returns the lines that have changed since its last call.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from ...core.events import PreflightBegan, PreflightResult, PreflightStage
from ...core.preflight import PreflightFinding
from ...core.wire.messages import AgentBody, AgentHello, EventMessage
from ...core.wire.pipe import PreflightOver, StageLine
from ..decide.preflight_verdict import stage_order, worst
from ..facts.fold import shown_body
from ..report.model import GRADES
from ..report.sentence_parts import counted

_MAX_WARNINGS = 8


@dataclass
class _StageRanks:
    begun: set[int] = field(default_factory=set)
    ended: dict[int, PreflightStage] = field(default_factory=dict)


@dataclass
class StageLines:
    """The preflight of the first attempt. Those of later attempts are in the report alone."""

    _hosts: dict[str, AgentHello] = field(default_factory=dict)
    _stages: dict[str, _StageRanks] = field(default_factory=dict)
    _results: dict[int, PreflightResult] = field(default_factory=dict)
    _told: dict[str, StageLine] = field(default_factory=dict)
    _is_over: bool = False

    def hear(self, body: AgentBody) -> None:
        """One message that came in."""
        if isinstance(body, AgentHello):
            self._hosts[body.agent] = shown_body(body)
        event = shown_body(body).event if isinstance(body, EventMessage) else None
        if not isinstance(event, PreflightBegan | PreflightStage | PreflightResult) or event.where.attempt:
            return
        if isinstance(event, PreflightResult):
            self._results[event.where.rank] = event
        else:
            stage = self._stages.setdefault(event.stage, _StageRanks())
            stage.begun.add(event.where.rank)
            if isinstance(event, PreflightStage):
                stage.ended[event.where.rank] = event

    @property
    def ranks(self) -> int:
        """The expected number of ranks, as far as it is known."""
        hellos = self._hosts.values()
        known = sum(hello.nproc for hello in hellos)
        expected = max((hello.nproc * hello.min_nodes for hello in hellos), default=0)
        return max(known, expected, len({rank for stage in self._stages.values() for rank in stage.begun}))

    def due(self) -> list[StageLine | PreflightOver]:
        """The lines that have changed since the last call, in the order of the stages."""
        if self._results and len(self._results) >= self.ranks:
            return self.end()
        return [] if self._is_over else list(self._changed(over=False))

    def end(self) -> list[StageLine | PreflightOver]:
        """The last lines: the preflight is over."""
        if self._is_over:
            return []
        self._is_over = True
        return [*self._changed(over=True), self._last()]

    def _changed(self, *, over: bool) -> list[StageLine]:
        ranks = self.ranks
        lines = []
        furthest = max((stage_order(name) for name in self._stages), default=0)
        for name, stage in sorted(self._stages.items(), key=lambda pair: stage_order(pair[0])):
            # the common finding of a stage is known when the ranks begin the next one, or end
            finished = over or (len(stage.ended) >= ranks and stage_order(name) < furthest)
            line = StageLine(
                stage=name,
                # a rank that waits for the others has arrived
                done=len(stage.begun if name == "arrive" and not finished else stage.ended),
                ranks=ranks,
                grade=self._grade(name, stage) if finished else "",
                seconds=round(max((event.seconds for event in stage.ended.values()), default=0.0), 3),
            )
            known = self._told.get(name)
            if known != line and not (known is not None and known.grade and not over):
                self._told[name] = line
                lines.append(line)
        return lines

    def _grade(self, name: str, stage: _StageRanks) -> str:
        """The worst grade of its ranks and findings. A stage that a rank never ended has failed or is unknown."""
        found = [event.grade for event in stage.ended.values()]
        found += [finding.grade for finding in self._findings() if finding.stage == name]
        if stage.begun - set(stage.ended):
            failed = any(r.outcome == "failed" and r.stage == name for r in self._results.values())
            found.append("fail" if failed else "unknown")
        return worst(found)

    def _findings(self) -> list[PreflightFinding]:
        found: list[PreflightFinding] = []
        for result in self._results.values():
            found += [finding for finding in result.findings if finding not in found]
        return sorted(found, key=lambda f: (-GRADES.index(f.grade), stage_order(f.stage)))

    def _last(self) -> PreflightOver:
        """One line for a launch that goes on to train. After a failed preflight or a check, the report says more."""
        if not self._results:
            return PreflightOver()
        findings = [finding for finding in self._findings() if finding.grade != "ok"]
        outcomes = {result.outcome for result in self._results.values()}
        failed = ["fail"] if outcomes - {"ok", "skipped"} else []
        grade = worst(["ok", *(finding.grade for finding in findings), *failed])
        stops = any(result.stops for result in self._results.values())
        if any(hello.check_only for hello in self._hosts.values()) or stops or outcomes == {"skipped"}:
            return PreflightOver(grade)
        seconds: defaultdict[int, float] = defaultdict(float)
        for rank, event in (pair for stage in self._stages.values() for pair in stage.ended.items()):
            seconds[rank] += event.seconds
        ranks, nodes = counted(self.ranks, "rank"), counted(len(self._hosts), "node")
        noted = f", with {counted(len(findings), 'finding')}" if findings else ""
        if grade == "fail":
            noted = ", failed, and training starts anyway"
        text = f"preflight {grade}: {ranks} on {nodes} in {max(seconds.values(), default=0.0):.1f} s{noted}"
        lines = [f"  {finding.stage}, {finding.grade}: {finding.sentence}" for finding in findings[:_MAX_WARNINGS]]
        left = len(findings) - len(lines)
        return PreflightOver(grade, text, [*lines, *([f"  and {left} more in the report"] if left else [])])
