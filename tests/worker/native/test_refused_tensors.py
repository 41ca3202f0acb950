"""Tensors that torch refuses to describe to C, or to tell the version of: that takes as long as a thousand readings."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpuwatch.worker.hooks import native_writer
from gpuwatch.worker.record import plain_tensor
from torch import nn
from torch.func import functional_call, grad, vmap

from ..conftest import Watched

pytestmark = pytest.mark.skipif(
    native_writer.NativeFrameWriter is None or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="native/core.c was not built where gpuwatch was installed, or this torch lends it no tensors",
)

View = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
NAME = b"dlpack_exchange_api"


class ExchangeTable(ctypes.Structure):
    """worker/native/include/tensor_view.h"""

    _fields_ = [
        *[("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("previous", ctypes.c_void_p)],
        *[(name, ctypes.c_void_p) for name in ("allocate", "from_tensor", "to_tensor")],
        *[("view", View), ("stream", ctypes.c_void_p)],
    ]


@pytest.fixture
def refusals(monkeypatch) -> Iterator[list[str]]:
    """What torch's own table has refused since."""
    api = ctypes.pythonapi
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_New.restype = ctypes.py_object
    api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    real = ExchangeTable.from_address(api.PyCapsule_GetPointer(torch.Tensor.__dlpack_c_exchange_api__, NAME))
    noted = ExchangeTable.from_buffer_copy(real)
    view, seen = real.view, list[str]()

    def noting(tensor: Any, out: int) -> int:
        try:
            return view(tensor, out)
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}")
            return -1

    noted.view = View(noting)
    monkeypatch.setattr(
        torch.Tensor, "__dlpack_c_exchange_api__", api.PyCapsule_New(ctypes.addressof(noted), NAME, None)
    )
    yield seen
    del noted  # alive until here, as torch's own table is


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(10, 4, sparse=True) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([table(x) for table in self.tables]).sum()


def sparse_gradients() -> tuple[nn.Module, Callable[[], Any]]:
    model = Tables()
    return model, lambda: model(torch.arange(5)).backward()


def gradients_of_samples() -> tuple[nn.Module, Callable[[], Any]]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, weights, (x,)).sum()

    def step() -> None:
        weights = {name: each.detach() for name, each in model.named_parameters()}
        vmap(grad(loss), (None, 0))(weights, torch.ones(3, 4))

    return model, step


def passed_on(tensor: torch.Tensor) -> tuple[nn.Module, Callable[[], Any]]:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    return model, lambda: model(tensor)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        sparse_gradients,
        gradients_of_samples,
        lambda: passed_on(torch.eye(3).to_sparse_csr()),
        lambda: passed_on(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        lambda: passed_on(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)),
        lambda: passed_on(torch.ones(3, device="meta")),
    ],
    ids=["sparse gradients", "gradients of samples", "csr", "nested", "quantized", "meta"],
)
def test_torch_is_asked_for_no_second_tensor_that_it_refuses(tmp_path, refusals, make):
    model, step = make()
    watched = Watched(tmp_path / "x.recorder")
    try:
        for _ in range(5):
            step()
        assert watched.hooks._gradients.writer is not None
        assert watched.faults == []
        assert len(watched.last.frames) >= 2
        assert len(refusals) <= 1, refusals  # none, where another test of this process has met one
    finally:
        watched.close()
    del model


def test_an_evaluation_in_inference_mode_is_taken(tmp_path, monkeypatch):
    """And its frames are those that Python writes: tests/worker/hooks/test_native_writer.py."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.ReLU(inplace=True), nn.Sequential(nn.Linear(4, 2)))
    left: list[str] = []
    watched = Watched(tmp_path / "x.recorder")
    try:
        frames = watched.hooks._call_frames
        real = frames.record
        for number in range(4):
            if number == 2:  # weights are known
                monkeypatch.setattr(frames, "record", lambda info, *rest: (left.append(info.name), real(info, *rest)))
            with torch.inference_mode():
                model(torch.ones(3, 4))
        assert [frame.module for frame in watched.last.frames] == ["0", "1", "2", "3.0", "3", ""]
        assert left == []
    finally:
        watched.close()


def test_no_error_is_made_for_a_tensor_without_a_version(monkeypatch):
    with torch.inference_mode():
        odd = torch.ones(3)
    monkeypatch.delattr(plain_tensor, "from_outside")
    assert [plain_tensor.version_of(odd), plain_tensor.version_of(torch.ones(3))] == [-1, 0]
