"""The parts of the ranks' records that a report shows: last frames, traced batches, and the outputs of modules."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

from ...core.codes import VerdictKind
from ...core.frames import LOSS_MODULE, Frame, FramePhase, Page
from ...core.identity import pid_of_number
from ...core.recorder.page_tables import whole
from ...core.values import DTYPE_MAX
from ...core.wire.columns import NO_NUMBER
from ..facts.kept_pages import KeptPage, OpenHistory
from ..facts.rank_facts import RankFacts
from ..facts.replicas import page_at_same_point, page_of, peers_of, run_the_same_model
from ..facts.run_facts import RunFacts
from ..report.run_figures import HeatModule, ModuleHistory, ModulesByRanks, RankSeries
from ..report.verdict import Verdict

# Which frames of a rank a report shows: the last ones up to the verdict's place, which is the same on every rank.


class ReportTarget(NamedTuple):
    """The page and frame that the shown frames of all ranks are compared with."""

    rank: RankFacts
    page: KeptPage
    frame: Frame | None
    """The frame that the verdict is about; None if it is about none."""


SelectedFrames = tuple[list[Frame], bool]
"""The frames of a rank that are shown, and whether they are of the same point as the target's."""


def target_of(facts: RunFacts, verdict: Verdict) -> ReportTarget | None:
    """The frame that an overflow's verdict is about; for another verdict, the last page of the rank that it names.

    Without a rank in the verdict, the first rank is taken that has such a page.
    """
    attempt = verdict.attempt if verdict.attempt is not None else facts.last_attempt
    ranks = [rank for rank in facts.of_attempt(attempt) if verdict.rank is None or rank.rank == verdict.rank]
    if verdict.pid is not None:
        ranks = [rank for rank in facts.processes.values() if pid_of_number(rank.rank) == verdict.pid]
    for rank in ranks if verdict.kind == VerdictKind.OVERFLOW else ():
        found = rank.diagnosis
        if found is None or (found.root, found.batch) != (verdict.root, verdict.batch):
            continue
        page = page_of(facts, found)
        if page is None:
            return None
        return ReportTarget(rank, page, next((f for f in page.frames if f.index == found.row.frame), None))
    if verdict.kind == VerdictKind.OVERFLOW:
        return None
    return next((ReportTarget(rank, rank.pages[max(rank.pages)], None) for rank in ranks if rank.pages), None)


def frames_to_show(rank: RankFacts, verdict: Verdict, target: ReportTarget | None, max_frames: int) -> SelectedFrames:
    """The last frames up to the target's, on every rank, so that they stand side by side.

    A rank without a page of the same point shows the last frames that it has. A hang has outputs alone: where in a
    backward a rank stands, its stack says.
    """
    page: KeptPage | None = None
    overflow = verdict.kind == VerdictKind.OVERFLOW
    if target is not None:
        page = target.page if rank is target.rank else page_at_same_point(target.rank, target.page, rank)
    comparable = page is not None
    if page is None and overflow:
        place = (verdict.root, verdict.batch, verdict.step)
        page = next((p for p in rank.pages.values() if (p.root, p.batch, p.step) == place), None)
    if page is None and rank.pages:
        page = rank.pages[max(rank.pages)]
    if page is None:
        return [], False
    frames = sorted(page.frames, key=lambda frame: frame.index)
    if verdict.kind == VerdictKind.HANG:
        frames = [frame for frame in frames if frame.phase == FramePhase.FORWARD]
    end = len(frames)
    if overflow:
        last = _last(rank, page, verdict, target if comparable else None)
        end = next((n + 1 for n, frame in enumerate(frames) if frame.index == last), end)
    return [whole(frame) for frame in frames[max(0, end - max_frames) : end]], comparable


def frames_of_batch(rank: RankFacts, batch: int, target: ReportTarget | None) -> SelectedFrames:
    """All frames of a batch that was asked for, if it was received: of the target's root, where there are several."""
    pages = rank.pages.of_batch(batch)
    same = [page for page in pages if target is not None and page.root == target.page.root]
    page = max(same or pages, key=lambda page: page.number, default=None)
    if page is None:
        return [], False
    return [whole(frame) for frame in sorted(page.frames, key=lambda frame: frame.index)], True


def _last(rank: RankFacts, page: KeptPage, verdict: Verdict, target: ReportTarget | None) -> int | None:
    """Index of the frame to end with: of the rank's own diagnosis, else the target's counterpart.

    A value that a rank only received from others, such as a gradient after an all-reduce, is no place to end with.
    """
    own = rank.diagnosis
    if own is not None and own.source in ("received", "reduced") and target is not None and rank is not target.rank:
        own = None
    if own is not None and (own.batch, own.root) == (page.batch, page.root):
        shown = rank.anomalies[0].frame if own.mask.turned is not None and own.from_page else own.row.frame
        return max(shown, own.row.frame)
    if target is not None and target.frame is not None:
        wanted = target.frame
        alike = [frame for frame in page.frames if (frame.module, frame.phase) == (wanted.module, wanted.phase)]
        roles = {row.role for row in wanted.rows}
        same = [frame for frame in alike if roles & {row.role for row in frame.rows}] or alike
        if same:
            return min(same, key=lambda frame: (abs(frame.index - wanted.index), frame.index)).index
    return next((frame.index for frame in page.frames if frame.module == verdict.module), None)


# The ranks whose frames and traced batches a report holds: all of a small job; in a large one, those a reader needs.
#
# Other ranks' frames are in the store: `gpuwatch report --rank N` reads them there.

SMALL_JOB = 32
"""Ranks of a job whose report holds frames of all ranks."""
_MOST_OF_A_KIND = 8
MOST_ROWS = 10_000
"""In all traced batches of a report, about 4 MB of JSON."""
MOST_ROWS_OF_ONE = 200_000
"""In those of a rank that was asked for."""


def ranks_to_show(
    facts: RunFacts, ranks: list[RankFacts], verdict: Verdict, target: ReportTarget | None, asked: int | None
) -> list[RankFacts]:
    """The requested rank, the verdict's, those beside it, those that differ, and a healthy one like it."""
    if len(ranks) <= SMALL_JOB:
        return ranks
    concurrent = {other.rank for other in verdict.concurrent}
    cascade = {other.rank for other in verdict.cascade}
    found = [rank for rank in ranks if rank.rank == asked]
    found += [target.rank] if target is not None else []
    found += [rank for rank in ranks if rank.rank == verdict.rank]
    found += [rank for rank in ranks if rank.rank in concurrent][:_MOST_OF_A_KIND]
    found += [rank for rank in ranks if rank.diagnosis is not None and rank.rank not in concurrent][:_MOST_OF_A_KIND]
    found += [rank for rank in ranks if rank.errors and rank.rank not in cascade][:_MOST_OF_A_KIND]
    found += _healthy(facts, target)[:1] if target is not None else []
    return list({rank.rank: rank for rank in found}.values())


def _healthy(facts: RunFacts, target: ReportTarget) -> list[RankFacts]:
    peers = sorted(peers_of(facts, target.page).items())
    ranks = [(facts.ranks[target.rank.attempt, number], page) for number, page in peers]
    return [rank for rank, page in ranks if rank.diagnosis is None and run_the_same_model(target.page, page)]


def traces_to_show(
    facts: RunFacts, ranks: list[RankFacts], shown: list[RankFacts], asked: int | None
) -> dict[int, tuple[list[Page], int]]:
    """By rank: its traced batches, as many as there is room for, and how many are left out."""
    wanted = {batch for node in facts.nodes.values() if node.hello is not None for batch in node.hello.trace_batches}
    if not wanted:
        return {}
    found: dict[int, tuple[list[Page], int]] = {}
    room = MOST_ROWS
    held = {rank.rank for rank in shown}
    for rank in [*shown, *(rank for rank in ranks if rank.rank not in held)]:
        kept = [page for _, page in sorted(rank.pages.items()) if page.batch in wanted]
        left = MOST_ROWS_OF_ONE if rank.rank == asked else room if rank.rank in held else 0
        pages: list[Page] = []
        for page in kept:
            if page.num_rows > left and not (left == MOST_ROWS and not pages):
                break
            pages.append(page.whole())
            left -= page.num_rows
        if rank.rank != asked:
            room = min(room, max(0, left))
        found[rank.rank] = pages, len(kept) - len(pages)
    return found


# Growth before an overflow: abs max of modules' outputs, over the batches and over the ranks.

MOST_RANKS = 256
"""Most ranks whose history a report holds: in a larger job the verdict's, those with an anomaly, and some others."""
_MOST_POINTS = 8192
_MOST_CELLS = 8192


def open_histories(facts: RunFacts, verdict: Verdict, attempt: int) -> tuple[dict[int, OpenHistory], int]:
    """By rank, and the number of ranks whose history is left out or cannot be read.

    Those of the verdict's root; where it is about none, of the first root that there is.
    """
    ranks = facts.of_attempt(attempt)
    roots = [kept.root for rank in ranks for kept in rank.histories.values()]
    root = verdict.root if verdict.root is not None else next(iter(roots), None)
    kept = ((rank, next((each for each in rank.histories.values() if each.root == root), None)) for rank in ranks)
    there = {rank.rank: (rank, history) for rank, history in kept if history is not None}
    chosen = _chosen([rank for rank, _ in there.values()], verdict)
    opened = {rank.rank: found for rank in chosen if (found := there[rank.rank][1].open()) is not None}
    return opened, len(there) - len(opened)


def _chosen(ranks: list[RankFacts], verdict: Verdict) -> list[RankFacts]:
    if len(ranks) <= MOST_RANKS:
        return ranks
    first = [rank for rank in ranks if rank.rank == verdict.rank]
    first += [rank for rank in ranks if rank.rank != verdict.rank and rank.diagnosis is not None]
    others = [rank for rank in ranks if rank.rank != verdict.rank and rank.diagnosis is None]
    left = max(0, MOST_RANKS - len(first))
    first += [others[n * len(others) // left] for n in range(min(left, len(others)))]
    return sorted(first[:MOST_RANKS], key=lambda rank: rank.rank)


def _named_in(verdict: Verdict) -> str | None:
    """The column of the histories that an overflow is about: a module, or the loss; None if it is about neither."""
    if verdict.kind != VerdictKind.OVERFLOW:
        return None
    return LOSS_MODULE if verdict.phase == FramePhase.LOSS else verdict.module


def over_batches(opened: dict[int, OpenHistory], verdict: Verdict, left_out: int) -> ModuleHistory | None:
    """None if the verdict names neither a module nor the loss, or no history was received."""
    name = _named_in(verdict)
    if name is None:
        return None
    return _series_of(HeatModule(name, verdict.cls or "", verdict.dtype or ""), opened, verdict.rank, left_out)


def losses_over_batches(opened: dict[int, OpenHistory], verdict: Verdict, left_out: int) -> ModuleHistory | None:
    """The loss, where it is not what the verdict is about; None if no history has it."""
    if _named_in(verdict) == LOSS_MODULE:
        return None
    return _series_of(HeatModule(LOSS_MODULE, "", ""), opened, verdict.rank, left_out)


def _series_of(
    returned: HeatModule, opened: dict[int, OpenHistory], named: int | None, left_out: int
) -> ModuleHistory | None:
    """`returned`: a column, with what is known of it; the history of the rank that is `named` knows it best."""
    found: list[RankSeries] = []
    name = returned.module
    most = max(32, min(512, _MOST_POINTS // max(1, len(opened))))
    for rank, history in opened.items():
        column = next((n for n, each in enumerate(history.modules) if each.module == name), None)
        if column is None:
            continue
        if rank == named or not returned.dtype:
            returned = history.modules[column]
        seen = list(zip(history.batches, history.numbers[:, column].tolist(), strict=True))
        points = [(batch, _number(number)) for batch, number in seen if number != NO_NUMBER][-most:]
        if points:
            batches, numbers = [batch for batch, _ in points], [number for _, number in points]
            found.append(RankSeries(rank, batches, numbers, _gaps(seen, batches)))
    if not found:
        return None
    return ModuleHistory(returned.module, returned.cls, returned.dtype, DTYPE_MAX.get(returned.dtype), found, left_out)


def _gaps(seen: list[tuple[int, float]], batches: list[int]) -> list[int]:
    """As of `RankSeries.gaps`: batches that the module, or the loss, was not in, such as those of an evaluation."""
    found, was_read = [], True
    for batch, number in seen:
        if batches[0] < batch < batches[-1]:
            is_read = number != NO_NUMBER
            if was_read and not is_read:
                found.append(batch)
            was_read = is_read
    return sorted({*found, *_far_apart(batches)})


def _far_apart(batches: list[int]) -> list[int]:
    """The first batch of each stretch that nobody has read: further than twice from both neighbours' distances.

    A history gets coarser with age, by two each time, and is even otherwise.
    """
    distances = [after - before for before, after in pairwise(batches)]
    around = [
        max(distances[max(0, n - 1) : n] + distances[n + 1 : n + 2], default=far) for n, far in enumerate(distances)
    ]
    return [batches[n] + 1 for n, far in enumerate(distances) if far > 2 * around[n]]


def over_ranks(opened: dict[int, OpenHistory], verdict: Verdict) -> ModulesByRanks | None:
    """None as above, and where the verdict's rank has nothing of its batch."""
    name = _named_in(verdict)
    if name is None or verdict.batch is None:
        return None
    place = verdict.batch, verdict.step
    rows: dict[int, tuple[OpenHistory, int]] = {}
    for rank, history in opened.items():
        at = next((n for n, at in enumerate(zip(history.batches, history.steps, strict=True)) if at == place), None)
        if at is not None:
            rows[rank] = history, at
    if verdict.rank not in rows:
        return None
    named, at = rows[verdict.rank]
    there = dict.fromkeys(
        each for each, number in zip(named.modules, named.numbers[at].tolist(), strict=True) if number != NO_NUMBER
    )
    for history, _ in rows.values():
        if history.modules is not named.modules:
            there.update(dict.fromkeys(history.modules))
    modules = list({each.module: each for each in reversed(there)}.values())[::-1]
    modules = _around(modules, name, max(24, min(200, _MOST_CELLS // len(rows))))
    return ModulesByRanks(verdict.batch, modules, sorted(rows), [_row(*rows[rank], modules) for rank in sorted(rows)])


def _around(modules: list[HeatModule], name: str | None, most: int) -> list[HeatModule]:
    """At most `most`: more of those in front of the verdict's than behind it."""
    if len(modules) <= most:
        return modules
    at = next((n for n, each in enumerate(modules) if each.module == name), 0)
    first = min(max(0, at - most * 3 // 4), len(modules) - most)
    return modules[first : first + most]


def _row(history: OpenHistory, at: int, modules: list[HeatModule]) -> list[float | None]:
    column = {each.module: n for n, each in enumerate(history.modules)}
    numbers = history.numbers[at].tolist()
    return [_number(numbers[column[each.module]]) if each.module in column else NO_NUMBER for each in modules]


def _number(number: float) -> float | None:
    """What was kept has no more than three digits."""
    return float(f"{number:.3g}") if math.isfinite(number) else None
