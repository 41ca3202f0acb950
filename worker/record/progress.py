"""Where this rank is in its run."""

from __future__ import annotations

import time

import torch

from ...core.frames import Frame
from ...core.recorder.layout import Field, RankPhase
from ...core.recorder.writer import OpenPage, RecorderWriter
from ...core.records import Where
from ...core.settings import WorkerSettings
from .collectives import issued, moment
from .group_table import GroupTable
from .recorder_lock import RecorderLock
from .roots import RootInfo
from .step_clock import StepClock


class Progress:
    """Steps, batches and the current page. The hooks share it."""

    def __init__(self, recorder: RecorderWriter, settings: WorkerSettings, rank: int) -> None:
        self.recorder = recorder
        self.fields = recorder.fields
        self.lock = RecorderLock(recorder.cursor)
        self.groups = GroupTable(recorder)
        self.times = StepClock(recorder)
        self.settings = settings
        self.rank = rank
        self.step = 0
        self.batch = -1
        self.watches_weights = "weights" in settings.watch
        self.root: RootInfo | None = None
        """The root of the last page that was begun."""
        self.skipped = False
        """This batch is skipped (`--every`)."""

    def where(self, page: OpenPage | None = None, root: str | None = None) -> Where:
        """The place in the run, for an event: now, or that of `page` of the root labelled `root`."""
        label = root if root is not None else self.root.label if self.root is not None else ""
        current = page or (self.root.page if self.root is not None else None)
        now = moment(issued())
        return Where(
            rank=self.rank,
            attempt=self.settings.attempt,
            step=current.step if page is not None and current is not None else self.step,
            batch=current.batch if current is not None else self.batch,
            root=label,
            page=current.number if current is not None else -1,
            seq=now.seq,
            time_ns=time.time_ns(),
            clock=now.clock,
            sent=now.sent,
            received=now.received,
        )

    def where_of(self, page: OpenPage, frame: Frame) -> Where:
        """The place in the run of a frame, which may be some batches old."""
        then = moment(frame.seq)
        return Where(
            rank=self.rank,
            attempt=self.settings.attempt,
            step=page.step,
            batch=page.batch,
            root=self.recorder.names.root_label(page.root),
            page=page.number,
            seq=frame.seq,
            time_ns=time.time_ns(),
            clock=then.clock,
            sent=then.sent,
            received=then.received,
        )

    def begin_page(self, root: RootInfo) -> OpenPage:
        """End the root's last page and begin its next one."""
        before = root.page
        if before is not None:
            self.recorder.end_page(before)
        self.batch = max(0, root.batches - 1)
        self.root = root
        root.page = self.recorder.begin_page(root.id, self.batch, self.step)
        root.page.with_gradients = torch.is_grad_enabled()
        self.groups.notice()
        self.fields[Field.SEQ] = issued()
        return root.page

    def resume(self, page: OpenPage) -> None:
        """Make `page` the current page again."""
        if self.recorder.page is not page:
            self.recorder.resume_page(page)
            self.fields[Field.SEQ] = issued()

    def enter(self, phase: RankPhase, module: int = -1) -> None:
        """Publish what this rank is doing, for the agent."""
        self.fields[Field.PHASE] = phase
        self.fields[Field.MODULE] = module
