"""Frames of tensors that lie on a device: a reader takes their values, the native writer does all else.

The reader here is one over host memory that fills its values in later, as a device does.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gpuwatch.core.frames import RowKind
from gpuwatch.core.recorder import layout
from gpuwatch.core.values import PENDING
from gpuwatch.worker.hooks import native_writer
from gpuwatch.worker.record.tensor_stats import TensorStats, measure
from torch import nn

from ..conftest import Watched
from ..hooks.test_native_writer import KINDS, recorded, train

pytestmark = pytest.mark.skipif(
    native_writer.NativeFrameWriter is None or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="worker/native was not built where gpuwatch was installed, or this torch lends it no tensors",
)


class LateReader:
    """Takes a value for each tensor, and puts the numbers into it when `arrive` is called."""

    def __init__(self, watched: Watched) -> None:
        self._recorder = watched.recorder
        self._late: list[tuple[int, TensorStats]] = []
        self.tensors: list[torch.Tensor] = []
        self.weights: list[tuple[torch.Tensor, Any]] = []
        self.counts: set[bool] = set()
        self.elements: list[int] = []
        """As the native writer has told them, of all tensors"""
        self.refused: set[int] = set()
        """ids of tensors that it cannot measure"""
        self.fails = False

    def _take(self, tensor: torch.Tensor, known: TensorStats | None = None) -> tuple[int | None, TensorStats | None]:
        if self.fails:
            raise RuntimeError("the device is gone")
        with torch.no_grad():
            stats = known if known is not None else measure(tensor)
        if id(tensor) in self.refused or stats.content is not RowKind.MEASURED:
            return None, None
        index = self._recorder.value(0, 0, PENDING)
        at = self._recorder._values_at + self._recorder.value_position * layout.VALUE.size
        self._late.append((at, stats))
        return index, stats

    def frame(self, tensors: Any, elements: Any, earlier: Any, count: bool) -> tuple[list[int | None], list[Any]]:
        values = len(tensors) - len(earlier)
        self.elements += elements
        self.tensors += tensors[:values]
        self.weights += zip(tensors[values:], earlier, strict=True)
        self.counts.add(count)
        found = [self._take(tensor)[0] for tensor in tensors[:values]]
        weights = [self._take(tensor, known) for tensor, known in zip(tensors[values:], earlier, strict=True)]
        return found + [index for index, _ in weights], [numbers for _, numbers in weights]

    def arrive(self) -> None:
        for at, stats in self._late:
            layout.VALUE.pack_into(self._recorder.memory, at, *stats[:3])
        self._late.clear()


def writer_for(watched: Watched, frame: Any, *, reads_host: bool = False) -> Any:
    """A native writer with a reader of our own; `reads_host=False`: every tensor is one on a device."""
    hooks = watched.hooks
    hooks.rows.device_frame = frame
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_writer, "late_device", lambda: None if reads_host else object())
        writer = native_writer.native_writer_of(hooks.progress, hooks.rows, hooks._gradients)
    assert writer is not None
    return writer


@contextmanager
def on_device(path: Path, **options: Any) -> Iterator[tuple[Watched, LateReader]]:
    """Hooks whose native writer takes every tensor for one on a device."""
    watched = Watched(path, **options)
    reader = LateReader(watched)
    hooks = watched.hooks
    writer = writer_for(watched, reader.frame)
    hooks._gradients.writer = writer
    try:
        yield watched, reader
    finally:
        watched.close()


def decoded(watched: Watched) -> list[Any]:
    """All rows of all frames, by what they say and not by where their value stands."""
    return [
        [
            (frame.module, frame.phase, frame.parent, frame.depth, frame.index),
            [(row.role, row.kind, row.dtype, row.shape, row.abs_min, row.abs_max, row.mark) for row in frame.rows],
        ]
        for page in watched.pages
        for frame in page.frames
    ]


FINITE = [kind for kind in KINDS if kind not in ("overflow", "near", "mask")]


@pytest.mark.quick(6)
@pytest.mark.parametrize("kind", FINITE)
def test_the_frames_are_those_of_the_host_once_the_numbers_are_there(tmp_path, kind):
    on_host = Watched(tmp_path / "host.recorder")
    try:
        train([kind, "linear", kind], 1, "", steps=12)
        expected = decoded(on_host)
        assert on_host.faults == []
    finally:
        on_host.close()
    with on_device(tmp_path / "device.recorder") as (watched, reader):
        train([kind, "linear", kind], 1, "", steps=12)
        reader.arrive()
        assert watched.faults == []
        assert decoded(watched) == expected
        assert {type(tensor) for tensor in reader.tensors} == {torch.Tensor}
        assert len(reader.tensors) > 100


def test_values_are_pending_until_they_arrive(tmp_path):
    with on_device(tmp_path / "x.recorder") as (watched, reader):
        module = nn.Linear(4, 4)
        for _ in range(2):
            module(torch.ones(2, 4)).sum().backward()
        # Python takes the loss of a backward: it takes up the page again
        assert [[row.kind for row in frame.rows] for frame in watched.last.frames] == [
            ["pending"] * 4,
            ["measured"],
            ["pending"],
            ["pending"],
            ["pending"],
        ]
        reader.arrive()
        assert {row.kind for frame in watched.last.frames for row in frame.rows} == {"measured"}
        assert watched.row("", "input[0]").abs_max == 1.0


@pytest.mark.parametrize("fails", [False, True])
def test_a_device_is_read_with_the_recorders_lock_taken(tmp_path, monkeypatch, fails):
    with on_device(tmp_path / "x.recorder") as (watched, reader):
        lock, cursor, held = watched.hooks.progress.lock, watched.recorder.cursor, []
        take = reader._take

        def taken(tensor: torch.Tensor, known: Any = None) -> Any:
            with lock:  # of this thread, so it can be taken again
                held.append(cursor[1:].tolist())
            assert cursor[1:].tolist() == [threading.get_ident(), 1]
            return take(tensor, known)

        monkeypatch.setattr(reader, "_take", taken)
        reader.fails = fails
        module = nn.Linear(4, 4)
        for _ in range(2):  # Python takes the first call
            module(torch.ones(2, 4))
        assert held
        assert {tuple(each) for each in held} == {(threading.get_ident(), 2)}
        assert cursor[1:].tolist() == [0, 0]
        assert not lock.mutex._is_owned()


def test_a_page_of_many_segments(tmp_path):
    on_host = Watched(tmp_path / "host.recorder")
    try:
        train(["norm"] * 60, 1, "")
        expected = decoded(on_host)
    finally:
        on_host.close()
    with on_device(tmp_path / "device.recorder") as (watched, reader):
        train(["norm"] * 60, 1, "")
        reader.arrive()
        assert watched.reader[layout.HeadField.SEGMENT] > 8
        assert decoded(watched) == expected


def test_each_tensor_is_read_once_in_a_page_and_a_weight_once_in_a_step(tmp_path):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.same = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.same(self.inner(self.same(x)))

    with on_device(tmp_path / "x.recorder", watch=("forward", "weights")) as (_, reader):
        model = Twice()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(4):
            if number == 2:
                reader.tensors.clear()
                reader.weights.clear()
            out = model(x := torch.ones(2, 4))
            out.sum().backward()
            if number == 3:
                optimizer.step()
    assert [id(tensor) for tensor in reader.tensors[-2:]] == [id(x), id(out)]
    assert len(reader.tensors) == 4
    known = [known is not None for _, known in reader.weights]
    assert known == [True, True] * 2 + [False, False]  # two batches of one step, then what the optimizer has written


def test_a_tensor_that_cannot_be_measured_is_a_row_all_the_same(tmp_path):
    with on_device(tmp_path / "x.recorder", watch=("forward", "weights")) as (watched, reader):
        module = nn.Linear(4, 4)
        x = torch.ones(2, 4)
        module(x)
        reader.refused = {id(x), id(module.bias)}
        for _ in range(2):
            module(x)
        assert watched.row("", "input[0]").kind == "not_measurable"
        assert watched.row("", "bias").kind == "not_measurable"
        assert watched.faults == []


def test_a_reader_that_fails_costs_no_frame(tmp_path):
    with on_device(tmp_path / "x.recorder") as (watched, reader):
        module = nn.Linear(4, 4)
        for _ in range(2):
            module(torch.ones(2, 4)).sum().backward()
        reader.fails = True
        module(torch.ones(2, 4)).sum().backward()
        assert len(watched.last.frames) == 5
        assert {row.kind for frame in watched.last.frames for row in frame.rows} == {"measured"}  # read by Python
        assert watched.faults == []


@pytest.mark.parametrize("answer", ["seven", 1.5, object()])
def test_a_reader_that_answers_nonsense_costs_no_frame(tmp_path, answer):
    with on_device(tmp_path / "x.recorder") as (watched, reader):
        module = nn.Linear(4, 4)
        for _ in range(2):
            module(torch.ones(2, 4))
        reader._take = lambda *tensor: (answer, None)  # type: ignore[method-assign]
        module(torch.ones(2, 4))
        assert len(watched.last.frames) == 1
        assert watched.faults == []


def test_whether_zeros_are_to_be_counted_depends_on_the_batch(tmp_path):
    with on_device(tmp_path / "x.recorder", watch=("forward",)) as (_, reader):
        module = nn.Identity()
        seen = []
        for _ in range(12):
            reader.counts.clear()
            module(torch.ones(2, 4, dtype=torch.bfloat16))
            seen.append(set(reader.counts))
    assert seen == [set()] + [{False}] * 9 + [{True}, {False}]  # the first batch is Python's: the names are new


def test_without_a_reader_such_a_frame_is_left_to_python(tmp_path):
    watched = Watched(tmp_path / "x.recorder")
    try:
        hooks = watched.hooks
        module = nn.Linear(4, 4)
        out = module(torch.ones(2, 4))
        info = hooks._roots.enter(module)[0]
        page = info.root.page
        watched.recorder.resume_page(page)
        call = (info, module, (torch.ones(2, 4),), {}, out, page, 0, 0, 0, 0, 0)

        assert not writer_for(watched, None).frame(*call)
        hooks.rows.forget()
        hooks.rows.weights.clear()
        assert writer_for(watched, None, reads_host=True).frame(*call)  # read by itself
    finally:
        watched.close()


def test_it_says_how_many_elements_lie_in_one_piece(tmp_path):
    with on_device(tmp_path / "x.recorder", watch=("forward", "weights")) as (_, reader):
        module, identity = nn.Linear(4, 4), nn.Identity()
        base = torch.ones(4, 4)
        freed = torch.ones(3, 4)
        freed.untyped_storage().resize_(0)
        for _ in range(2):  # the first time, names and shapes are new
            reader.elements.clear()
            for given in (base[1:], base[1:].t(), base[:, :2], torch.ones(1, 4).expand(3, 4), freed):
                identity(given)
        assert reader.elements == [12, 0, 0, 0, 0]
        for _ in range(2):
            reader.elements.clear()
            module(base)
        assert reader.elements == [16, 16, 0, 0]  # the weights keep their numbers


def test_nested_values_of_several_dtypes(tmp_path):
    with on_device(tmp_path / "x.recorder", watch=("forward",)) as (watched, reader):
        module = nn.Identity()
        for _ in range(2):
            module((torch.ones(3), torch.full((3,), 2.0, dtype=torch.float64), torch.arange(4)))
        reader.arrive()
        rows = watched.last.frames[0].rows
        assert [(row.abs_min, row.abs_max) for row in rows[:3]] == [(1.0, 1.0), (2.0, 2.0), (0.0, 3.0)]
        assert [row.value for row in rows] == [0, 1, 2, 0, 1, 2]


def test_all_of_it_goes_when_the_hooks_go(tmp_path):
    import weakref

    with on_device(tmp_path / "x.recorder") as (watched, reader):
        train(["residual"], 1, "")
        gone = weakref.ref(watched.hooks), weakref.ref(reader)
        reader.tensors.clear()
        reader.weights.clear()
    del watched, reader
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_recorded_page_is_the_same_bytes_without_a_reader(tmp_path):
    """A reader that is there and has nothing to do changes nothing."""
    found = []
    for with_reader in (False, True):
        watched = Watched(tmp_path / f"{with_reader}.recorder")
        try:
            hooks = watched.hooks
            if with_reader:
                writer = writer_for(watched, lambda *frame: 1 // 0, reads_host=True)
                hooks._gradients.writer = writer
            train(["residual", "integers", "nested"], 1, "", steps=4)
            found.append(recorded(watched)[1:])
        finally:
            watched.close()
    assert found[0] == found[1]
