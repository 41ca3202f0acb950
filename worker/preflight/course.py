"""One rank's course through the steps: do its part, meet the other ranks, learn the next step, until there is none."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import InitVar, dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from ...core.codes import Code
from ...core.events.own_limits import OwnFault
from ...core.events.preflight_events import (
    BandwidthRows,
    PreflightBegan,
    PreflightStage,
    RankInventoryEvent,
    RankOutcome,
)
from ...core.events.run_position import RunPosition
from ...core.host import host_name
from ...core.identity import RankIdentity
from ...core.preflight import Grade, PreflightFinding
from ...core.recorder.run_folder import read_meeting_key, unanswered
from ...core.settings import WorkerSettings
from .blame.conclude import StepReports, conclude_softly, foreign_finding
from .blame.group_blame import failure
from .meeting import LEADER, ForeignValue, MetReports, NoConclusion, StoreLost, StoreRendezvous, connect
from .parts import RankTests
from .steps import (
    DEPUTY_S,
    Line,
    PreflightEnd,
    RankAttendance,
    RankRoster,
    RankStepReport,
    StageDeadlines,
    StageProgress,
    StepConclusion,
    is_local,
    stage_of,
)

STORE_S = 20.0
"""Timeout to connect to the store."""
FAREWELL_S = 5.0
"""Time for all ranks to learn of a failure. The first rank that leaves makes torchrun stop, and its store with it."""
_FAREWELL = "farewell"
_ANSWER_S = 10.0
"""How long a node waits for the collector's answer. It has had the ranks' own start as well."""
_TICK_S = 0.05
_ORDER: tuple[Grade, ...] = ("ok", "unknown", "warn", "fail")


@dataclass(eq=False, repr=False)
class PreflightRun:
    """One rank's preflight."""

    _me: RankIdentity
    _settings: WorkerSettings
    _say: Callable[[Line], None]
    """Called with each line for the worker."""
    _began: float
    """The coordinator's start on the monotonic clock."""
    script: InitVar[str] = ""

    def __post_init__(self, script: str) -> None:
        self._where = RunPosition(self._me.rank, self._settings.attempt)
        self._deadlines = StageDeadlines(self._settings.preflight_timeout_s)
        self._failure: RankStepReport | None = None
        """This rank cannot continue and only reports why: its coordinator died or hung, or gpuwatch has an error."""
        self._prefix = f"gpuwatch/{self._settings.round}"
        self._parts = RankTests(self._me, self._settings, self._deadlines, self._prefix, script)
        self._roster: RankRoster | None = None
        self._steps: list[str] = []
        self._arrived = self._me.world_size

    def run(self, step: str = "arrive", failure: RankStepReport | None = None) -> None:
        """Run all steps. The last line has the conclusion, also after a failure.

        `failure`: this rank's, of `step`, which is only reported to the others.
        """
        now, self._failure = StepConclusion(next=step), failure
        try:
            inventory = RankStepReport() if failure else self._inventory()
            if not failure:
                self._begin("arrive")
            store = connect(self._me, min(STORE_S, self._deadlines.timeout_s))
            key = read_meeting_key(Path(self._settings.recorder_dir))
            self._meeting = StoreRendezvous(store, self._prefix, self._me.rank, self._me.world_size, key)
            while now.next:
                now = self._take_softly(now, inventory)
            self._leave(now)
        except ForeignValue as foreign:  # it blames no rank of this job
            now = replace(now, findings=[*now.findings, foreign_finding(now.next, str(foreign))])
        except StoreLost as lost:
            now = self._end_alone(now, self._lost(now.next, lost))
        except NoConclusion:
            now = self._end_alone(now, self._no_conclusion(now.next))
        finally:
            self._parts.child.close()  # its memory on the device is then free for the script
        backend = self._roster.backend if self._roster else ""
        self._say(PreflightEnd(now.findings, now.outcomes, backend, self._parts.facts.device))

    def _take_softly(self, now: StepConclusion, inventory: RankStepReport) -> StepConclusion:
        """Run one step. An error of gpuwatch ends the preflight of all ranks, but not the job."""
        try:
            return self._take(now.next, now, inventory)
        except (StoreLost, NoConclusion):
            raise
        except Exception as error:
            if self._failure is not None:
                raise
            traceback.print_exc()
            self._failure = RankStepReport("fault", f"{type(error).__name__}: {error}")
            return self._take(now.next, now, inventory)

    # -- one step -----------------------------------------------------------------------------------------------

    def _inventory(self) -> RankStepReport:
        """The coordinator announced this stage before it imported torch."""
        limit_s = self._deadlines.work("inventory")
        # a new deadline after the import of torch
        self._say(StageProgress("arrive", "the inspection of its device", limit_s))
        report = self._parts.inventory()
        facts = self._parts.facts
        self._say(RankInventoryEvent(self._where, facts.device, facts.versions, facts))
        self._end_stage("inventory", _worst(report.findings), report.detail)
        return report

    def _take(self, step: str, before: StepConclusion, inventory: RankStepReport) -> StepConclusion:
        stage = stage_of(step)
        if self._failure is not None:
            here = RankAttendance(host_name(), 0, self._me.local_rank, self._me.local_world_size, "")
            report, takes_part = replace(self._failure, attendance=here), False
        elif step == "arrive":
            report, takes_part = self._attend(inventory), True
        else:
            takes_part = is_local(step) or len(self._members(step, before)) > 1
            report = self._do(step, before) if takes_part else RankStepReport("idle")
        if report.kind == "fault":
            self._say(OwnFault(self._where, "preflight", f"{stage}: {report.detail}"))
        now = self._meet(step, report, before)
        if now.roster is not None:
            self._roster = now.roster
        self._arrived = now.arrived or self._me.world_size
        if takes_part and step in ("arrive", "consistency"):
            mine = [finding for finding in now.findings if finding.stage == stage]
            self._end_stage(stage, _worst(mine), now.note)
        return now

    def _meet(self, step: str, report: RankStepReport, before: StepConclusion) -> StepConclusion:
        deadlines, stage = self._deadlines, stage_of(step)
        self._steps.append(step)
        self._say(StageProgress(step, limit_s=deadlines.wait(stage), waits=True))

        def draw(found: MetReports) -> bytes:
            reports = {rank: msgspec.json.decode(data, type=RankStepReport) for rank, data in found.by_rank.items()}
            reports |= {rank: RankStepReport("foreign", sentence) for rank, sentence in found.foreign.items()}
            heard = StepReports(step, reports, found.silent, found.leader_failed)
            return msgspec.json.encode(conclude_softly(self._settings, heard, before, self._roster))

        reports_s, conclusion_s = deadlines.reports(stage), deadlines.conclusion(stage)
        times = {"reports_s": reports_s, "conclusion_s": conclusion_s, "deputy_s": DEPUTY_S}
        failed = bool(report.own) or report.kind in ("fault", "fallen")
        data = self._meeting.meet(step, msgspec.json.encode(report), draw, failed=failed, **times)
        return msgspec.json.decode(data, type=StepConclusion)

    def _leave(self, now: StepConclusion) -> None:
        if now.failed:
            self._say(StageProgress(_FAREWELL, limit_s=3 * FAREWELL_S, waits=True))
            self._steps.append(_FAREWELL)
            times = {"reports_s": FAREWELL_S, "conclusion_s": FAREWELL_S + 1.0, "deputy_s": 1.0}
            with suppress(StoreLost, NoConclusion):  # this rank has the conclusion already
                self._meeting.meet(_FAREWELL, b"{}", lambda reports: b"{}", failed=False, **times)
        with suppress(StoreLost):  # its host has ended, and the store with it
            self._meeting.leave(self._steps, self._arrived)

    # -- this rank's part ---------------------------------------------------------------------------------------

    def _attend(self, inventory: RankStepReport) -> RankStepReport:
        facts = self._parts.facts
        here = RankAttendance(
            facts.host, facts.node, self._me.local_rank, self._me.local_world_size, facts.device, facts.uuid
        )
        return RankStepReport(attendance=here, findings=[*inventory.findings, *self._unanswered()])

    def _unanswered(self) -> list[PreflightFinding]:
        """A node whose records do not reach the collector; its first rank says so. The others hear it in the store."""
        if self._me.local_rank != 0:
            return []
        folder, deadline = Path(self._settings.recorder_dir), time.monotonic() + _ANSWER_S
        while (there := unanswered(folder)) and time.monotonic() < deadline:
            time.sleep(_TICK_S)
        if not there:
            return []
        host = self._parts.facts.host or host_name()
        sentence = f"{host} gets no answer from gpuwatch's collector at {there}: the report will lack its ranks"
        next_ = (
            f"Let {host} reach that port, or pass --collector-port PORT with one that it reaches. What it records is "
            "kept there in a .spool file in --runs-dir."
        )
        code = Code.COLLECTOR_ENDED
        return [PreflightFinding("arrive", "warn", "node", [self._me.rank], [host], sentence, next_, code=code)]

    def _members(self, step: str, before: StepConclusion) -> list[int]:
        """The ranks of the process group that this rank joins; [] if it joins none."""
        roster = self._roster
        assert roster is not None
        rank = self._me.rank
        node = roster.ranks[rank].node
        if step in ("node group", "inside"):
            return roster.ranks_of(node)
        if step == "heads":
            heads = [head for head, one in enumerate(roster.ranks) if one.local_rank == 0]
            return heads if rank in heads else []
        if step.startswith("pairs "):
            return next((roster.ranks_of(*pair) for pair in before.pairs if node in pair), [])
        if step.startswith("ranks "):
            return next((list(pair) for pair in before.pairs if rank in pair), [])
        return list(range(self._me.world_size))

    def _do(self, step: str, before: StepConclusion) -> RankStepReport:
        stage = stage_of(step)
        self._begin(stage, step)
        if step == "consistency":  # the rank that gathers the reports compares them: the stage ends with its conclusion
            return RankStepReport(facts=self._parts.facts)
        assert self._roster is not None
        if is_local(step):
            gpus = [one.gpu for one in self._roster.ranks]
            alone = {
                "health": self._parts.health,
                "allocation": lambda: self._parts.allocation(gpus),
                "compute": self._parts.compute,
            }
            report = alone[step]()
        else:
            members = self._members(step, before)
            report = self._parts.in_group(
                step, members, self._roster.backend, lambda at: self._say(StageProgress(step, at))
            )
        if report.measured is not None:
            self._say(BandwidthRows(self._where, report.measured.rows))
        self._end_stage(stage, _grade(report), report.detail or next((one.sentence for one in report.findings), ""))
        return report

    def _begin(self, stage: str, step: str = "arrive") -> None:
        self._began = time.monotonic()
        self._say(PreflightBegan(self._where, stage, self._deadlines.work(stage)))
        self._say(StageProgress(step))

    def _end_stage(self, stage: str, grade: Grade, detail: str) -> None:
        self._say(PreflightStage(self._where, stage, round(time.monotonic() - self._began, 4), detail, grade))

    # -- without the others ---------------------------------------------------------------------------------------

    def _end_alone(self, now: StepConclusion, finding: PreflightFinding) -> StepConclusion:
        rank = self._me.rank
        own = next((outcome for outcome in now.outcomes if outcome.rank == rank), None)
        own = own or RankOutcome(rank, "failed" if rank in finding.ranks else "victim", finding.stage, finding.sentence)
        if self._failure is not None and self._failure.kind == "fallen":
            own = RankOutcome(rank, "failed", self._failure.said, self._failure.detail)
        others = [outcome for outcome in now.outcomes if outcome.rank != rank]
        return StepConclusion(findings=[*now.findings, finding], outcomes=[*others, own])

    def _lost(self, step: str, lost: StoreLost) -> PreflightFinding:
        """The finding of a rank that lost the store. The rank does not know which side of the link is broken."""
        me, stage = self._me, stage_of(step)
        host = self._parts.facts.host or host_name()
        where = f"{me.master_addr}:{me.master_port}"
        sentence = f"rank {me.rank} ({host}) lost the store at {where} in stage {stage}: {lost}"
        next_ = f"Look at the network between {host} and {me.master_addr}, and whether the job still runs there."
        return failure(Code.STORE_LOST, stage, "link", [], [host], sentence, next_, victims=[me.rank])

    def _no_conclusion(self, step: str) -> PreflightFinding:
        stage = stage_of(step)
        hosts = [self._roster.ranks[LEADER].host] if self._roster else []
        sentence = f"rank {LEADER} sent no conclusion in stage {stage}"
        next_ = f"Look at the host of rank {LEADER}: what ended or stopped its processes?"
        return failure(Code.RANK_SILENT, stage, "rank", [LEADER], hosts, sentence, next_, victims=[self._me.rank])


def _grade(report: RankStepReport) -> Grade:
    if report.kind in ("ok", "idle"):
        return _worst(report.findings)
    return "unknown" if report.kind == "fault" else "fail"


def _worst(findings: list[PreflightFinding]) -> Grade:
    return max((finding.grade for finding in findings), key=_ORDER.index, default="ok")
