"""Kernels that are wrong on the device: they are off before a number of theirs counts, and the verdict stays right."""

from __future__ import annotations

import ctypes

import gpuwatch
import pytest
import torch
from stand_in_cuda import triton_kernels
from torch import nn

BATCHES, LARGE = 9, 6


def wrong_stride(merge, row, address, elements, inner, stride, given, element):
    merge(row, address, elements, inner, max(0, stride - 1), given, element)


def missing_tail(merge, row, address, elements, inner, stride, given, element):
    elements = elements // 32 * 32 if stride == 0 and elements > 32 else elements
    merge(row, address, elements, inner, stride, given, element)


def missing_head(merge, row, address, elements, inner, stride, given, element):
    skipped = stride == 0 and elements > 1
    merge(row, address + 8 * skipped, elements - skipped, inner, stride, given, element)


def one_too_many(merge, row, address, elements, inner, stride, given, element):
    merge(row, address, elements + (stride == 0), inner, stride, given, element)


def wrong_dtype(merge, row, address, elements, inner, stride, given, element):
    other = {"fp32": (0, "int32"), "fp16": (4, "bf16")}.get(element, (given["KIND"], element))
    merge(row, address, elements, inner, stride, {**given, "KIND": other[0]}, other[1])


def without(flags):
    def merge_without(merge, row, *about):
        merge(row, *about)
        row[2] &= ~flags

    return merge_without


def sign_of_inf(merge, row, *about):
    merge(row, *about)
    row[2] = row[2] & ~6 | (row[2] & 2) << 1 | (row[2] & 4) >> 1


def no_extremes(merge, row, *about):
    low, high = row[0], row[1]
    merge(row, *about)
    row[0], row[1] = low, high


def next_row(merge, row, *about):
    merge((ctypes.c_int64 * 6).from_address(ctypes.addressof(row) + 48), *about)


def nothing(merge, row, *about):
    pass


def stale_rows(merge, row, *about):
    """What the launch before has left."""
    merge(row, *about)
    stale_rows.last, row[:3] = row[:3], getattr(stale_rows, "last", row[:3])


FAULTS = [wrong_stride, missing_tail, missing_head, one_too_many, wrong_dtype, sign_of_inf, no_extremes, next_row]
FAULTS += [nothing, stale_rows, without(1), without(6)]
NAMES = [*(fault.__name__ for fault in FAULTS[:10]), "no_nan", "no_inf"]


class Holes(nn.Module):
    """Its input has holes."""

    def forward(self, x):
        return x.contiguous()


def trained(device, dtype):
    """What gpuwatch saw of a training whose seventh batch overflows, and what it left."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 37), Holes(), nn.Linear(7, 5)).to(dtype)
    net[3].register_forward_pre_hook(lambda module, args: (args[0][:, 4:11],))
    data = torch.randn(BATCHES, 16, 40).to(dtype)
    data[LARGE] *= 60000
    net, data = net.to(device), data.to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    with gpuwatch.watch(net, on_overflow="continue") as watch:
        for batch in data:
            net(batch).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if device == "cuda":
                torch.cuda.synchronize()  # the numbers of this batch are there
        buffer = watch._hooks.rows.device_buffer if device == "cuda" else None
        told = [buffer._reader] if buffer is not None else []
    found = [(one.phase, one.module, one.role, one.value, one.where.batch) for one in watch.anomalies]
    return found, [weight.detach().cpu() for weight in net.parameters()], told


@pytest.fixture(scope="module")
def of_the_cpu():
    return trained("cpu", torch.float16)


@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_a_wrong_kernel_is_off_and_the_overflow_is_the_cpus(monkeypatch, capfd, of_the_cpu, fault):
    merge = triton_kernels._merge
    monkeypatch.setattr(triton_kernels, "_merge", lambda *given: fault(merge, *given))
    found, weights, (reader,) = trained("cuda", torch.float16)

    assert found[0] == of_the_cpu[0][0]
    assert found[0][-1] == LARGE
    assert type(reader).__name__ == "TorchReader"
    assert capfd.readouterr().err.count("[GW614]") == 1
    for weight, other in zip(weights, of_the_cpu[1], strict=True):
        assert torch.equal(weight.view(torch.int16), other.view(torch.int16))


def test_right_kernels_stay_on(capfd, of_the_cpu):
    found, _, (reader,) = trained("cuda", torch.float16)

    assert found[0] == of_the_cpu[0][0]
    assert type(reader).__name__ == "TritonReader"
    assert reader.reads
    assert "[GW614]" not in capfd.readouterr().err
