"""Memory that is gone, or goes while it is read: nothing is read there, nothing is written there."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from gpuwatch.worker.hooks import native_writer
from gpuwatch.worker.hooks.backward import _GraphRecord
from gpuwatch.worker.record import host_reduce, tensor_stats
from torch import nn

from ..conftest import Watched

pytestmark = pytest.mark.skipif(
    native_writer.NativeFrameWriter is None or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="worker/native was not built where gpuwatch was installed, or this torch lends it no tensors",
)

LOCK_RELEASED_FROM = 1 << 27
"""Bytes"""


@pytest.fixture(params=["native", "Python"])
def watched(request, tmp_path, monkeypatch):
    if request.param == "Python":
        monkeypatch.setattr(native_writer, "NativeFrameWriter", None)
    watched = Watched(tmp_path / "x.recorder")
    assert (watched.hooks._gradients.writer is not None) == (request.param == "native")
    yield watched
    watched.close()


# -- freed storage --------------------------------------------------------------------------------------------------


def freed(offset: int) -> torch.Tensor:
    flat = torch.ones(1 << 20)
    view = flat[offset : offset + 4]
    flat.untyped_storage().resize_(0)
    return view


def shrunk() -> torch.Tensor:
    flat = torch.ones(64)
    view = flat[32:]
    flat.untyped_storage().resize_(4 * 63)
    return view


GONE = [lambda: freed(0), lambda: freed(4), lambda: freed((1 << 20) - 4), shrunk]


@pytest.mark.parametrize("make", GONE)
def test_an_input_in_freed_storage_is_not_read(watched, make):
    module = nn.Identity()
    for _ in range(3):
        module(torch.ones(4))
        module(torch.ones(32))
    module(make())
    assert watched.faults == []
    assert [row.kind for row in watched.last.frames[0].rows] == ["not_measurable"] * 2
    assert [row.shape for row in watched.last.frames[0].rows] == [list(make().shape)] * 2


@pytest.mark.parametrize("make", GONE)
def test_a_tensor_in_freed_storage_that_is_seen_before_any_other_is_not_read(watched, make):
    nn.Identity()(make())
    assert watched.faults == []
    assert [row.kind for row in watched.last.frames[0].rows] == ["not_measurable"] * 2


@pytest.mark.parametrize("make", GONE)
def test_a_weight_in_freed_storage_is_not_read(watched, make):
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(make().detach())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    module = Holder()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        module(torch.ones(4))
        optimizer.step()
    assert watched.faults == []
    kinds = [row.kind for frame in watched.last.frames for row in frame.rows if row.role == "weight"]
    assert kinds == ["not_measurable"] * 2  # forward and optimizer


def hook_of(out):
    """The hook that records the gradient of an output; another one remembers the graph."""
    (hook,) = (
        hook for hook in out._backward_hooks.values() if not isinstance(getattr(hook, "record", None), _GraphRecord)
    )
    return hook


@pytest.mark.parametrize("make", GONE)
def test_a_gradient_in_freed_storage_is_not_read(watched, make):
    module = nn.Linear(4, 4)
    for _ in range(2):
        out = module(torch.ones(2, 4))
        out.sum().backward()
    hook_of(out)(make())
    assert watched.faults == []
    assert watched.last.frames[-1].rows[0].role == "grad output"
    assert watched.last.frames[-1].rows[0].kind == "not_measurable"


def test_what_has_memory_is_measured(watched):
    flat = torch.arange(64.0)
    module = nn.Identity()
    for view in (flat, flat[8:16], flat.view(8, 8)[2:4].t(), flat[3:4].expand(5), flat[32:], flat[63:]):
        for _ in range(2):
            module(view)
        row = watched.row("", "output")
        assert (row.abs_min, row.abs_max) == (float(view.min()), float(view.max()))


@pytest.mark.parametrize("make", GONE)
def test_no_measurement_reads_freed_storage(make):
    assert tensor_stats.measure(make()) == tensor_stats.NOT_MEASURABLE
    assert tensor_stats.in_memory(make()) is None


def test_no_measurement_reads_freed_storage_between_holes():
    flat = torch.ones(64)
    views = [flat[8:16:2], flat.view(8, 8)[1:3, 2:4], flat.view(8, 8)[4:].t()]
    flat.untyped_storage().resize_(0)
    assert [tensor_stats.measure(view) for view in views] == [tensor_stats.NOT_MEASURABLE] * 3


@pytest.mark.parametrize("make", GONE)
def test_a_look_from_a_graph_does_not_read_freed_storage(make):
    from gpuwatch.worker.compile import dynamo

    place = dynamo.new_place()
    torch.ops.gpuwatch.look(make(), torch.zeros(1), place)
    assert dynamo.SEEN[place] == (tensor_stats.NOT_MEASURABLE, tuple(make().shape))


# -- the GIL -------------------------------------------------------------------------------------------------------


class WhileReading:
    """Calls `do` in the midst of reading a tensor, if the lock is released then.

    To find out how many threads there are, the reader first asks OpenMP whether it is in a parallel loop, and then for
    the number. PyGILState_Check stands for the first function here, and says yes while the lock is held: then nobody
    asks for the number.
    """

    def __init__(self, do: Callable[[], Any]) -> None:
        self.calls = 0

        def most_threads() -> int:
            self.calls += 1
            do()
            return 1

        self._kept = ctypes.CFUNCTYPE(ctypes.c_int)(most_threads)

    def __enter__(self) -> WhileReading:
        check = ctypes.cast(ctypes.pythonapi.PyGILState_Check, ctypes.c_void_p).value
        most = ctypes.cast(self._kept, ctypes.c_void_p).value
        host_reduce.use_threads(most, most, check, most, most)
        return self

    def __exit__(self, *error: object) -> None:
        host_reduce.use_threads()
        host_reduce._use_threads()


def zeros(nbytes: int) -> torch.Tensor:
    """Memory that the system has only promised: to read it costs none."""
    return torch.from_numpy(numpy.zeros(nbytes // 4, "float32"))


def test_the_lock_is_released_for_large_tensors_only():
    large = zeros(LOCK_RELEASED_FROM)
    with WhileReading(lambda: None) as reading:
        assert host_reduce.read_floats(large.data_ptr(), large.numel() - 1, 1)[:2] == (0, 0)
        assert reading.calls == 0
        assert host_reduce.read_floats(large.data_ptr(), large.numel(), 1)[:2] == (0, 0)
        assert reading.calls == 1


def large_frames(watched: Watched, do: Callable[[], Any]) -> WhileReading:
    """One ordinary call of a module with a large tensor, then another one, in the midst of which `do` is called."""
    module = nn.Identity()
    large = zeros(LOCK_RELEASED_FROM)
    module(large)
    with WhileReading(do) as reading:
        module(zeros(LOCK_RELEASED_FROM))
    return reading


@pytest.fixture
def native(tmp_path):
    watched = Watched(tmp_path / "x.recorder", watch=("forward",))
    yield watched
    watched.close()


def test_a_frame_is_written_by_native_code_while_others_run(native):
    reading = large_frames(native, lambda: None)
    assert reading.calls == 1
    assert [frame.module for frame in native.last.frames] == [""]
    assert [row.kind for row in native.last.frames[0].rows] == ["measured"] * 2


def test_a_frame_that_another_thread_writes_meanwhile_is_kept(native):
    def write() -> None:
        if native.recorder.page is not None and native.recorder.frame_count == 0:
            native.recorder.frame(0, 0xFFFFFFFF, 0, 0, 7, [])

    reading = large_frames(native, write)
    assert reading.calls == 2  # the native writer gives its frame up, and Python reads again
    assert native.faults == []
    assert [(frame.seq, len(frame.rows)) for frame in native.last.frames] == [(7, 0), (-1, 2)]
    assert [row.kind for row in native.last.frames[1].rows] == ["measured"] * 2


def test_a_recorder_that_is_closed_meanwhile_is_not_written_to(native):
    before: list[bytes] = []

    def close() -> None:
        if not native.recorder.memory.closed:
            native.recorder.close()
            before.append(native.recorder.path.read_bytes())

    reading = large_frames(native, close)
    assert reading.calls >= 1
    assert native.recorder.path.read_bytes() == before[0]


def test_a_writer_whose_recorder_is_closed_writes_nothing_even_if_the_cursor_says_otherwise(tmp_path):
    watched = Watched(tmp_path / "x.recorder")
    try:
        module = nn.Linear(4, 4)
        for _ in range(2):
            out = module(torch.ones(2, 4))
        writer, page = watched.hooks._gradients.writer, watched.hooks._roots.enter(module)[0].root.page
        info = watched.hooks._roots.enter(module)[0]
        watched.recorder.resume_page(page)
        at = watched.recorder.cursor[0]
        arguments = (info, module, (torch.ones(2, 4),), {}, out, page, 0, 0, 0, 0, 0)
        assert writer.frame(*arguments)
        watched.recorder.close()
        watched.recorder.cursor[0] = at
        written = watched.recorder.path.read_bytes()
        assert not writer.frame(*arguments)
        assert not writer.weights(info, [("weight", module.weight)], 1)
        hook = hook_of(out)
        hook(torch.ones(2, 4))
        assert watched.recorder.path.read_bytes() == written
    finally:
        watched.hooks.detach()
        watched.reader.close()


def test_a_cursor_outside_of_the_file_is_not_followed(tmp_path):
    watched = Watched(tmp_path / "x.recorder")
    try:
        module = nn.Linear(4, 4)
        out = module(torch.ones(2, 4))
        out = module(torch.ones(2, 4))
        info = watched.hooks._roots.enter(module)[0]
        for at in (len(watched.recorder.memory) - 8, 1 << 60):
            watched.recorder.cursor[0] = at
            assert not watched.hooks._gradients.writer.frame(info, module, (), {}, out, info.root.page, 0, 0, 0, 0, 0)
        watched.recorder.cursor[0] = -1
    finally:
        watched.close()


# -- what is borrowed -------------------------------------------------------------------------------------------------


def test_a_gradient_that_is_asked_for_its_version_may_forget_all_gradients(tmp_path):
    """What it was compared with is gone then: the comparison read the memory of an entry that was freed."""
    watched = Watched(tmp_path / "x.recorder")
    gradients = watched.hooks._gradients

    class Forgets(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            gradients.local.clear()
            return super().__torch_function__(function, types, args, kwargs or {})

    try:
        gradient = torch.ones(2).as_subclass(Forgets)
        for _ in range(3):
            gradient.mul_(1)
        version = gradient._version
        gradients.local[id(gradient)] = (weakref.ref(gradient), version)
        assert gradients.writer.all_local([("weight", SimpleNamespace(grad=gradient))])
        assert gradients.local == {}
    finally:
        watched.close()
