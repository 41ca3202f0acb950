"""A look at a tensor on a device says what a look in host memory does. The device may be the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from gpuwatch.core.frames import RowKind
from gpuwatch.core.values import Value
from gpuwatch.worker.detect_overflow import look, measure_with_one_wait
from gpuwatch.worker.device.device import without_modes
from gpuwatch.worker.record.tensor_stats import measure

NAN, INF = math.nan, math.inf
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16]


def check(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        here, there = measure(tensor), measure_with_one_wait(tensor)
    assert there.kind == here.kind
    one, other = Value(*there[:3]), Value(*here[:3])
    assert one.flags == other.flags
    if math.isnan(other.abs_max):
        assert math.isnan(one.abs_max)
    else:
        assert (one.abs_min, one.abs_max) == (other.abs_min, other.abs_max)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "values",
    [[1.0, -2.0, 0.5], [-0.0], [1.0, INF], [-INF, 3.0], [INF, -INF], [NAN, 1.0], [NAN], [NAN, INF, -INF, 1.0], []],
    ids=str,
)
def test_floats(dtype, values):
    check(torch.tensor(values, dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers(dtype):
    check(torch.tensor([7, 0, 3]).to(dtype))
    if dtype.is_signed:
        least = torch.iinfo(dtype).min
        check(torch.tensor([least, least + 1, 5], dtype=dtype))
        check(torch.tensor([least], dtype=dtype))


OTHERS = {
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([3 + 4j, complex(NAN, 1)]),
    "sparse": torch.eye(3).to_sparse(),
    "transposed": torch.randn(4, 6).t()[::2],
    "expanded": torch.ones(1).expand(5, 7),
    "0-d": torch.tensor(-3.0),
    "meta": torch.ones(2, device="meta"),
    "conjugated": torch.tensor([1 - 2j]).conj().imag,
}


@pytest.mark.parametrize("tensor", OTHERS.values(), ids=OTHERS)
def test_other_tensors(tensor):
    check(tensor)


def test_nothing_sees_the_look():
    from torch.utils.flop_counter import FlopCounterMode

    tensor = torch.ones(3, requires_grad=True)

    def look_and_compute():
        assert look(tensor).content == RowKind.MEASURED
        assert not torch.is_grad_enabled()
        torch.ones(2, 2, device="cpu") @ torch.ones(2, 2, device="cpu")

    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        without_modes(look_and_compute)
    assert counter.get_total_flops() == 0
    assert torch.is_grad_enabled()


def test_the_mode_comes_back_after_an_error():
    with pytest.raises(ZeroDivisionError):
        without_modes(lambda: 1 / 0)
    assert torch.is_grad_enabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_wait_on_cuda_and_none_while_a_graph_is_captured():
    tensor = torch.randn(1000, 1000, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with pytest.warns(UserWarning, match="synchronizing") as waits:
                look(tensor)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(waits) == 1
        assert look(tensor).content is RowKind.MEASURED
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            assert look(tensor + 1).content == RowKind.NOT_MEASURABLE
