"""Device memory, pinned and registered memory, and who waits for a copy."""

from __future__ import annotations

import ctypes

import pytest
import torch
from stand_in_cuda.library import library

HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
INVALID_VALUE, ALREADY_REGISTERED, NOT_REGISTERED = 1, 712, 713


@pytest.fixture
def block():
    address = ctypes.c_void_p()
    assert library().cudaMalloc(ctypes.byref(address), ctypes.c_size_t(4096)) == 0
    return address


def bytes_at(address):
    return set(ctypes.string_at(address, 4096))


def test_new_memory_is_nan_and_freed_memory_is_poison(block):
    assert bytes_at(block.value) == {0xFF}
    assert library().cudaFree(block) == 0
    assert bytes_at(block.value) == {0x6B}
    assert library().cudaFree(block) == INVALID_VALUE
    assert library().cudaGetLastError() == INVALID_VALUE


def test_memory_runs_out_and_torch_goes_on():
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 1024\.00 GiB"):
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    assert torch.ones(3, device="cuda").sum().item() == 3


@pytest.mark.parametrize(
    ("pinned", "blocking", "expected"),
    [
        (True, False, {"copies": 1}),
        (True, True, {"copies": 1, "host_waits": 1}),
        (False, False, {"copies": 1, "pageable_copies": 1, "host_waits": 1}),
    ],
)
def test_a_copy_to_the_host_waits_unless_its_memory_is_pinned(counted, pinned, blocking, expected):
    source = torch.arange(100.0, device="cuda")
    target = torch.zeros(100, pin_memory=pinned)
    torch.cuda.synchronize()

    assert counted(lambda: target.copy_(source, non_blocking=not blocking)).items() >= expected.items()
    torch.cuda.synchronize()
    assert target.tolist() == list(range(100))


def test_registered_memory_is_reached_without_waiting(counted):
    target, size = torch.zeros(1024), ctypes.c_size_t(4096)
    source = torch.arange(1024.0, device="cuda")
    address = ctypes.c_void_p(target.data_ptr())
    torch.cuda.synchronize()

    assert library().cudaHostRegister(address, size, 1) == 0
    assert library().cudaHostRegister(address, size, 1) == ALREADY_REGISTERED
    assert counted(lambda: target.copy_(source, non_blocking=True)) == {"copies": 1}
    torch.cuda.synchronize()
    assert target[-1] == 1023
    assert library().cudaHostUnregister(address) == 0
    assert library().cudaHostUnregister(address) == NOT_REGISTERED
    library().cudaGetLastError()


def test_a_copy_from_where_no_device_memory_is_is_refused(block):
    host, size = ctypes.create_string_buffer(64), ctypes.c_size_t(64)
    assert library().cudaMemcpyAsync(host, host, size, DEVICE_TO_HOST, None) == INVALID_VALUE
    assert library().cudaMemcpyAsync(block, host, ctypes.c_size_t(5000), HOST_TO_DEVICE, None) == INVALID_VALUE
    assert library().cudaMemcpyAsync(host, block, size, DEVICE_TO_HOST, None) == 0
    assert set(host.raw) == {0xFF}
    library().cudaGetLastError()
    assert library().cudaFree(block) == 0


def test_registration_is_refused_on_demand(alone):
    code = (
        "import torch, json\n"
        "memory = torch.zeros(1024)\n"
        "torch.zeros(1, device='cuda')\n"
        "result = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), 4096, 1))\n"
        "print(json.dumps(result))"
    )
    assert alone(code, STAND_IN_CUDA_REFUSE_REGISTRATION="1") == INVALID_VALUE
