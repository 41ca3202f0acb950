"""What report.json shows of the run's figures beside the verdict: times, telemetry, insights, modules over batches."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ...core.codes import Code


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
    replica_drift, rank_unlike, gradients_zeroed, weights_unmoved, dead_activation, gradient_stopped, parts_unmoved;
    unknown: one of them failed"""
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


class RankSeries(msgspec.Struct, frozen=True):
    """`abs_max` is null where it was inf or nan."""

    rank: int
    batches: list[int]
    abs_max: list[float | None]
    gaps: list[int] = []
    """Batches that it was seen in without a number of this one: the first of each row of them between two numbers."""


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
