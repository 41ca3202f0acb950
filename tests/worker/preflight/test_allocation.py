"""Memory that is there, memory that is not, and memory that forgets."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest
import torch
from gpuwatch.core.text import MemoryAmount
from gpuwatch.worker.preflight.device_tests import allocate, count_wrong_words, largest_block
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


@given(st.integers(0, 5000), st.integers(1, 5000), st.integers(1, 64))
def test_the_largest_block_is_found_to_the_grain(limit, most, grain):
    found = largest_block(lambda size: size <= limit, most, grain)

    assert found <= min(limit, most)
    assert min(limit, most) - found < max(grain, 1) + 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("words", [1, 1000, (1 << 23) + 5])
def test_good_memory_keeps_what_is_written(device, words):
    assert count_wrong_words(torch.empty(words, dtype=torch.int64, device=device)) == 0


def test_memory_that_shows_at_two_addresses_is_wrong():
    """As with a broken address line: the same page is mapped twice, one after the other."""
    size = mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    file = os.memfd_create("twice")
    os.ftruncate(file, size)
    rights, shared, fixed = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, 0x10
    address = libc.mmap(None, 2 * size, rights, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    for place in (address, address + size):
        assert libc.mmap(place, size, rights, shared | fixed, file, 0) == place
    os.close(file)
    block = torch.frombuffer((ctypes.c_int64 * (2 * size // 8)).from_address(address), dtype=torch.int64)

    assert count_wrong_words(block) > 0

    del block
    libc.munmap(address, 2 * size)


class StuckBit(TorchDispatchMode):
    """The lowest bit of the first word is what it is, whatever is written there."""

    def __init__(self, block: torch.Tensor, is_set: bool) -> None:
        super().__init__()
        self._first = block[:1].numpy()
        self._is_set = is_set

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.bitwise_xor.Scalar_out:  # what writes the pattern
            self._first[0] = self._first[0] | 1 if self._is_set else self._first[0] & ~1
        return result


@pytest.mark.parametrize("is_set", [False, True])
def test_a_bit_that_is_stuck_is_found_whatever_it_is_stuck_at(is_set):
    block = torch.empty(100, dtype=torch.int64)

    with StuckBit(block, is_set):
        assert count_wrong_words(block) == 1


@pytest.mark.parametrize(
    ("amount", "quick", "words"),
    [
        (None, True, "64 MiB written and read back on cpu"),
        (MemoryAmount(size=10 << 20), True, "10 MiB written and read back on cpu"),
        (MemoryAmount(size=10 << 20), False, "10 MiB written and read back on cpu; largest block "),
    ],
)
def test_what_was_done_is_told(amount, quick, words):
    assert allocate(torch.device("cpu"), amount, quick=quick).detail.startswith(words)


def test_a_share_of_the_hosts_memory_is_shared_among_its_ranks():
    alone = allocate(torch.device("cpu"), MemoryAmount(share=0.002), quick=True)
    one_of_four = allocate(torch.device("cpu"), MemoryAmount(share=0.002), quick=True, sharers=4)

    assert int(alone.detail.split()[0]) >= 3 * int(one_of_four.detail.split()[0])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("quick", [True, False])
def test_a_limit_on_the_memory_is_told_with_what_could_be_had(run_ranks, quick):
    outcomes = run_ranks("allocate", [0, 1], {1: "full"}, quick=quick)

    assert outcomes[0]["kind"] == "ok"
    assert (outcomes[1]["kind"], outcomes[1]["known"], outcomes[1]["peers"]) == ("raised", True, None)
    assert (
        f"{64 if quick else 256} MiB could not be allocated on cpu: the largest available block"
        in outcomes[1]["detail"]
    )
    assert "ulimit -v" in outcomes[1]["next"]


@pytest.fixture
def full_gpu(monkeypatch):
    """A stand-in for the driver's calls: a GPU of 80 GiB with little memory free, whose blocks lie in host memory."""
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch, "empty", lambda count, dtype, device: empty(count, dtype=dtype))

    def has_free(mib):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (mib << 20, 80 << 30))

    return has_free


def test_a_gpu_with_little_free_memory_is_told_and_not_failed(full_gpu):
    full_gpu(100)

    done = allocate(torch.device("cuda", 0), None, quick=True)

    assert done.detail == "10 MiB written and read back on cuda:0"
    assert done.scarce == "only 100 MiB of 80.0 GiB free on cuda:0: others hold the rest"
    assert "nvidia-smi" in done.next


def test_a_gpu_with_enough_free_memory_is_not_scarce(full_gpu):
    full_gpu(9 << 10)

    assert allocate(torch.device("cuda", 0), MemoryAmount(size=1 << 20), quick=True).scarce == ""


def test_ranks_that_share_a_gpu_share_its_free_memory(full_gpu):
    full_gpu(100)

    done = [allocate(torch.device("cuda", 0), MemoryAmount(share=0.8), quick=True, sharers=count) for count in (1, 4)]

    assert [one.detail.split()[0] for one in done] == ["80", "20"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_most_of_a_gpus_memory():
    free, _ = torch.cuda.mem_get_info(0)

    size, unit = allocate(torch.device("cuda", 0), None).detail.split(" written and read back on cuda:0; ")[0].split()

    assert float(size) * {"MiB": 1 << 20, "GiB": 1 << 30}[unit] == pytest.approx(0.8 * free, rel=0.1)
