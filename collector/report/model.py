"""report.json, schema 1: fields may be added, none change meaning. Made from the facts and the verdict, nothing else.

Numbers that are non-finite are null in JSON; `nan`, `posinf` and `neginf` beside them say what they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ...core.events import GpuHealth, GpuXid
from ...core.frames import Frame, FramePhase, Page
from ...core.gpu.counters import GpuSincePreflight
from ...core.identity import is_rank, pid_of_number, rank_name
from ...core.preflight import InventoryFacts, PreflightFinding
from ...core.text import ranks_text
from ...core.verdicts import Certainty, VerdictKind

# The verdict as a value: report.json's `verdict`.


class SeenIn(msgspec.Struct, frozen=True):
    """The row that first shows a value, where that is not a row of the module that made it."""

    module: str
    cls: str = msgspec.field(name="class")
    role: str


class ConcurrentOrigin(msgspec.Struct, frozen=True):
    """Another origin, which nothing puts before or after the verdict's."""

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


class Verdict(msgspec.Struct, frozen=True):
    """report.json's `verdict`; what does not apply is null."""

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
    """Nodes that it blames, as the scheduler calls them."""
    seen_in: SeenIn | None = None
    """Where the value was first seen, if that is no row of `module`'s own; `role` is null then."""
    pid: int | None = None
    """Of a process that is no rank: then `rank` is null."""
    missing: list[str] = []
    """What keeps a verdict `unknown` from `clean`."""


# report.json's `steps`: where the ranks' time goes, and a rank that the others wait for.


class RankStepTotals(msgspec.Struct, frozen=True):
    """One rank: how many steps were timed, and the seconds of all of them in each part."""

    rank: int
    timed: int
    seconds: dict[str, float]


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
    """How its host and its GPU did over the run, and what is known of its GPU since the preflight."""


class StepReport(msgspec.Struct, frozen=True):
    """report.json's `steps`."""

    ranks: list[RankStepTotals]
    compared: int = 0
    """Steps of all ranks that were compared; 0: too few."""
    step_s: float | None = None
    """Mean of those."""
    stragglers: list[StragglerReport] = []
    trouble: str = ""
    """Why it could not be told; "" where it could."""


# report.json's `telemetry`: how the nodes did around the event.


class UnusualFigure(msgspec.Struct, frozen=True):
    """A figure that stands out."""

    host: str
    of: str
    """A GPU's UUID, `rank 3`, `mlx5_0/1`, `runs-dir`; "" is the host itself."""
    what: str
    """A key of METRICS (core/metrics.py)."""
    value: float
    unit: str
    at_s: float
    """When it was so at the worst, in seconds after the event."""
    text: str
    """`gpu-2: 5 new errors of its InfiniBand port mlx5_0/1, 35 s before the overflow`"""
    alike: int = 0
    """On so many other nodes the same figure stands out."""


class FigureSeries(msgspec.Struct, frozen=True):
    """One figure over time."""

    of: str
    """A GPU's UUID, `rank 3`, `mlx5_0/1`, `runs-dir`; "" is the host itself."""
    what: str
    """A key of METRICS (core/metrics.py)."""
    text: str
    """What that is, in words."""
    unit: str
    values: list[float | None]
    """At the node's `at_s`; null where it was not read."""


class NodeFigures(msgspec.Struct, frozen=True):
    """How one node did."""

    host: str
    at_s: list[float]
    """Seconds after the event; without one, before the end of the record."""
    figures: list[FigureSeries]
    troubles: list[str] = []
    """What could not be read, and why."""


class TelemetryReport(msgspec.Struct, frozen=True):
    """The figures of the nodes."""

    event: str = ""
    """What the times are measured from: `the overflow`; "" where nothing happened."""
    event_time: str | None = None
    """ISO 8601, by the collector's clock."""
    notable: list[UnusualFigure] = []
    """What stands out around the event, the verdict's node first; of many nodes alike, the first few."""
    nodes: list[NodeFigures] = []
    """The verdict's node, those where something stands out, then others."""
    nodes_left_out: int = 0
    """Whose figures are in the store alone."""
    trouble: str = ""
    """Why it could not be told; "" where it could."""


# An insight: report.json's `insights`.


class RunInsight(msgspec.Struct, frozen=True):
    """One finding over ranks, modules and batches. It is no verdict: nothing of it has to be wrong."""

    kind: str
    """no_scaler, scaler_collapsing, scaler_too_small, growth, near_overflow, underflow, dead_module, replica_drift,
    rank_unlike; unknown: one of them could not be told"""
    text: str
    """One sentence without its full stop."""
    next: str
    """The mend, as a sentence."""
    ranks: list[int]
    modules: list[str]
    since: int | None = None
    """The first batch in which it was seen."""


def where_text(ranks: Iterable[int], all_ranks: Sequence[int]) -> str:
    """`on all 8 ranks`, `on rank 3`.

    >>> where_text([0, 1], [0, 1]), where_text([3], [0, 1, 2, 3]), where_text([0], [0])
    ('on both ranks', 'on rank 3', 'on rank 0')
    """
    found = sorted(set(ranks))
    if len(found) > 1 and len(found) == len(set(all_ranks)):
        return "on both ranks" if len(found) == 2 else f"on all {len(found)} ranks"
    return f"on {ranks_text(found)}"


def modules_text(modules: Sequence[str]) -> str:
    """`41 modules`; a few by their names.

    >>> modules_text(["fc1"]), modules_text(["fc1", ""]), modules_text(["a", "b", "c", "d"])
    ('`fc1`', '`fc1` and the root', '4 modules (`a`, `b`, ...)')
    """
    names = [f"`{module}`" if module else "the root" for module in modules]
    if len(names) <= 2:
        return " and ".join(names)
    return f"{len(names)} modules ({names[0]}, {names[1]}, ...)"


SCHEMA = 1


def label_of(number: int) -> str:
    """What a table calls a rank: `3`; or a process that is none: `pid 4242`."""
    return str(number) if is_rank(number) else f"pid {pid_of_number(number)}"


class AttemptReport(msgspec.Struct, frozen=True):
    """An attempt that the verdict is not about."""

    attempt: int
    statement: str
    hang: Verdict | None = None
    """Of an attempt that was ended because no rank moved: what the verdict was."""


class EarlierLife(msgspec.Struct, frozen=True):
    """A life of the job before the one that the report is about."""

    run: str
    kind: str
    """"" if it has left no report."""
    statement: str


class RankSeries(msgspec.Struct, frozen=True):
    """One rank. `abs_max` is null where it was inf or nan."""

    rank: int
    batches: list[int]
    abs_max: list[float | None]


class ModuleHistory(msgspec.Struct, frozen=True):
    """What the verdict's module returned, on each rank, over the batches as that rank counts them."""

    module: str
    cls: str = msgspec.field(name="class")
    dtype: str
    limit: float | None
    """The largest finite number of the dtype."""
    ranks: list[RankSeries]
    left_out: int = 0
    """Ranks that have a history and are not here, or have one that cannot be read."""


class HeatModule(msgspec.Struct, frozen=True):
    """One module."""

    module: str
    cls: str = msgspec.field(name="class")
    dtype: str


class ModulesByRanks(msgspec.Struct, frozen=True):
    """What modules returned in the batch that the verdict is about, on each rank that was there at the same step."""

    batch: int
    modules: list[HeatModule]
    """In the order of their first calls, up to the verdict's and beyond it."""
    ranks: list[int]
    abs_max: list[list[float | None]]
    """Of each rank. null: inf or nan; -1: not measured."""


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
    """`gpuwatch check`: there was a preflight and no script."""
    earlier: list[EarlierLife] = []
    """Of a scheduler's job that was requeued: how its earlier lives ended."""


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
    """How much was recorded and did not arrive."""

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
    """Values near overflow or in underflow, the worst first; `warned` counts every such row."""
    warned: int = 0
    scaler: dict[str, Any] | None = None
    """The steps that a GradScaler skipped. They are expected and raise no alarm."""
    scaler_skips: int = 0
    ignored: int = 0
    """Rows that `--ignore` has waived; `hidden` has the first of each rule and place."""
    hidden: list[dict[str, Any]] = []
    cost: dict[str, Any] | None = None
    """Medians of the time from one batch to the next, watched and skipped, where that was measured."""
    batches_skipped: int = 0
    """Batches that `--every` skipped."""
    gpu: GpuSincePreflight | None = None
    """Error counters and XIDs of its GPU since the preflight, where there is one."""
    stack: list[str] = []
    """Where its main thread stood when all ranks were asked because one had stalled, innermost call first."""
    frames_comparable: bool = False
    """Whether `frames` are of the same step and collectives as those of the verdict's rank."""
    pages: int = 0
    """Batches of it that are in the store. `frames` is empty for most ranks of a large job; for those of one rank:
    `gpuwatch report --rank N`."""
    traces_left_out: int = 0
    """Traced batches that are in the store alone."""
    absorbed: int = 0
    """Bad values that led nowhere; `absorbed_first` has the first of each place, and why it did."""
    absorbed_first: list[dict[str, Any]] = []
    passed: list[dict[str, Any]] = []
    """What was not finite and went into collectives and messages, or came out of them."""
    threads: list[str] = []
    """Where other threads of it stood, if it did not answer itself and py-spy is installed on its node."""
    traces_thinned: int = 0
    """Pages of `--trace-batches` that were recorded and not kept: a job's store takes 1 GiB of them."""
    groups_not_shown: int = 0
    """Process groups that found no room in its table of them."""

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
    """Of a job that torchrun restarted: how the attempts ended that the verdict is not about."""
    history: ModuleHistory | None = None
    """How it came to an overflow: the verdict's module over the batches."""
    by_module: ModulesByRanks | None = None
    """The modules of all ranks in the batch of an overflow."""
    forecasts: list[ModuleForecast] = []
    """Modules that were about to pass their dtype's limit, as it was told while the job ran."""
    insights: list[RunInsight] = []
    """What values near trouble come to, the most harmful first."""
    steps: StepReport | None = None
    """Where the ranks' time goes, and a rank that the others wait for."""
    telemetry: TelemetryReport | None = None
    """How the nodes did around the event."""
    processes: list[RankReport] = []
    """Below `gpuwatch run`: processes that ran a module and are no rank. `rank` is below 0, `pid` says which it is."""

    @property
    def everyone(self) -> list[RankReport]:
        """The ranks, and the processes that are none."""
        return [*self.ranks, *self.processes]

    @property
    def named(self) -> int | None:
        """Whom the verdict names: a rank, or the number of a process that is none."""
        pid = self.verdict.pid
        found = next((one.rank for one in self.processes if pid is not None and one.pid == pid), None)
        return self.verdict.rank if found is None else found


def to_json(report: RunReport) -> bytes:
    """Indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1)


class ModuleForecast(msgspec.Struct, frozen=True):
    """report.json's `forecasts`: one module, as the first rank told it. Batches are as that rank counts them."""

    module: str
    cls: str = msgspec.field(name="class")
    dtype: str
    limit: float
    ranks: list[int]
    """All that told it."""
    rank: int
    """The first of them."""
    batch: int
    """In which it was told."""
    abs_max: float
    """In that batch."""
    after: int
    """The limit is passed in so many batches from there,"""
    earliest: int
    latest: int
    """and between these."""
    since: int
    """The first batch that it was told from."""


GRADES = ("ok", "victim", "unknown", "warn", "fail")
"""From good to bad. A `victim` failed only because others did. `""` is a stage that was not reached."""


class StageCell(msgspec.Struct, frozen=True):
    """One stage on one node."""

    grade: str
    ranks: int
    """How many of its ranks have ended it."""
    seconds: float = 0.0
    """Of the slowest of them."""
    rank: int | None = None
    """The slowest of them; of a failed stage, the first rank that has failed in it."""
    detail: str = ""
    """What that rank says of it."""


class NodeRow(msgspec.Struct, frozen=True):
    """One node."""

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
    """Of the slowest rank, as the bandwidths are."""
    algbw_gbs: float
    busbw_gbs: float
    rank: int
    host: str
    best_busbw_gbs: float


class RankInventory(msgspec.Struct, frozen=True):
    """What a rank runs on."""

    rank: int
    facts: InventoryFacts


class PreflightReport(msgspec.Struct, frozen=True):
    """report.json's `preflight`."""

    outcome: str = "off"
    """off, ok, skipped, victim or failed"""
    seconds: float = 0.0
    """Of the slowest rank, all stages together."""
    stages: list[StageColumn] = []
    nodes: list[NodeRow] = []
    findings: list[PreflightFinding] = []
    """The worst first, without those that are `ok`."""
    bandwidth: list[BandwidthSize] = []
    inventory: list[RankInventory] = []
