"""Rows of tensors that are read within a CUDA graph: the user's capture holds the reads, and each replay does them.

The rows lie in memory of gpuwatch's own that is made before a capture and never freed: a graph may be replayed after
the watch has ended. They are never in the graph's own pool, whose memory torch counts. A tensor is read only by a
kernel that has run before, on the stream on which the capture began. Else it is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.recorder.writer import OpenPage
from .device import StatsDevice, StreamKey
from .tensor_source import KINDS, source_of
from .torch_reader import FROM_GRAPH, TensorReader, fresh_rows

CAPTURED = 1 << 30
"""Added to the number of a captured row, where the index of a value in a page would be: it has no value yet."""
_ROWS = 1 << 14
"""Rows of a piece of memory: 0.75 MiB. A GPT-2 of 12 layers needs about 600 with gradients."""
_MOST_PIECES = 8
PoolId = tuple[int, int]
_NO_POOL = 0, 0
_PLAIN = torch.Tensor, torch.nn.Parameter
_pieces: dict[int, list[_PieceOfRows]] = {}
"""Index of a device -> its memory for rows. Graphs may write there as long as the process lives."""


@dataclass(eq=False, slots=True)
class _PieceOfRows:
    rows: torch.Tensor
    """(_ROWS, COLUMNS) on the device"""
    used: int = 0


@dataclass(eq=False, slots=True)
class GraphReads:
    """What one graph reads."""

    key: StreamKey
    """The stream on which the capture began."""
    device: torch.device
    piece: _PieceOfRows
    first: int
    pages: list[OpenPage] = field(default_factory=list)
    """The page of each row."""
    frames: dict[int, int] = field(default_factory=dict)
    """Number of a page -> the frames that it had before the first of these rows."""
    kept: list[Any] = field(default_factory=list)
    """Memory from outside of the graph's pool that its reads are of: nothing else may keep it."""
    pooled: list[tuple[weakref.ref[torch.Tensor], PoolId]] = field(default_factory=list)
    """Tensors in the pool of some graph. Which one it is, torch says when the capture has ended."""
    unproven: frozenset[Hashable] = frozenset()
    """Kernels that may be in the graph, and whose check has not passed when the capture began (reader_check.py)."""
    segments: list[tuple[int, int, PoolId]] = field(default_factory=list)
    """(address, end, pool) of torch's memory, as far as it is known."""

    @property
    def rows(self) -> torch.Tensor:
        """(n, COLUMNS), merged into by each replay."""
        return self.piece.rows[self.first : self.first + len(self.pages)]

    def keep(self, tensor: torch.Tensor) -> None:
        """It is read at each replay. A tensor of the graph's own is not kept: the capture uses its memory again."""
        pool = self._pool_of(tensor.data_ptr())
        if pool == _NO_POOL:
            self.kept.append(tensor.untyped_storage())
        else:
            self.pooled.append((weakref.ref(tensor), pool))

    def has_pool(self, own: PoolId) -> None:
        """The capture has ended. `own`: the graph's pool."""
        others = [tensor() for tensor, pool in self.pooled if pool != own]
        self.kept += [tensor.untyped_storage() for tensor in others if tensor is not None]
        self.pooled, self.segments = [], []

    def _pool_of(self, address: int) -> PoolId:
        """Raises an exception if this torch does not say it."""
        for _ in range(2):
            for begin, end, pool in self.segments:
                if begin <= address < end:
                    return pool
            found = torch.cuda.memory_snapshot(include_traces=False)  # type: ignore[no-untyped-call]
            self.segments = [
                (each["address"], each["address"] + each["total_size"], each["segment_pool_id"]) for each in found
            ]
        return _NO_POOL


class CapturedRows:
    """The captures that run, and the memory for their rows."""

    def __init__(self, driver: StatsDevice) -> None:
        self._driver = driver
        self.is_on = False
        """torch says when a capture begins."""
        self._open: list[GraphReads] = []
        """One, unless a capture has failed."""

    def prepare(self, device: torch.device) -> None:
        """Make memory for the next captures, if there is little. Must not be called during a capture."""
        pieces = _pieces.setdefault(device.index or 0, [])
        if self.is_on and len(pieces) < _MOST_PIECES and (not pieces or pieces[-1].used > _ROWS // 2):
            with torch.inference_mode(False):
                pieces.append(_PieceOfRows(self._driver.rows(fresh_rows(_ROWS, device))))

    def begin(self, device: torch.device, unproven: frozenset[Hashable]) -> GraphReads | None:
        """A capture has begun on the current stream. None if there is no memory for it.

        `unproven`: see GraphReads.
        """
        self.drop()
        pieces = _pieces.get(device.index or 0, ())
        piece = next((each for each in reversed(pieces) if each.used < _ROWS), None)
        if piece is None:
            return None
        reads = GraphReads(self._driver.stream_key(device), device, piece, piece.used, unproven=unproven)
        self._open.append(reads)
        return reads

    def end(self, reads: GraphReads) -> bool:
        """Its capture has ended. False if it was given up meanwhile."""
        was_open = reads in self._open
        self.drop()
        return was_open

    def drop(self) -> None:
        """No capture runs, or another one begins: those that have not ended have failed."""
        for reads in self._open:
            reads.piece.used += len(reads.pages)
        self._open.clear()

    def read(
        self, reader: TensorReader, tensor: torch.Tensor, elements: int, page: OpenPage, frames: int, count: bool
    ) -> int | None:
        """Have the capture of the current stream read a tensor. Returns `CAPTURED` + its row; None if it does not."""
        key = self._driver.stream_key(tensor.device)
        reads = next((each for each in self._open if each.key == key), None)
        if reads is None:
            return None
        index = self._read(reads, reader, tensor, elements, count)
        if index is None:
            return None
        reads.pages.append(page)
        reads.frames.setdefault(page.number, frames)
        return CAPTURED + index

    def why_not_read(self) -> str:
        """Why `read` has returned None."""
        if not self.is_on:
            return f"torch {torch.__version__} does not say when a graph is captured or replayed"
        return "a tensor was on another stream than the capture's, or of a kind that was not read before the capture"

    @staticmethod
    def _read(reads: GraphReads, reader: TensorReader, tensor: torch.Tensor, elements: int, count: bool) -> int | None:
        index = len(reads.pages)
        plain = type(tensor) in _PLAIN and tensor.layout is torch.strided and tensor.dtype in KINDS
        if elements == FROM_GRAPH or not plain or reads.first + index == _ROWS:
            return None
        source = source_of(tensor) if tensor.is_contiguous() and not tensor.is_neg() else None  # else it may copy
        if source is None:
            return None
        reads.keep(tensor)
        return index if reader.read_known(source, reads.piece.rows, reads.first + index, count) else None
