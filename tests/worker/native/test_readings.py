"""What native code finds out for a device's reader is what the Python code finds out."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from gpuwatch.core.judge import WarningLimits
from gpuwatch.core.recorder.layout import VALUES_PER_SEGMENT
from gpuwatch.core.values import COUNTED
from gpuwatch.tests.fakes.late_device import LateDevice
from gpuwatch.worker.device import grouped_readings, kernel_variants, triton_reader
from gpuwatch.worker.device.device_buffer import DeviceStatsBuffer
from gpuwatch.worker.device.grouped_readings import ENTRY, GroupedReadings, KnownWeight, PackedRows, WaitingTensors
from gpuwatch.worker.device.tensor_source import KINDS, source_of
from gpuwatch.worker.hooks import native_writer
from gpuwatch.worker.record import notable
from gpuwatch.worker.record.notable import NotableFilter
from hypothesis import given
from hypothesis import strategies as st

from ..conftest import Watched, use_late_device
from ..hooks.test_native_writer import KINDS as MODULES
from ..hooks.test_native_writer import train
from .test_device import decoded

pytestmark = pytest.mark.skipif(
    native_writer.NativeFrameWriter is None or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="worker/native was not built where gpuwatch was installed, or this torch lends it no tensors",
)

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda tensor: tensor,
    "part": lambda tensor: tensor[2:],
    "columns": lambda tensor: tensor[:, :2],
    "turned": lambda tensor: tensor.t(),
    "expanded": lambda tensor: tensor[:1].expand(5, -1),
    "one element": lambda tensor: tensor[1, 1],
}


CPU = torch.device("cpu")


# -- tensors and weights ----------------------------------------------------------------------------------------------


def ordinary(dtype: torch.dtype, number: int) -> torch.Tensor:
    return torch.full((4, 3), number).to(dtype)


PACKED = torch.zeros(240, 3, dtype=torch.int64)
kept: list[torch.Tensor] = []
"""The weights of one example that are alive."""


@st.composite
def known_weights(draw: st.DrawFn) -> KnownWeight:
    weight = VIEWS[draw(st.sampled_from(list(VIEWS)))](ordinary(draw(st.sampled_from(list(KINDS))), 3))
    fates = ["is there", "is there", "is gone", "was changed", "is freed", "is a parameter", "is shorter", "is longer"]
    fate = draw(st.sampled_from(fates))
    if fate == "is a parameter":
        weight = torch.nn.Parameter(weight, requires_grad=False)
    version = weight._version
    if fate == "was changed":
        version += 1  # an older one would be what is remembered; the two differ all the same
    if fate in ("is freed", "is shorter", "is longer"):
        weight = ordinary(torch.float32, 3)[1:]
        version = weight._version
    place = (weight.data_ptr(), weight.numel() * weight.itemsize) if weight.is_contiguous() else None
    if fate == "is freed":
        weight.untyped_storage().resize_(0)
    elif fate == "is shorter":
        weight.data = weight.data[:1]
    elif fate == "is longer" and place is not None:
        place = place[0], place[1] - weight.itemsize
    if fate != "is gone":
        kept.append(weight)
    earlier = PackedRows(PACKED, PACKED.data_ptr()), draw(st.integers(0, 239))
    row = SimpleNamespace(packed=earlier, place=draw(st.sampled_from([place, None])))
    return KnownWeight(weakref.ref(weight), version, draw(st.integers(0, 9)), row)


def in_one_piece() -> st.SearchStrategy[torch.Tensor]:
    return st.builds(ordinary, st.sampled_from(list(KINDS)), st.integers(0, 100))


def sources() -> st.SearchStrategy[Any]:
    views = st.sampled_from(list(VIEWS)).map(VIEWS.__getitem__)
    return st.builds(lambda tensor, view: source_of(view(tensor)), in_one_piece(), views)


@pytest.mark.slow
@given(st.data())
def test_the_same_entries_for_the_same_tensors(data: st.DataObject) -> None:
    kept.clear()
    items = st.lists(st.one_of(in_one_piece(), sources(), known_weights(), known_weights()), max_size=6)
    waiting = [
        WaitingTensors(each, data.draw(st.integers(0, 200)), data.draw(st.booleans()))
        for each in data.draw(st.lists(items))
    ]
    native = GroupedReadings(waiting, CPU)
    with mock.patch.object(grouped_readings, "_is_native", False):
        python = GroupedReadings(waiting, CPU)
    assert list(ENTRY.iter_unpack(native.entries)) == list(ENTRY.iter_unpack(python.entries))
    assert native.earlier == python.earlier
    for one, other in zip(native.tensors, python.tensors, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or (one.shape, one.dtype) == (other.shape, other.dtype)


def test_ordinary_ones_are_not_left_to_python() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    row = SimpleNamespace(packed=(PackedRows(PACKED, PACKED.data_ptr()), 7))
    known = KnownWeight(weakref.ref(weight), weight._version, 0, row)
    with mock.patch.object(GroupedReadings, "_entry", side_effect=AssertionError("left to Python")):
        found = GroupedReadings(
            [WaitingTensors([torch.ones(3), torch.ones(2)], 5, True), WaitingTensors([known], 9, True)], CPU
        )
    numbers = [entry[2:] for entry in ENTRY.iter_unpack(found.entries)]
    first, second = found.tensors[:2]
    assert first is not None
    assert second is not None
    assert numbers == [
        (5, first.data_ptr(), 3, 3, 0, 0),
        (6, second.data_ptr(), 2, 2, 0, 0),
        (9, weight.data_ptr(), 4, 4, 0, PACKED.data_ptr() + 7 * 24),
    ]


def test_a_weight_that_lies_where_it_lay_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, checks = torch.nn.Parameter(torch.ones(4, 3)), []

    def entries(place: tuple[int, int] | None) -> bytes:
        row = SimpleNamespace(packed=(PackedRows(PACKED, PACKED.data_ptr()), 3), place=place)
        known = KnownWeight(weakref.ref(weight), weight._version, 0, row)
        checks.clear()
        return GroupedReadings([WaitingTensors([known], 0, False)], CPU).entries

    asked = torch.Tensor.is_neg  # one of the questions of the check
    monkeypatch.setattr(torch.Tensor, "is_neg", lambda tensor: checks.append(tensor) or asked(tensor), raising=False)
    checked = entries(None)
    assert checks
    assert entries((weight.data_ptr(), weight.nbytes)) == checked
    assert not checks
    weight.data = weight.data.clone()
    entries((weight.data_ptr() + 16, weight.nbytes))
    assert checks


def test_the_imaginary_part_of_a_conjugate_is_read_with_its_sign() -> None:
    weight = torch.tensor([1 + 1j * float("inf")]).conj().imag
    row = SimpleNamespace(packed=(PackedRows(PACKED, PACKED.data_ptr()), 0))
    found = GroupedReadings(
        [WaitingTensors([KnownWeight(weakref.ref(weight), weight._version, 0, row)], 0, False)], CPU
    )
    (tensor,) = found.tensors
    assert tensor is not None
    assert tensor.tolist() == [-float("inf")]
    assert tensor.data_ptr() != weight.data_ptr()


@pytest.mark.parametrize("native", [True, False])
def test_a_weight_that_was_moved_to_another_device_is_not_read_there(
    monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    """A kernel that reads memory of the host ends the run."""
    monkeypatch.setattr(grouped_readings, "_is_native", native)
    weight = torch.nn.Parameter(torch.ones(4))
    earlier = PackedRows(PACKED, PACKED.data_ptr()), 7
    known = KnownWeight(weakref.ref(weight), weight._version, 0, SimpleNamespace(packed=earlier))
    found = GroupedReadings([WaitingTensors([known], 9, True)], torch.device("cuda", 0))
    assert (found.tensors, found.earlier) == ([None], [earlier])
    assert ENTRY.unpack(found.entries) == (1, 0, 9, 0, 0, 0, 0, PACKED.data_ptr() + 7 * 24)


@pytest.mark.parametrize("exchange", [None, object(), "a capsule"])
def test_where_torch_exports_no_tensors_to_c_python_does_it(monkeypatch: pytest.MonkeyPatch, exchange: object) -> None:
    assert grouped_readings._reads_this_torch()
    monkeypatch.setattr(grouped_readings, "_EXCHANGE", exchange)
    assert not grouped_readings._reads_this_torch()


@pytest.mark.parametrize("row", [SimpleNamespace(packed="nothing"), SimpleNamespace(packed=(1, 2)), None])
def test_what_it_does_not_know_is_left_to_python(row: Any) -> None:
    weight = torch.ones(3)
    with mock.patch.object(GroupedReadings, "_entry", return_value=bytes(64)) as left:
        GroupedReadings([WaitingTensors([torch.ones(2), KnownWeight(weakref.ref(weight), 0, 0, row)], 0, False)], CPU)
    assert left.call_count == 2


# -- tables -----------------------------------------------------------------------------------------------------------

entries = st.tuples(
    st.sampled_from([1, 2, 3, 4, 10]),
    st.integers(0, 1),
    st.integers(0, 255),
    st.sampled_from([0, 16, 8, 1 << 40]),
    st.sampled_from([0, 1, 5000, 1 << 22, 1 << 31, 1 << 40]),
    st.integers(0, 1 << 33),
    st.sampled_from([0, 3, 1 << 33]),
    st.sampled_from([0, 0, 4096, 4120]),
)


@given(
    st.lists(entries, max_size=40, unique_by=lambda entry: entry[2]),
    st.integers(1, 600),
    st.sampled_from([64, 4096, 1 << 20]),
)
def test_the_same_launches_for_the_same_entries(found: list[tuple[int, ...]], most: int, share: int) -> None:
    packed = b"".join(ENTRY.pack(*entry) for entry in found)
    shares: dict[int, int] = {}

    def share_of(variant: int) -> int:
        return shares.setdefault(variant, share + len(shares))

    native = triton_reader._native_tables(packed, share_of, most, 256)
    assert native == kernel_variants.tables(packed, share_of, most, 256)
    assert sum(len(table) for _, _, table in native[1]) == len(packed)


@pytest.mark.parametrize("position", [-1, 256])
def test_a_position_outside_of_the_list_is_refused(position: int) -> None:
    entry = ENTRY.pack(1, 0, position, 16, 5, 5, 0, 0)
    with pytest.raises(ValueError, match="position"):
        triton_reader._native_tables(entry, lambda variant: 64, 3, 256)


def test_every_value_of_a_segment_may_be_a_variant_of_its_own() -> None:
    codes = range(1, VALUES_PER_SEGMENT + 2)
    packed = [ENTRY.pack(code, 0, code, 16, 5, 5, 0, 0) for code in codes]
    most = b"".join(packed[:-1])
    assert triton_reader._native_tables(most, lambda variant: 64, 3, 256) == kernel_variants.tables(
        most, lambda _: 64, 3, 256
    )
    with pytest.raises(ValueError, match="too many variants"):
        triton_reader._native_tables(b"".join(packed), lambda variant: 64, 3, 256)


def test_an_error_of_the_share_is_told() -> None:
    with pytest.raises(ZeroDivisionError):
        triton_reader._native_tables(ENTRY.pack(1, 0, 0, 16, 5, 5, 0, 0), lambda variant: 1 // 0, 3, 256)


# -- the filter of arrived numbers ------------------------------------------------------------------------------------

highs = st.one_of(
    st.integers(0, (1 << 63) - 1), st.sampled_from([0x7BFF, 0x7C00, 0x7000, 0x7F7F, 0x7F800000, 0x7F000000])
)
metas = st.builds(
    lambda flags, encoding, counted, zeros, small: (
        flags | encoding << 8 | counted * COUNTED | zeros << 16 | small << 32
    ),
    st.sampled_from([0, 0, 0, 1, 2, 4, 7]),
    st.sampled_from([0, 1, 2, 3, 4, 255]),
    st.booleans(),
    st.sampled_from([0, 0, 1, 0xFFFF]),
    st.sampled_from([0, 0, 1, 0xFFFF]),
)
values = st.lists(st.tuples(st.just(0), highs, metas), min_size=1, max_size=20)


@given(values, st.sampled_from([0.0, 1.0, 8.0]), st.sampled_from([0.0, 0.1, 0.9]))
def test_no_notable_number_is_held_back(found: list[tuple[int, int, int]], powers: float, share: float) -> None:
    limits, numbers = NotableFilter(WarningLimits(powers, share)), numpy.array(found, numpy.int64)
    with mock.patch.object(notable, "_may_be_notable", None):
        expected = limits.any(numbers)
    assert limits.any(numbers) == expected


def test_ordinary_numbers_need_no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NotableFilter, "_is_notable", lambda *_: 1 // 0)
    numbers = numpy.array([(0, 0x3F800000, 2 << 8), (0, 7, 0), (0, 0x3C00, 3 << 8)], numpy.int64)
    assert not NotableFilter(WarningLimits()).any(numbers)


# -- whole frames -----------------------------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize("kinds", [MODULES[at::5] for at in range(5)], ids="-".join)
def test_a_training_on_a_device_is_recorded_as_python_records_it(tmp_path, monkeypatch, kinds):
    found, calls = [], 0
    for native in (True, False):
        use_late_device(monkeypatch, LateDevice(1))
        if not native:
            monkeypatch.setattr(native_writer, "NativeFrameWriter", None)
        watched = Watched(tmp_path / f"{native}.recorder", watch=("forward", "weights", "grads"))
        try:
            rows = watched.hooks.rows
            real = DeviceStatsBuffer.read_rest

            def counted(*frame: Any, real: Any = real) -> None:
                nonlocal calls
                calls += 1
                real(*frame)

            monkeypatch.setattr(DeviceStatsBuffer, "read_rest", counted)
            if native:
                hooks = watched.hooks
                writer = native_writer.native_writer_of(hooks.progress, rows, hooks._gradients)
                hooks._gradients.writer = writer
            train(kinds, 1, "", steps=12)
            assert watched.faults == []
            found.append((decoded(watched), [(one.where.batch, one.frame, one.role) for one in watched.anomalies]))
        finally:
            watched.close()
    assert found[0] == found[1]
    assert calls > 10
