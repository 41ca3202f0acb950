"""How the outputs of modules and the loss grew over the batches before an overflow, on the rank and on the others."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy

from ...core.frames import LOSS_MODULE, FramePhase, module_text
from ...core.growth_run import MOST_BATCHES, SizeSeries, growing_run, known_sizes
from ...core.wire.columns import NO_NUMBER
from ..report.run_figures import HeatModule
from .diagnosis import LocalDiagnosis
from .kept_pages import OpenHistory
from .rank_facts import RankFacts
from .run_facts import RunFacts

_MOST_RANKS = 8
"""Ranks whose histories are opened."""
_ALIKE = 30.0
"""Ranks are alike whose outputs in one batch differ by less than this factor: each has its own data."""
_MOST_SHOWN = 4


@dataclass(frozen=True)
class ModuleGrowth:
    """The first module of a model, in the order of calls, whose outputs ran away; or its loss, where none's did."""

    module: str
    cls: str
    batches: list[int]
    """The batch before it began to grow, and those in which it grew."""
    sizes: list[float]
    """abs max in those."""
    alike: list[int]
    """Other ranks on which it was as large."""
    unlike: list[int]
    """Other ranks on which it was not."""

    @property
    def is_loss(self) -> bool:
        """Whether it is the loss."""
        return self.module == LOSS_MODULE

    @property
    def text(self) -> str:
        """`what `fc` (Linear) returned`, or `the loss`."""
        return "the loss" if self.is_loss else f"what {module_text(self.module, self.cls)} returned"

    @property
    def steps(self) -> int:
        """In how many batches in a row it grew."""
        return len(self.batches) - 1

    @property
    def shown(self) -> tuple[list[int], list[float]]:
        """Batches and sizes to show: the last few."""
        return self.batches[-_MOST_SHOWN:], self.sizes[-_MOST_SHOWN:]


def growth_of(facts: RunFacts, first: LocalDiagnosis) -> ModuleGrowth | None:
    """None if nothing grew by a factor of 100 in batches in a row up to the batch of the diagnosis."""
    opened = _histories(facts, first)
    own = opened.pop(first.rank, None)
    if own is None:
        return None
    for column, module in sorted(enumerate(own.modules), key=lambda at: at[1].module == LOSS_MODULE):
        run = growing_run(_series(own, column, first.batch), first.batch)
        if not run:
            continue
        batches, sizes = [batch for batch, _ in run], [size for _, size in run]
        alike: list[int] = []
        unlike: list[int] = []
        for rank, history in opened.items():
            theirs = _size_on(history, module.module, batches[-1])
            if theirs is not None:
                (alike if sizes[-1] / _ALIKE < theirs < sizes[-1] * _ALIKE else unlike).append(rank)
        return ModuleGrowth(module.module, module.cls, batches, sizes, alike, unlike)
    return None


def _histories(facts: RunFacts, first: LocalDiagnosis) -> dict[int, OpenHistory]:
    """Those of the diagnosis's root, by rank: its own, and some of others."""
    ranks = sorted(facts.of_attempt(first.attempt), key=lambda rank: rank.rank != first.rank)[:_MOST_RANKS]
    kept = [(rank.rank, each) for rank in ranks for each in rank.histories.values() if each.root == first.root]
    found = {rank: opened for rank, each in kept if (opened := each.open()) is not None}
    if not found and len(ranks) == 1:
        found[first.rank] = _of_pages(ranks[0], first)
    return found


def _of_pages(rank: RankFacts, first: LocalDiagnosis) -> OpenHistory:
    """From the pages of one process: no agent has kept the history of a `gpuwatch.watch`."""
    pages = [page for page in rank.pages.values() if page.root == first.root and page.batch <= first.batch]
    pages = sorted(pages, key=lambda page: page.number)[-MOST_BATCHES:]
    modules: dict[str, HeatModule] = {}
    found: list[dict[str, float]] = []
    for page in pages:
        sizes: dict[str, float] = {}
        for frame in page.frames:
            if frame.phase not in (FramePhase.FORWARD, FramePhase.LOSS):
                continue
            for row in frame.outputs if frame.phase == FramePhase.FORWARD else frame.rows:
                size = row.abs_max if row.finite and row.abs_max is not None else math.inf
                modules.setdefault(frame.module, HeatModule(frame.module, frame.cls, row.dtype))
                sizes[frame.module] = max(sizes.get(frame.module, 0.0), size)
        found.append(sizes)
    numbers = numpy.array([[sizes.get(name, NO_NUMBER) for name in modules] for sizes in found], numpy.float32)
    return OpenHistory(
        [page.batch for page in pages],
        [page.step for page in pages],
        list(modules.values()),
        numbers.reshape(len(pages), len(modules)),
    )


def _series(history: OpenHistory, column: int, until: int) -> SizeSeries:
    return known_sizes(zip(history.batches, history.numbers[:, column].tolist(), strict=True), until)


def _size_on(history: OpenHistory, module: str, batch: int) -> float | None:
    column = next((n for n, each in enumerate(history.modules) if each.module == module), None)
    if column is None:
        return None
    return dict(_series(history, column, batch)).get(batch)
