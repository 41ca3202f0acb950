"""CudaDevice in front of a stand-in for the driver: which context each call is made in, and what a refusal leaves."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpuwatch.core.recorder import layout
from gpuwatch.core.recorder.reader import RecorderReader
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.values import NonFinite, Value
from gpuwatch.tests.fakes.late_device import LateDevice
from gpuwatch.worker.device import file_copies
from gpuwatch.worker.device.device import CudaDevice, file_system_of

from .one_by_one import OneByOne


class Stream:
    """A stream of the stand-in."""

    def __init__(self, index, number):
        self.device = torch.device("cuda", index)
        self.cuda_stream = number

    def synchronize(self):
        pass


class Driver:
    """Two devices. Remembers in which contexts it was called, and keeps an error as CUDA does."""

    def __init__(self, result=0, getters=()):
        self.device = 0
        self.streams = {0: Stream(0, 0), 1: Stream(1, 0)}
        self.contexts = set()
        self.result = result
        self.last_error = 0
        self.getters = getters

    def call(self):
        """Any call of the runtime that needs a context makes that of the current device."""
        self.contexts.add(self.device)

    def exchange(self, index):
        before, self.device = self.device, index
        return before

    def set_stream(self, stream):
        """As torch does: this sets the device, which makes its context."""
        if stream.device.index != self.device:
            self.device = stream.device.index
            self.call()
        self.streams[self.device] = stream

    def cudart(self):
        def register(address, size, flags):
            self.call()
            self.last_error = self.result
            return self.result

        def clear():
            self.last_error = 0

        calls = {"cudaHostRegister": register, "cudaHostUnregister": lambda address: self.call() or 0}
        return SimpleNamespace(**calls, **dict.fromkeys(self.getters, clear))

    def ones(self, *shape, device):
        """A kernel that is launched and asked about, by torch."""
        assert torch.device(device).index == self.device
        self.call()
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError("CUDA error")
        return torch.zeros(shape)


class Event:
    driver: Driver

    def record(self, stream):
        assert stream.device.index == self.driver.device
        self.driver.call()

    def query(self):
        self.driver.call()
        return True


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    Event.driver = driver
    cuda, native = torch.cuda, torch._C
    monkeypatch.setattr(cuda, "current_device", lambda: driver.device)
    monkeypatch.setattr(native, "_cuda_getDevice", lambda: driver.device, raising=False)
    monkeypatch.setattr(cuda, "_exchange_device", driver.exchange)
    monkeypatch.setattr(cuda, "_maybe_exchange_device", driver.exchange)
    monkeypatch.setattr(cuda, "cudart", driver.cudart)
    monkeypatch.setattr(cuda, "current_stream", lambda index=None: driver.streams[device_of(index, driver)])
    monkeypatch.setattr(cuda, "set_stream", driver.set_stream)
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "Event", Event)
    monkeypatch.setattr(
        native, "_cuda_getCurrentRawStream", lambda index: driver.streams[index].cuda_stream, raising=False
    )
    return driver


def device_of(index, driver):
    return driver.device if index is None else torch.device(index).index


@pytest.mark.parametrize("getters", [(), ("cudaGetLastError",)], ids=["by a launch", "by the call"])
def test_a_refused_registration_leaves_no_error_for_the_users_next_launch(driver, monkeypatch, getters):
    driver.result, driver.getters = 1, getters
    monkeypatch.setattr(torch, "ones", driver.ones)
    assert CudaDevice().register(4096, 8192, torch.device("cuda", 1)) == "cudaHostRegister returned 1"
    assert driver.last_error == 0
    assert driver.contexts == {1}


def test_a_process_that_uses_device_1_gets_no_context_on_device_0(driver):
    cuda, device = CudaDevice(), torch.device("cuda", 1)
    assert cuda.register(4096, 8192, device) == ""
    side = Stream(1, 77)
    for stream, key in ((driver.streams[1], (1, 0)), (side, (1, 77))):
        with cuda.use(key, stream):
            assert (driver.device, cuda.stream_key(device)) == (1, key)
            assert cuda.query(cuda.record(stream))
            assert cuda.wait(cuda.record(stream), 0.0)
        assert (driver.device, cuda.stream_key(device)) == (0, (1, 0))
    cuda.unregister(4096, device)
    assert driver.contexts == {1}


def test_nothing_is_switched_where_the_stream_is_current(driver):
    cuda = CudaDevice()
    with cuda.use((0, 0), driver.streams[0]) as switched:
        assert switched is None


def values_of(recorder, number):
    reader = RecorderReader(recorder.path)
    page = reader.page(number)
    reader.close()
    return [Value(*numbers) for segment in page.segments for numbers in layout.VALUE.iter_unpack(segment.values)]


# -- the way round: pinned memory -----------------------------------------------------------------------------------


@pytest.fixture
def recorder(tmp_path):
    return RecorderWriter(tmp_path / "recorder", rank=0, local_rank=0, world_size=1, attempt=0)


class NoSuchCall(LateDevice):
    """A torch that was built without the driver's call."""

    def register(self, address, size, device):
        raise AssertionError("cudaHostRegister returned 1")


@pytest.mark.parametrize("late", [LateDevice(refuses="cudaHostRegister returned 1"), NoSuchCall()])
def test_without_registration_the_numbers_come_through_pinned_memory(recorder, late):
    buffer = OneByOne(recorder, torch.device("cpu"), driver=late)
    assert "cudaHostRegister returned 1" in buffer.note
    assert f"{recorder.path} is on {file_system_of(recorder.path)}" in buffer.note
    page = recorder.begin_page(0, 0, 0)
    with torch.no_grad():
        buffer.measure(torch.tensor([3.0, float("nan")]))
    recorder.end_page(page)
    assert buffer.pending(page.number)
    assert buffer.collect() == [page.number]
    assert not buffer.pending(page.number)
    assert values_of(recorder, page.number)[0].flags == NonFinite.NAN
    buffer.close()
    recorder.close()


class Counting(LateDevice):
    """Counts what is unregistered."""

    unregistered = 0

    def unregister(self, address, device):
        self.unregistered += 1
        super().unregister(address, device)


@pytest.mark.quick(1)
@pytest.mark.parametrize("state", ["idle", "copies are outstanding", "captures"])
def test_a_buffer_that_nobody_closes_gives_the_drivers_memory_back(tmp_path, state):
    recorder = RecorderWriter(tmp_path / "recorder", rank=0, local_rank=0, world_size=1, attempt=0)
    late = Counting()
    buffer = OneByOne(recorder, torch.device("cpu"), driver=late)
    recorder.begin_page(0, 0, 0)
    buffer.measure(torch.ones(3))
    if state == "copies are outstanding":
        buffer.flush()
    late.capturing = state == "captures"
    address = ctypes.addressof(ctypes.c_char.from_buffer(recorder.memory))

    del buffer, recorder
    gc.collect()

    assert late.unregistered == (state == "idle")
    kept = [ctypes.addressof(anchor) for anchor in file_copies._unmapped_never]
    assert (address in kept) == (state != "idle")  # else another recorder might be where the device writes


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path):
    found = [file_system_of(Path(path)) for path in ("/proc/self/maps", "/dev/shm/recorder", "/sys/module")]
    assert found == ["proc", "tmpfs", "sysfs"]
    assert file_system_of(tmp_path) not in ("", "proc", "an unknown file system")


# -- on CUDA only ---------------------------------------------------------------------------------------------------

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@on_cuda
def test_after_a_refusal_of_the_real_driver_the_next_launch_is_the_users():
    memory = torch.empty(8192, dtype=torch.uint8)
    device = torch.device("cuda", torch.cuda.current_device())
    cuda = CudaDevice()
    assert cuda.register(memory.data_ptr(), 8192, device) == ""
    assert "cudaHostRegister returned" in cuda.register(memory.data_ptr(), 8192, device)  # it is registered already
    assert torch.ones(3, device=device).sum().item() == 3.0
    cuda.unregister(memory.data_ptr(), device)
    cuda.unregister(memory.data_ptr(), device)
    assert torch.ones(3, device=device).sum().item() == 3.0


class Refused(CudaDevice):
    """A driver that takes no memory of a file."""

    def register(self, address, size, device):
        return "refused"


@pytest.mark.gpu
@on_cuda
def test_numbers_come_through_real_pinned_memory(recorder):
    buffer = OneByOne(recorder, torch.device("cuda"), driver=Refused())
    page = recorder.begin_page(0, 0, 0)
    with torch.no_grad():
        for number in range(500):
            buffer.measure(torch.full((10,), float(number), device="cuda"))
        torch.cuda.set_sync_debug_mode("error")
        try:
            buffer.flush()
            buffer.collect()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    recorder.end_page(page)
    buffer.finish()
    assert [value.abs_max for value in values_of(recorder, page.number)] == list(range(500))
    buffer.close()


ONLY_DEVICE_1 = """
import sys
from pathlib import Path
import torch
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.worker.device.device_buffer import DeviceStatsBuffer
from gpuwatch.worker.device.device import to_host
recorder = RecorderWriter(Path(sys.argv[1]), rank=0, local_rank=0, world_size=1, attempt=0)
tensor = torch.ones(10, device="cuda:1")
buffer = DeviceStatsBuffer(recorder, tensor.device)
page = recorder.begin_page(0, 0, 0)
with torch.no_grad():
    _, (row,) = buffer.frame([tensor], [10], [None])
    buffer.flush()
    stream = torch.cuda.Stream(1)
    with torch.cuda.device(1), torch.cuda.stream(stream):
        buffer.frame([tensor], [10], [])
    buffer.frame([tensor], [0], [row])
    buffer.flush()
    copied = to_host(tensor[0])
torch.cuda.synchronize(1)
assert copied.arrived()
buffer.finish()
recorder.end_page(page)
buffer.close()
print(torch._C._cuda_hasPrimaryContext(0), torch._C._cuda_hasPrimaryContext(1))
"""


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_script_on_device_1_has_no_context_on_device_0(tmp_path):
    command = [sys.executable, "-c", ONLY_DEVICE_1, str(tmp_path / "recorder")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout == "False True\n", done.stderr
