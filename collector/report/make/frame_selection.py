"""Which frames of a rank a report shows: the last ones up to the verdict's place, which is the same on every rank."""

from __future__ import annotations

from typing import NamedTuple

from ....core.frames import Frame
from ....core.recorder.lone_process import pid_of_number
from ....core.recorder.page_tables import whole
from ...decide.overflow.replicas import page_of
from ...decide.overflow.same_point import page_at_same_point
from ...decide.verdict_model import Verdict
from ...facts.facts import RankFacts, RunFacts
from ...facts.kept_pages import KeptPage


class Target(NamedTuple):
    """What the shown frames of all ranks are compared with."""

    rank: RankFacts
    page: KeptPage
    frame: Frame | None
    """The frame that the verdict is about; None if it is about none."""


class Shown(NamedTuple):
    """The frames of a rank that are shown."""

    frames: list[Frame]
    comparable: bool
    """They are of the same point as the target's."""


def target_of(facts: RunFacts, verdict: Verdict) -> Target | None:
    """The frame that an overflow's verdict is about; for another verdict, the last page of the rank that it names.

    Without a rank in the verdict, the first rank is taken that has such a page.
    """
    attempt = verdict.attempt if verdict.attempt is not None else facts.last_attempt
    ranks = [rank for rank in facts.of_attempt(attempt) if verdict.rank is None or rank.rank == verdict.rank]
    if verdict.pid is not None:
        ranks = [rank for rank in facts.processes.values() if pid_of_number(rank.rank) == verdict.pid]
    for rank in ranks if verdict.kind == "overflow" else ():
        found = rank.diagnosis
        if found is None or (found.root, found.batch) != (verdict.root, verdict.batch):
            continue
        page = page_of(facts, found)
        if page is None:
            return None
        return Target(rank, page, next((f for f in page.frames if f.index == found.frame), None))
    if verdict.kind == "overflow":
        return None
    return next((Target(rank, rank.pages[max(rank.pages)], None) for rank in ranks if rank.pages), None)


def frames_to_show(rank: RankFacts, verdict: Verdict, target: Target | None, max_frames: int) -> Shown:
    """The last frames up to the target's, on every rank, so that they stand side by side.

    A rank without a page of the same point shows the last frames that it has.
    """
    page: KeptPage | None = None
    if target is not None:
        page = target.page if rank is target.rank else page_at_same_point(target.rank, target.page, rank)
    comparable = page is not None
    if page is None and verdict.kind == "overflow":
        place = (verdict.root, verdict.batch, verdict.step)
        page = next((p for p in rank.pages.values() if (p.root, p.batch, p.step) == place), None)
    if page is None and rank.pages:
        page = rank.pages[max(rank.pages)]
    if page is None:
        return Shown([], False)
    frames = sorted(page.frames, key=lambda frame: frame.index)
    end = len(frames)
    if verdict.kind == "overflow":
        last = _last(rank, page, verdict, target if comparable else None)
        end = next((n + 1 for n, frame in enumerate(frames) if frame.index == last), end)
    return Shown([whole(frame) for frame in frames[max(0, end - max_frames) : end]], comparable)


def frames_of_batch(rank: RankFacts, batch: int, target: Target | None) -> Shown:
    """All frames of a batch that was asked for, if it was received: of the target's root, where there are several."""
    pages = rank.pages.of_batch(batch)
    same = [page for page in pages if target is not None and page.root == target.page.root]
    page = max(same or pages, key=lambda page: page.number, default=None)
    if page is None:
        return Shown([], False)
    return Shown([whole(frame) for frame in sorted(page.frames, key=lambda frame: frame.index)], True)


def _last(rank: RankFacts, page: KeptPage, verdict: Verdict, target: Target | None) -> int | None:
    """Index of the frame to end with: of the rank's own diagnosis, else the target's counterpart.

    What a rank only received from others, as a gradient after an all-reduce, is no place of its own to end with.
    """
    own = rank.diagnosis
    if own is not None and own.source in ("received", "reduced") and target is not None and rank is not target.rank:
        own = None
    if own is not None and (own.batch, own.root) == (page.batch, page.root):
        shown = rank.anomalies[0].frame if own.turned is not None and own.from_page else own.frame
        return max(shown, own.frame)
    if target is not None and target.frame is not None:
        wanted = target.frame
        alike = [frame for frame in page.frames if (frame.module, frame.phase) == (wanted.module, wanted.phase)]
        roles = {row.role for row in wanted.rows}
        same = [frame for frame in alike if roles & {row.role for row in frame.rows}] or alike
        if same:
            return min(same, key=lambda frame: (abs(frame.index - wanted.index), frame.index)).index
    return next((frame.index for frame in page.frames if frame.module == verdict.module), None)
