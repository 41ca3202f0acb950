"""Numbers that belong to no frame, read on the late device: they come whole, in any number, or are told as unseen."""

from __future__ import annotations

import math

import pytest
import torch
from gpuwatch.tests.fakes.late_device import LateDevice
from gpuwatch.worker.device.passed_readings import PassedReadings
from gpuwatch.worker.device.torch_reader import TorchReader


@pytest.fixture
def device():
    return LateDevice(3)


@pytest.fixture
def passed(device):
    reader = TorchReader()
    return PassedReadings(device, lambda method, *arguments: getattr(reader, method)(*arguments))


def settled(passed):
    passed.flush()
    found = []
    while passed.outstanding:
        found += passed.collect()
    return found


@pytest.mark.parametrize("number", [1, 2, 256, 600])
def test_as_many_tensors_as_there_are_come_in_their_order(passed, number):
    tensors = [torch.full((3,), float(at)) for at in range(number)]
    tensors[-1][1] = math.nan
    reading, read = passed.read(tensors, "about")
    assert reading.numbers is None, "nothing is known before it has come"
    tensors[0].fill_(7.0)  # what is written into a tensor afterwards is not seen
    assert settled(passed) == [reading]
    assert len(read) == number
    assert [meta & 0xFF for *_, meta in reading.numbers] == [0] * (number - 1) + [1]
    assert (reading.about, passed.unseen) == ("about", False)


def test_finite_numbers_are_kept_and_not_told(passed):
    reading, _ = passed.read([torch.tensor([2.0, -4.0])], None)
    assert settled(passed) == []
    ((_, high, _),) = reading.numbers
    assert high == torch.tensor(4.0).view(torch.int32).item()


def test_what_is_no_float_is_not_read(passed):
    assert passed.read([torch.arange(3), torch.empty(0)], None) is None
    assert not passed.unseen


def test_nothing_is_read_in_a_graph(passed, device):
    device.capturing = True
    assert passed.read([torch.ones(3)], None) is None
    assert passed.collect() == []
    device.capturing = False
    assert passed.unseen


def test_a_device_that_brings_nothing_costs_the_numbers_and_no_more(passed, device):
    device.held.add(0)
    readings = []
    for _ in range(70):
        readings.append(passed.read([torch.tensor([math.inf])], None)[0])
        passed.flush()
    assert passed.collect() == []
    assert [reading.is_lost for reading in readings] == [False] * 64 + [True] * 6
    assert passed.unseen
    device.held.clear()
    assert settled(passed) == readings[:64]
