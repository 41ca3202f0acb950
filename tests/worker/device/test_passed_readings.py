"""Numbers that belong to no frame, read on the late device: they come whole, in any number, or are told as unseen."""

from __future__ import annotations

import math

import pytest
import torch
from gpuwatch.tests.fakes.late_device import LateDevice
from gpuwatch.tests.interruptions import all_of, interrupt
from gpuwatch.worker.device import passed_readings
from gpuwatch.worker.device.passed_readings import PassedReading, PassedReadings
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
    while passed.outstanding:
        passed.collect()
    return passed.arrived


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


class Interrupts(BaseException):
    """What a signal's handler raises, as KeyboardInterrupt."""


def raises() -> None:
    raise Interrupts


def read_and_collect(passed):
    for number in range(3):
        passed.read([torch.full((3,), math.inf if number == 1 else 1.0)], number)
    passed.flush()
    passed.collect()
    passed.read([torch.full((3,), math.nan if number == 5 else 1.0) for number in range(7)], 3)
    passed.flush()
    while passed.outstanding:
        passed.collect()


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_an_exception_loses_no_reading_uncounted(monkeypatch, every):
    """An infinity that is neither told nor counted as unseen would let a run look clean."""
    monkeypatch.setattr(passed_readings, "_CAPACITY", 4)
    codes = all_of(PassedReadings, PassedReading)
    for number in range(0, 5000, every):
        device, reader = LateDevice(3), TorchReader()
        passed = PassedReadings(device, lambda method, *given, reader=reader: getattr(reader, method)(*given))
        was_read = []
        real = passed.read
        passed.read = lambda tensors, about, real=real, was_read=was_read: was_read.append(real(tensors, about)[0])
        try:
            interrupt(codes, lambda passed=passed: read_and_collect(passed), raises, number)
        except Interrupts:
            was_interrupted = True
        else:
            was_interrupted = False
        told = {reading.about for reading in settled(passed)}
        bad = {reading.about for reading in was_read} & {1, 3}
        assert told <= {1, 3} and (bad <= told or passed.unseen), (number, bad, told)
        assert len(passed.arrived) == len(told)
        if not was_interrupted:
            break
    assert number > 50
