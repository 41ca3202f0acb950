"""report.json, schema 1: fields may be added, none change meaning. Made from the facts and the verdict, nothing else.

Numbers that are non-finite are null in JSON; `nan`, `posinf` and `neginf` beside them say what they were.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...core.frames import Frame, Page
from ...core.gpu_health.difference import GpuSincePreflight
from ...core.recorder.lone_process import is_rank, pid_of_number, rank_name
from ...core.records import GpuHealth, Xid
from ..decide.insights.growth import ModuleForecast
from ..decide.insights.insight import Insight
from ..decide.preflight_table import PreflightReport
from ..decide.step_model import StepReport
from ..decide.telemetry.model import TelemetryReport
from ..decide.verdict_model import SeenIn, Verdict

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


class FirstAnomaly(msgspec.Struct, frozen=True):
    """The first non-finite value of a rank."""

    batch: int
    step: int
    frame: int
    module: str
    cls: str = msgspec.field(name="class")
    phase: str
    role: str | None
    """null if the value was first seen in a row of another module: `seen_in`"""
    value: str
    dtype: str
    origin: bool
    between: tuple[str, str | None] | None = None
    seq: int = -1
    seen_in: SeenIn | None = None


class Lost(msgspec.Struct, frozen=True):
    """How much was recorded and did not arrive."""

    pages: int = 0
    messages: int = 0
    frames: int = 0
    rows: int = 0

    @property
    def total(self) -> int:
        """All of it together."""
        return self.pages + self.messages + self.frames + self.rows


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
    first_anomaly: FirstAnomaly | None
    frames: list[Frame]
    lost: Lost
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
    xids: list[Xid] = []
    """XIDs of all its GPUs, including those that no rank used."""


class Report(msgspec.Struct, frozen=True):
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
    insights: list[Insight] = []
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


def to_json(report: Report) -> bytes:
    """Indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1)
