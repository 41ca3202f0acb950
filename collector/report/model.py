"""report.json, schema 1: fields may be added, none change meaning. Made from the facts and the verdict, nothing else.

docs/report.md says what the fields of RunReport, RunInfo, Verdict and RankReport hold. Numbers that are non-finite are
null in JSON; `nan`, `posinf` and `neginf` beside them say what they were.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.structs import force_setattr

from ...core.errors import Code, coded
from ...core.events import BadOperation, CaptureFile, CauseTrial, GpuHealth, GpuXid, OddSamples
from ...core.frames import Frame, FramePhase, Page
from ...core.gpu.counters import GpuSincePreflight
from ...core.identity import is_rank, pid_of_number, rank_name
from ...core.preflight import InventoryFacts, PreflightFinding
from ...core.verdicts import Certainty, VerdictKind

SCHEMA = 1


class SeenIn(msgspec.Struct, frozen=True):
    """The row that first shows a value, where that is not a row of the module that made it."""

    module: str
    cls: str = msgspec.field(name="class")
    role: str


class ConcurrentOrigin(msgspec.Struct, frozen=True):
    """Another origin, in no known order with the verdict's."""

    rank: int
    module: str
    cls: str = msgspec.field(name="class")
    role: str | None
    """As in the verdict."""
    value: str
    host: str = ""
    text: str = ""
    """What was found and where, in words."""
    seen_in: SeenIn | None = None


class CascadedRank(msgspec.Struct, frozen=True):
    """A rank that ended because the verdict's rank did."""

    rank: int
    how: str


class OverflowCause(msgspec.Struct, frozen=True):
    """Why a non-finite value was made. `next` stands first in the verdict's own."""

    kind: str
    """data, domain, precision, divergence, step, start, mask, scale, replica, hook, script or unrepeatable"""
    certainty: Certainty
    """established: a trial or arithmetic shows it"""
    statement: str
    """A sentence without its full stop."""
    next: list[str] = []
    trials: list[CauseTrial] = []
    sample: OddSamples | None = None

    @property
    def line(self) -> str:
        """The line below the verdict's statement."""
        return f"Cause, {self.certainty}: {self.statement}."


class Verdict(msgspec.Struct, frozen=True):
    """A field that does not apply is null. `role` is null if `seen_in` is set, and `rank` if `pid` is."""

    kind: VerdictKind
    statement: str
    certainty: Certainty
    rank: int | None = None
    host: str | None = None
    device: str | None = None
    module: str | None = None
    cls: str | None = msgspec.field(name="class", default=None)
    root: str | None = None
    phase: str | None = None
    role: str | None = None
    value: str | None = None
    dtype: str | None = None
    attempt: int | None = None
    step: int | None = None
    batch: int | None = None
    between: tuple[str | None, str | None] | None = None
    evidence: list[str] = []
    next: list[str] = []
    concurrent: list[ConcurrentOrigin] = []
    cascade: list[CascadedRank] = []
    signal: str | None = None
    stage: str | None = None
    bad_nodes: list[str] = []
    seen_in: SeenIn | None = None
    pid: int | None = None
    missing: list[str] = []
    operation: BadOperation | None = None
    gpu: str | None = None
    """UUID of the GPU of `rank`."""
    capture: CaptureFile | None = None
    cause: OverflowCause | None = None
    """None where it is not known."""
    code: str = ""
    """The kind's."""
    cause_code: str = ""
    """That of the cause in the statement: the first clause in `missing`, or the preflight's finding."""

    def __post_init__(self) -> None:
        force_setattr(self, "code", str(self.kind.code))

    def __repr__(self) -> str:
        """One line: what a notebook shows. The fields are as many as those of report.json."""
        more = [name for name in ("evidence", "next", "cause") if getattr(self, name)]
        rest = f"; see also {', '.join(f'.{name}' for name in more)}" if more else ""
        return f"<{self.kind}, {self.how_sure}: {self.statement} {self.codes}{rest}>"

    @property
    def headlines(self) -> list[str]:
        """The statement, and the cause where it is known."""
        return [self.statement, *([self.cause.line] if self.cause is not None else [])]

    @property
    def codes(self) -> str:
        """`[GW108] [GW502]`"""
        return coded(coded("", self.code), self.cause_code).strip()

    @property
    def how_sure(self) -> str:
        """Behind the kind, as the text and the page show it: a run that is unknown has no certainty beside that."""
        return "not proven clean" if self.kind is VerdictKind.UNKNOWN else str(self.certainty)


class RankStepTotals(msgspec.Struct, frozen=True):
    """The number of timed steps of a rank, and their total seconds in each part."""

    rank: int
    timed: int
    seconds: dict[str, float]


class SlowLine(msgspec.Struct, frozen=True):
    """A line of the script at which a slow rank was seen."""

    file: str
    line: int
    function: str
    code: str
    """"" where it could not be read."""
    calls: str
    """What it called there in most of these looks, as far as that is Python: `__next__ of dataloader.py`."""
    looks: int


class StragglerReport(msgspec.Struct, frozen=True):
    """A rank that the others wait for."""

    rank: int
    host: str
    device: str | None
    cost: float
    """Share of the job's time."""
    loud: bool
    """It is a large share."""
    how: str
    """`constantly` or `now and then`"""
    part: str
    """outside, forward, backward, optimizer; "" if it is in no part alone"""
    text: str
    """One sentence or several."""
    beside: list[str] = []
    """Figures of its host and its GPU over the run, and of its GPU since the preflight."""
    looks: int = 0
    """How often its stack was taken in its own time."""
    lines: list[SlowLine] = []
    """Where it then was in its script, the most frequent lines first."""
    code: str = Code.STRAGGLER


class StepReport(msgspec.Struct, frozen=True):
    """Where the ranks' time goes, and a rank that the others wait for."""

    ranks: list[RankStepTotals]
    compared: int = 0
    """Steps of all ranks that were compared; 0: too few."""
    step_s: float | None = None
    """Mean of those."""
    stragglers: list[StragglerReport] = []
    trouble: str = ""
    """Why this failed; "" where it did not."""


class UnusualFigure(msgspec.Struct, frozen=True):
    """A figure of a node that stands out around the event."""

    host: str
    of: str
    """A GPU's UUID, `rank 3`, `mlx5_0/1`, `runs-dir`; "" is the host itself."""
    what: str
    """A key of METRICS (core/wire/columns.py)."""
    value: float
    unit: str
    at_s: float
    """When it was worst, in seconds after the event."""
    text: str
    """`gpu-2: 5 new errors of its InfiniBand port mlx5_0/1, 35 s before the overflow`"""
    alike: int = 0
    """The number of other nodes on which the same figure stands out."""
    code: str = Code.NODE_FIGURE


class FigureSeries(msgspec.Struct, frozen=True):
    """One figure over time."""

    of: str
    what: str
    """`of` and `what` as in UnusualFigure."""
    text: str
    """`what` in words."""
    unit: str
    values: list[float | None]
    """At the node's `at_s`; null where it was not read."""


class NodeFigures(msgspec.Struct, frozen=True):
    """The figures of one node."""

    host: str
    at_s: list[float]
    """Seconds after the event; without one, before the end of the record."""
    figures: list[FigureSeries]
    troubles: list[str] = []
    """What could not be read, and why."""


class TelemetryReport(msgspec.Struct, frozen=True):
    """The figures of the nodes around the event."""

    event: str = ""
    """The event that times count from: `the overflow`; "" if nothing happened."""
    event_time: str | None = None
    """ISO 8601, by the collector's clock."""
    notable: list[UnusualFigure] = []
    """The verdict's node first; if many nodes are alike, the first few."""
    nodes: list[NodeFigures] = []
    """The verdict's node, those where something stands out, then others."""
    nodes_left_out: int = 0
    """Their figures are in the store alone."""
    trouble: str = ""
    """Why this failed; "" where it did not."""


class RunInsight(msgspec.Struct, frozen=True):
    """One finding over ranks, modules and batches. It is no verdict: it need not be an error."""

    kind: str
    """no_scaler, scaler_collapsing, scaler_too_small, growth, near_overflow, underflow, dead_module, replica_odd,
    replica_drift, rank_unlike, gradients_zeroed, weights_unmoved; unknown: one of them failed"""
    text: str
    """One sentence without its full stop."""
    next: str
    """The mend, as a sentence."""
    ranks: list[int]
    modules: list[str]
    since: int | None = None
    """The first batch in which it was seen."""
    code: str = ""

    @classmethod
    def of(
        cls, code: Code, text: str, mend: str, ranks: Iterable[int], modules: Iterable[str], since: int | None = None
    ) -> RunInsight:
        """The insight with that code. Ranks and modules may be in any order, and stand there twice."""
        kind = code.kind if code is not Code.OWN_FAULT else "unknown"
        return cls(kind, text, mend, sorted(set(ranks)), list(dict.fromkeys(modules)), since, code)


class AttemptReport(msgspec.Struct, frozen=True):
    """An attempt that the verdict is not about."""

    attempt: int
    statement: str
    hang: Verdict | None = None
    """The verdict on an attempt that was ended because no rank moved."""


class EarlierLife(msgspec.Struct, frozen=True):
    """A life of the job before the one that the report is about."""

    run: str
    kind: str
    """"" if it has left no report."""
    statement: str


class RankSeries(msgspec.Struct, frozen=True):
    """`abs_max` is null where it was inf or nan."""

    rank: int
    batches: list[int]
    abs_max: list[float | None]


class ModuleHistory(msgspec.Struct, frozen=True):
    """The outputs of the verdict's module, on each rank, over the batches as that rank counts them."""

    module: str
    cls: str = msgspec.field(name="class")
    dtype: str
    limit: float | None
    """The largest finite number of the dtype."""
    ranks: list[RankSeries]
    left_out: int = 0
    """Ranks whose history is not here or cannot be read."""


class HeatModule(msgspec.Struct, frozen=True):
    """A module of ModulesByRanks."""

    module: str
    cls: str = msgspec.field(name="class")
    dtype: str


class ModulesByRanks(msgspec.Struct, frozen=True):
    """The outputs of modules in the verdict's batch, on each rank with a page of the same step."""

    batch: int
    modules: list[HeatModule]
    """In the order of their first calls, up to the verdict's and beyond it."""
    ranks: list[int]
    abs_max: list[list[float | None]]
    """A list for each rank. null: inf or nan; -1: not measured."""


class ModuleForecast(msgspec.Struct, frozen=True):
    """A module that was about to pass its dtype's limit. Batches are as the first rank that forecast it counts them."""

    module: str
    cls: str = msgspec.field(name="class")
    dtype: str
    limit: float
    ranks: list[int]
    """All that forecast it."""
    rank: int
    """The first of them."""
    batch: int
    """In which it was forecast."""
    abs_max: float
    """In that batch."""
    after: int
    """Batches from there to the one that passes the limit, and the range of them:"""
    earliest: int
    latest: int
    since: int
    """The first batch that it was forecast from."""


def label_of(number: int) -> str:
    """The name in a table: `3` for a rank, `pid 4242` for a process that is no rank."""
    return str(number) if is_rank(number) else f"pid {pid_of_number(number)}"


class TimelineEntry(msgspec.Struct, frozen=True):
    """An event. `time` is by the clock of the host where it happened."""

    time: str | None
    rank: int | None
    attempt: int
    what: str
    step: int | None = None
    batch: int | None = None
    seq: int | None = None
    kind: str = ""
    """anomaly, raised, fault, preflight, ended or signal"""

    @property
    def label(self) -> str:
        """Whose it is, for a table."""
        return label_of(self.rank) if self.rank is not None else "-"


class RunInfo(msgspec.Struct, frozen=True):
    """The job. Times are ISO 8601 in UTC, from the collector's clock."""

    id: str
    command: list[str]
    world_size: int
    nnodes: int
    started: str | None
    ended: str | None
    versions: dict[str, str]
    attempts: int = 1
    cwd: str = ""
    check_only: bool = False
    earlier: list[EarlierLife] = []
    replaced: dict[str, list[str]] = {}
    """Class or module -> its functions that gpuwatch replaced in at least one rank."""
    report_command: str = "gpuwatch report"
    """What shows this report, with the run's folder as it was when the report was made."""
    starter: str = "torchrun"
    """Who has started the ranks, and stops the others once one has failed, for a sentence."""

    @property
    def has_no_end(self) -> bool:
        """Its collector has not recorded its end."""
        return self.started is not None and self.ended is None


class RankAnomaly(msgspec.Struct, frozen=True):
    """The first non-finite value of a rank."""

    batch: int
    step: int
    frame: int
    module: str
    cls: str = msgspec.field(name="class")
    phase: FramePhase
    role: str | None
    """null if the value was first seen in a row of another module: `seen_in`"""
    value: str
    dtype: str
    origin: bool
    between: tuple[str, str | None] | None = None
    seq: int = -1
    seen_in: SeenIn | None = None


class LossReport(msgspec.Struct, frozen=True):
    """Recorded data that did not arrive."""

    pages: int = 0
    messages: int = 0
    frames: int = 0
    """Always 0: nothing counts them. A field of schema 1 stays."""
    rows: int = 0

    @property
    def total(self) -> int:
        """All of it together."""
        return self.pages + self.messages + self.rows


class RankReport(msgspec.Struct, frozen=True):
    """One rank, as it was in the attempt that the verdict is about."""

    rank: int
    local_rank: int | None
    host: str
    device: str | None
    pid: int | None
    state: str
    exit: int | None
    step: int | None
    batch: int | None
    preflight: dict[str, Any]
    first_anomaly: RankAnomaly | None
    frames: list[Frame]
    lost: LossReport
    attempt: int = 0
    traces: list[Page] = []
    error: dict[str, Any] | None = None
    faults: list[str] = []
    warnings: list[dict[str, Any]] = []
    warned: int = 0
    scaler: dict[str, Any] | None = None
    scaler_skips: int = 0
    ignored: int = 0
    hidden: list[dict[str, Any]] = []
    cost: None = None
    """Always null: nothing measures it. A field of schema 1 stays."""
    batches_skipped: int = 0
    gpu: GpuSincePreflight | None = None
    stack: list[str] = []
    frames_comparable: bool = False
    pages: int = 0
    traces_left_out: int = 0
    absorbed: int = 0
    absorbed_first: list[dict[str, Any]] = []
    passed: list[dict[str, Any]] = []
    threads: list[str] = []
    traces_thinned: int = 0
    groups_not_shown: int = 0
    watch_choices: list[dict[str, Any]] = []
    """What `--every auto` has chosen: fields of WatchChoice, and `text`."""

    @property
    def name(self) -> str:
        """For a sentence."""
        return rank_name(self.rank)

    @property
    def label(self) -> str:
        """For a table."""
        return label_of(self.rank)


class NodeReport(msgspec.Struct, frozen=True):
    """One node."""

    host: str
    nproc: int
    state: str
    ranks: list[int]
    clock_offset_ns: int | None = None
    """By how much the collector's clock is ahead of the node's, uncertain by half the round trip."""
    clock_round_trip_ns: int | None = None
    gpus: list[GpuHealth] = []
    """Whether NVML watched its GPUs, and why not. The first is from before the training."""
    xids: list[GpuXid] = []
    """XIDs of all its GPUs, including those that no rank used."""
    spool: str = ""
    """The file in the runs folder that its records were read from, as they had not reached the collector; else ""."""


GRADES = ("ok", "victim", "unknown", "warn", "fail")
"""From good to bad. A `victim` failed only because others did. `""` is a stage that was not reached."""


class StageCell(msgspec.Struct, frozen=True):
    """One stage on one node."""

    grade: str
    ranks: int
    """How many of its ranks have ended it."""
    seconds: float = 0.0
    """The time that the slowest of them took."""
    rank: int | None = None
    """The slowest of them; for a failed stage, the first rank that failed in it."""
    detail: str = ""
    """That rank's own report of the stage."""


class NodeRow(msgspec.Struct, frozen=True):
    """One node in the preflight."""

    host: str
    ranks: list[int]
    grade: str
    stages: dict[str, StageCell]


class StageColumn(msgspec.Struct, frozen=True):
    """One stage over all nodes."""

    stage: str
    grade: str
    ranks: int
    seconds: float = 0.0
    rank: int | None = None
    host: str = ""


class BandwidthSize(msgspec.Struct, frozen=True):
    """One size of the bandwidth test, over all ranks; defined as in nccl-tests."""

    size_bytes: int
    ranks: int
    time_us: float
    """The slowest rank's, as are the bandwidths."""
    algbw_gbs: float
    busbw_gbs: float
    rank: int
    host: str
    best_busbw_gbs: float


class RankInventory(msgspec.Struct, frozen=True):
    """The hardware and software of a rank."""

    rank: int
    facts: InventoryFacts


class PreflightReport(msgspec.Struct, frozen=True):
    """The preflight of all ranks."""

    outcome: str = "off"
    """off, ok, skipped, victim or failed"""
    seconds: float = 0.0
    """The slowest rank's total over all stages."""
    stages: list[StageColumn] = []
    nodes: list[NodeRow] = []
    findings: list[PreflightFinding] = []
    """The worst first, without those that are `ok`."""
    bandwidth: list[BandwidthSize] = []
    inventory: list[RankInventory] = []


class RunReport(msgspec.Struct, frozen=True):
    """The one combined report of all ranks."""

    schema: int
    run: RunInfo
    verdict: Verdict
    ranks: list[RankReport]
    preflight: PreflightReport
    nodes: list[NodeReport]
    timeline: list[TimelineEntry]
    collector: dict[str, int] = {}
    attempts: list[AttemptReport] = []
    history: ModuleHistory | None = None
    by_module: ModulesByRanks | None = None
    forecasts: list[ModuleForecast] = []
    insights: list[RunInsight] = []
    steps: StepReport | None = None
    telemetry: TelemetryReport | None = None
    processes: list[RankReport] = []
    seen_before: list[str] = []
    """Sentences on earlier runs of the folder with the same fault, or the same GPU or node."""

    @property
    def everyone(self) -> list[RankReport]:
        """The ranks, and the processes that are no rank."""
        return [*self.ranks, *self.processes]

    @property
    def how_sure(self) -> str:
        """Behind the verdict's kind, as the text and the page show it: of a run that has not ended, it says so."""
        if not self.run.has_no_end or self.verdict.kind is VerdictKind.CLEAN:  # clean: all of its ends were heard
            return self.verdict.how_sure
        if self.verdict.kind is VerdictKind.UNKNOWN:
            return "still running, or its collector died"
        return f"{self.verdict.how_sure} so far"

    @property
    def named(self) -> int | None:
        """The number that the verdict names: a rank's, or that of a process that is no rank."""
        pid = self.verdict.pid
        found = next((one.rank for one in self.processes if pid is not None and one.pid == pid), None)
        return self.verdict.rank if found is None else found


def to_json(value: object) -> bytes:
    """Indented JSON."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1)
