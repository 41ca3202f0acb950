"""A few numbers of a device, asked for now and read later."""

from __future__ import annotations

import pytest
import torch
from gpuwatch.tests.fakes.late_device import LateDevice
from gpuwatch.worker.device import device
from gpuwatch.worker.device.device import to_host


@pytest.fixture
def late(monkeypatch):
    """The CPU's tensors are late in this process."""
    driver = LateDevice(0, longest=1000)
    monkeypatch.setattr(device, "late_device", lambda: driver)
    return driver


def test_numbers_of_the_host_are_there_at_once():
    coming = to_host(torch.tensor([1.0]), torch.tensor(65536.0, dtype=torch.float64))
    assert coming.arrived()
    assert coming.numbers == [1.0, 65536.0]


def test_numbers_of_a_device_come_later(late):
    coming = to_host(torch.tensor(1.0), torch.tensor([2.5], requires_grad=True))
    assert not coming.arrived()
    with pytest.raises(AssertionError):
        _ = coming.numbers
    late.synchronize(0)
    assert coming.arrived()
    assert coming.numbers == [1.0, 2.5]


def test_nothing_is_asked_during_a_capture(late):
    coming = to_host(torch.tensor(1.0))
    late.capturing = True
    assert to_host(torch.tensor(1.0)) is None
    assert not coming.arrived()
    late.capturing = False
    late.synchronize(0)
    assert coming.arrived()


def test_a_default_device_of_the_scripts_does_not_matter(late):
    scale = torch.tensor(3.0)
    with torch.device("meta"):
        coming = to_host(scale)
    late.synchronize(0)
    assert coming.arrived()
    assert coming.numbers == [3.0]
