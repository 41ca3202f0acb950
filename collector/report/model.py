"""report.json, schema 1: fields may be added, none change meaning. Made from the facts and the verdict, nothing else.

docs/report.md says what the fields of RunReport, RunInfo, Verdict and RankReport hold. Numbers that are non-finite are
null in JSON; `nan`, `posinf` and `neginf` beside them say what they were.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...core.codes import VerdictKind
from ...core.events.node_events import GpuHealth, GpuXid
from ...core.frames import Frame, FramePhase, Page
from ...core.gpu.counters import GpuSincePreflight
from ...core.identity import is_rank, pid_of_number, rank_name
from .preflight_table import PreflightReport
from .run_figures import ModuleForecast, ModuleHistory, ModulesByRanks, RunInsight, StepReport, TelemetryReport
from .verdict import SeenIn, Verdict

SCHEMA = 1


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
    losses: ModuleHistory | None = None
    """The loss of the ranks over the batches, where `history` is not that."""

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
