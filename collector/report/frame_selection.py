"""Which frames of a rank a report shows: the last ones up to where the verdict points, the same place on every rank."""

from __future__ import annotations

from ...core.frames import Frame, Page
from ..decide.replicas import page_of_batch
from ..decide.verdict_model import Verdict
from ..facts import RankFacts, RunFacts


def frames_to_show(rank: RankFacts, verdict: Verdict, target: Frame | None, max_frames: int) -> list[Frame]:
    """The last frames up to the verdict's, on every rank, so that they stand side by side; else the last there are."""
    page: Page | None = None
    if verdict.kind == "overflow" and verdict.batch is not None and verdict.root is not None:
        page = page_of_batch(rank, verdict.root, verdict.batch)
    if page is None and rank.pages:
        page = rank.pages[max(rank.pages)]
    if page is None:
        return []
    frames = sorted(page.frames, key=lambda frame: frame.index)
    end = len(frames)
    if verdict.kind == "overflow":
        end = next((n + 1 for n, f in enumerate(frames) if f.index == _last(rank, page, verdict, target)), end)
    return frames[max(0, end - max_frames) : end]


def _last(rank: RankFacts, page: Page, verdict: Verdict, target: Frame | None) -> int | None:
    """Index of the frame to end with: of the rank's own diagnosis, else the one that is the verdict's elsewhere."""
    own = rank.diagnosis
    if own is not None and (own.batch, own.root) == (page.batch, page.root):
        shown = rank.anomalies[0].frame if own.turned is not None and own.from_page else own.frame
        return max(shown, own.frame)
    if target is not None and target.batch == page.batch:
        alike = [f for f in page.frames if (f.module, f.phase) == (target.module, target.phase)]
        roles = {row.role for row in target.rows}
        same = [f for f in alike if roles & {row.role for row in f.rows}] or alike
        if same:
            return min(same, key=lambda f: (abs(f.index - target.index), f.index)).index
    return next((f.index for f in page.frames if f.module == verdict.module), None)


def target_of(facts: RunFacts, verdict: Verdict) -> Frame | None:
    """The frame that the verdict is about, on the rank that it names, or on the first that has a diagnosis."""
    for rank in facts.of_attempt(verdict.attempt or 0):
        if verdict.rank is not None and rank.rank != verdict.rank:
            continue
        found = rank.diagnosis
        if found is None or (found.root, found.batch) != (verdict.root, verdict.batch):
            continue
        page = page_of_batch(rank, found.root, found.batch)
        return next((f for f in page.frames if f.index == found.frame), None) if page is not None else None
    return None
