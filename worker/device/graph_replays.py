"""CUDA graphs: the frames of a capture are written again at each replay, with the numbers that the replay leaves.

torch 2.14 and later say when a capture begins and ends, and when a graph is replayed. With an older torch, and where a
tensor of a capture was not read, the report says "graph: not seen".
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...core.frames import PHASES, FramePhase, RowKind, RowMark
from ...core.guest.threads import SECOND_RUN
from ...core.recorder import layout
from ...core.recorder.layout import NOTHING, HeadField, SegmentField
from ...core.recorder.own_pages import OwnPages
from ...core.recorder.pages import RowFields
from ...core.recorder.writer import OpenPage
from ...core.torch_names import name_in_torch
from ..hooks.call_frames import CallFrames
from ..hooks.module_calls import ModuleCalls
from ..patches import PatchLedger
from ..record.collectives import issued
from ..record.roots import ModuleInfo, RootInfo
from .captured_rows import CAPTURED, GraphReads
from .device import device_for, without_modes

_CAPACITY = layout.VALUES_PER_SEGMENT
_MEASURED = RowKind.MEASURED.number
_REHEARSED = int(RowMark.REHEARSED)


class _CapturedFrame(NamedTuple):
    module: int
    parent: int
    depth: int
    phase: FramePhase
    rows: list[RowFields]


@dataclass(slots=True, eq=False)
class _PageOfGraph:
    """What a graph does of one page."""

    root: RootInfo
    begins: bool
    """The call of the root is in the graph: a replay outside of all calls is a batch of its own."""
    with_gradients: bool
    frames: list[_CapturedFrame]
    runs: list[tuple[int, int]]
    """Its rows, as half-open ranges of at most a segment's values."""
    named: dict[int, list[_CapturedFrame]] = field(default_factory=dict)
    """id of a root -> the frames as part of it"""

    def has(self, phase: FramePhase) -> bool:
        return any(frame.phase is phase for frame in self.frames)


@dataclass(slots=True, eq=False)
class _WatchedGraph:
    reads: GraphReads
    newest: int
    """Number of the newest page before the capture; -1: none."""
    batches: int
    """Batches of all roots before the capture."""
    parts: list[_PageOfGraph] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    stream: Any = None
    """The stream of the last replay."""
    handled: BaseException | None = None
    """The exception that was being handled when the replay began."""

    def give_up(self) -> None:
        """Read it no more."""
        for handle in self.handles:
            handle.remove()


class GraphReplays:
    """The captures and the replays of one rank."""

    def __init__(self, calls: ModuleCalls, frames: CallFrames) -> None:
        self._calls, self._frames, self._running = calls, frames, frames.running
        self._gradients = frames.gradients
        parts = frames.frames
        self._progress, self._roots, self._rows, self._judging = parts.progress, parts.roots, parts.rows, parts.judging
        self._recorder = self._progress.recorder
        self._own = OwnPages(self._recorder)
        self._graphs: weakref.WeakKeyDictionary[Any, _WatchedGraph] = weakref.WeakKeyDictionary()
        self._last: dict[int, tuple[OpenPage, RootInfo]] = {}
        """id of a root -> the page and the root of which the last replay of its forward was a part."""

    def attach(self, patches: PatchLedger) -> None:
        """Register torch's hooks, if it has them."""
        if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]  # torch has no annotation there
            return
        for module in (torch.cuda, torch.cuda.graphs):
            patches.replace(module, "make_graphed_callables", self._rehearsed)
        begins = name_in_torch("torch.cuda.graphs.register_graph_capture_start_hook")
        ends = name_in_torch("torch.cuda.graphs.register_graph_capture_end_hook")
        if begins is None or ends is None:
            return
        self._rows.sees_captures = True
        for handle in (begins(self._begins), ends(self._ends)):
            patches.at_undo(handle.remove)
        patches.at_undo(self._detach)

    def _detach(self) -> None:
        self._rows.sees_captures = False
        for graph in list(self._graphs.values()):
            graph.give_up()
        self._graphs.clear()

    def _rehearsed(self, ordinary: Callable[..., Any]) -> Callable[..., Any]:
        """It calls the modules a few times, with gradients that nobody has written."""

        @functools.wraps(ordinary)
        def make_graphed_callables(*args: Any, **kwargs: Any) -> Any:
            before, self._progress.rehearses = self._progress.rehearses, True
            try:
                return ordinary(*args, **kwargs)
            finally:
                self._progress.rehearses = before

        return make_graphed_callables

    @contextmanager
    def _within(self) -> Iterator[None]:
        with self._progress.faults.within("graph"), self._progress.lock, torch._C.DisableTorchFunction():
            yield

    # -- a capture ------------------------------------------------------------------------------------------------

    def _begins(self, graph: Any) -> None:
        """A capture has begun on the current stream: nothing may be launched, and no memory taken."""
        with self._within():
            self._progress.pace.watch_all()  # what a batch leaves out, no replay would show
            known = self._graphs.pop(graph, None)
            if known is not None:
                known.give_up()
            buffer = self._rows.device_buffer
            if buffer is None:
                return
            device = torch.device("cuda", torch.cuda.current_device())
            reads = buffer.captured.begin(device, buffer.checks.running)
            if reads is not None:
                newest = max((root.page.number for root in self._roots.infos if root.page is not None), default=-1)
                self._graphs[graph] = _WatchedGraph(reads, newest, self._batches())

    def _ends(self, graph: Any) -> None:
        with self._within():
            watched, buffer = self._graphs.get(graph), self._rows.device_buffer
            if watched is None or buffer is None:
                return
            if self._progress.skipped and self._batches() != watched.batches:
                buffer.not_seen_in_graph("it was captured in a batch that --every skips")
            elif not buffer.captured.end(watched.reads):
                buffer.not_seen_in_graph("another capture began before this one had ended")
            if not watched.reads.pages:
                del self._graphs[graph]
                return
            watched.reads.has_pool(graph.pool())
            self._rows.forget()  # what the capture has read has no numbers in the page that goes on
            watched.parts = list(self._parts_of(watched))
            in_frames = {row[1] for part in watched.parts for frame in part.frames for row in frame.rows}
            if not in_frames.issuperset(range(CAPTURED, CAPTURED + len(watched.reads.pages))):
                buffer.not_seen_in_graph("the recorder had no room for the whole capture")
            # torch's own tables of the graph: what these hooks raise reaches the script
            watched.handles = [
                graph.register_replay_start_hook(self._replay_begins),
                graph.register_replay_end_hook(self._replay_ends),
            ]

    def _batches(self) -> int:
        return sum(root.batches for root in self._roots.infos)

    def _parts_of(self, watched: _WatchedGraph) -> Iterator[_PageOfGraph]:
        pages = watched.reads.pages
        for page in {page.number: page for page in pages}.values():
            frames = list(self._captured_in(page, watched.reads.frames[page.number]))
            runs: list[tuple[int, int]] = []
            for row in (row for row, of in enumerate(pages) if of is page):
                if runs and runs[-1][1] == row and row - runs[-1][0] < _CAPACITY:
                    runs[-1] = runs[-1][0], row + 1
                else:
                    runs.append((row, row + 1))
            begins = page.number > watched.newest
            yield _PageOfGraph(self._roots.infos[page.root], begins, page.with_gradients, frames, runs)

    def _captured_in(self, page: OpenPage, first: int) -> Iterator[_CapturedFrame]:
        """The frames of a page from `first` on that have rows of the capture."""
        view = self._recorder.view
        for head, at in self._own.segments(page):
            frames = view[at + layout.FRAMES_AT :][: head[SegmentField.FRAMES] * layout.FRAME.size]
            rows = view[at + layout.ROWS_AT :][: head[SegmentField.ROWS] * layout.ROW.size]
            all_rows = list(layout.ROW.iter_unpack(rows))
            for module, parent, depth, phase, _, _, start, count, index in layout.FRAME.iter_unpack(frames):
                own = all_rows[start : start + count]
                if index >= first and any(CAPTURED <= row[1] < NOTHING for row in own):
                    yield _CapturedFrame(module, parent, depth, PHASES[phase], own)

    # -- a replay -------------------------------------------------------------------------------------------------

    def _watched(self, graph: Any) -> _WatchedGraph | None:
        """None if this graph is not read, or not now: the second run of a forward is no batch, and ends no job."""
        return self._graphs.get(graph) if threading.current_thread().name != SECOND_RUN else None

    def _replay_begins(self, graph: Any) -> None:
        """May raise OverflowDetected: outside of all calls this is the only place where the job can end."""
        watched = self._watched(graph)
        if watched is None:
            return
        watched.handled = sys.exc_info()[1]
        if not self._running.stack and any(part.begins for part in watched.parts):
            with self._within():
                self._judging.collect()
            if self._judging.pending is not None:
                self._judging.raise_pending()

    def _replay_ends(self, graph: Any) -> None:
        watched = self._watched(graph)
        if watched is None:
            return
        why = "a replay failed"
        with self._within():
            if sys.exc_info()[1] is watched.handled:
                why = without_modes(self._read, watched)
        if why:
            watched.give_up()
            if self._rows.device_buffer is not None:
                self._rows.device_buffer.not_seen_in_graph(why)
        elif self._progress.settings.sync:
            self._judging.finish_and_raise("graph replay")

    def _read(self, watched: _WatchedGraph) -> str:
        """Write the frames of a replay, and start to read its numbers. Else why they cannot be told from others."""
        buffer, driver = self._rows.device_buffer, device_for(watched.reads.device)
        stream = driver.stream_key(watched.reads.device)
        if buffer is not None and not buffer.checks.have_passed(watched.reads.unproven):
            return "a kernel was not checked before it was captured, or is wrong"
        own_thread = threading.get_ident() == self._running.thread
        if buffer is None or driver.is_capturing():
            return "it was replayed within a capture"
        if watched.stream not in (None, stream):
            return "a replay ran on another stream than the one before"
        watched.stream = stream
        for part in watched.parts:
            within = bool(self._running.stack) and own_thread and self._recorder.page is not None
            if self._running.stack and not own_thread and part.has(FramePhase.FORWARD):
                return "a replay ran in another thread while a forward ran"
            is_new = part.begins and not within and part.has(FramePhase.FORWARD)
            page, root = self._page_for(part, within, is_new)
            if page is None:
                return "a replay came before any forward of its model"
            if part.has(FramePhase.FORWARD):
                self._last[part.root.id] = page, root
            indices: dict[int, int] = {}
            for first, end in part.runs:
                index = buffer.replayed(watched.reads, first, end)
                indices.update(zip(range(first, end), range(index, index + end - first), strict=True))
            self._write(part, root, indices, within)
            self._rows.late_pages[page.number] = page
            if part.has(FramePhase.BACKWARD):
                self._gradients.begins(page.number)
            if is_new:
                self._recorder.pause_page()
                self._judging.forward_ends(page)
        if any(part.has(FramePhase.OPTIMIZER) for part in watched.parts):
            self._progress.step += 1
            self._progress.fields[HeadField.STEP] = self._progress.step
        if not self._running.stack:
            buffer.captured.prepare(watched.reads.device)
        return ""

    def _page_for(self, part: _PageOfGraph, within: bool, is_new: bool) -> tuple[OpenPage | None, RootInfo]:
        """The page that a replay continues or begins, which is the current one then, and its root."""
        root = part.root
        if within:
            return self._recorder.page, self._running.stack[0].root
        if is_new:
            self._calls.end_last_batch(root)
            root.batches += 1
            page = self._progress.begin_page(root)
            page.with_gradients = part.with_gradients
            self._rows.begin_page(page.batch)
            return page, root
        last, root = self._last.get(root.id, (root.page, root))
        if last is not None:
            self._progress.resume(last)
        return last, root

    def _write(self, part: _PageOfGraph, root: RootInfo, indices: dict[int, int], within: bool) -> None:
        running = self._running
        frames = part.named.get(root.id)
        if frames is None:
            frames = part.named[root.id] = [self._named_in(part.root, root, frame) for frame in part.frames]
        calls, outer, deeper = set[int](), NOTHING, 0
        if within:
            calls, outer = {info.id for info in running.stack}, running.stack[-1].id
            deeper = running.depths[len(running.stack) - 1] + all(frame.module not in calls for frame in frames)
        seq, write = issued(), self._frames.frames.put_unjudged
        for module, parent, depth, phase, rows in frames:
            # what a replay computes is written, whatever the gradients were with which it was captured
            packed = [
                (slot, indices[value - CAPTURED], shape, dtype, _MEASURED, mark & ~_REHEARSED)
                if CAPTURED <= value < NOTHING
                else (slot, NOTHING, shape, dtype, kind, mark)
                for slot, value, shape, dtype, kind, mark in rows
            ]
            if phase is not FramePhase.FORWARD:
                write(module, phase, seq, packed, parent, depth)
            elif module not in calls:  # a running call writes its own frame when it returns
                write(module, phase, seq, packed, outer if parent == NOTHING else parent, depth + deeper)

    def _named_in(self, own: RootInfo, root: RootInfo, frame: _CapturedFrame) -> _CapturedFrame:
        """A frame as one of `root`: it may have been captured in a root of its own."""
        if own is root:
            return frame
        info, parent = self._info_in(own, root, frame.module), self._info_in(own, root, frame.parent)
        if info is None:
            raise LookupError("a module of a CUDA graph is not known in the model that replays it")
        roles = self._recorder.names.slots
        rows = [
            (self._rows.slot(info, roles[slot].role), value, shape, dtype, kind, mark)
            for slot, value, shape, dtype, kind, mark in frame.rows
            if slot in roles
        ]
        return _CapturedFrame(info.id, parent.id if parent is not None else NOTHING, frame.depth, frame.phase, rows)

    def _info_in(self, own: RootInfo, root: RootInfo, number: int) -> ModuleInfo | None:
        module = next((info.ref() for info in own.modules.values() if info.id == number), None)
        if module is None or root.knows(module) or not self._running.stack:
            return root.modules.get(id(module)) if module is not None else None
        return self._roots.child(module, root, self._running.stack[0])
