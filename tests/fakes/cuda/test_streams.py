"""Streams are late, and wait for nothing but what they are told to wait for."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import torch
from stand_in_cuda.library import library

LONG = 300_000_000
"""Cycles of torch.cuda._sleep: 0.3 s of a stream, which no other may wait for."""
NOT_READY, NON_BLOCKING = 600, 1


def busy(stream=None):
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)


def test_a_stream_is_late_and_an_event_tells_when_it_is_there():
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    x = torch.ones(3, device="cuda")
    x + 1  # the first sum of a process takes longer than the stream is held
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        y = x + 1
        event.record()

    assert not event.query()
    assert not stream.query()
    event.synchronize()
    assert event.query()
    assert y.tolist() == [2, 2, 2]


def test_a_busy_stream_holds_up_no_other_until_it_is_told_to_wait():
    slow, quick = torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.zeros(3, device="cuda")
    torch.cuda.synchronize()
    busy(slow)
    with torch.cuda.stream(slow):
        x.add_(1)
        done = torch.cuda.Event()
        done.record()
    with torch.cuda.stream(quick):
        early = x.clone()
    quick.synchronize()
    assert not slow.query()
    quick.wait_event(done)
    with torch.cuda.stream(quick):
        late = x.clone()
    quick.synchronize()
    assert (early.tolist(), late.tolist()) == ([0, 0, 0], [1, 1, 1])


ENDS_AHEAD = """
import ctypes, os, sys, time, torch

class Late:
    def __del__(self, sleep=time.sleep, write=os.write, read=os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)):
        sleep(2)  # the interpreter has ended, and its streams go on
        write(read, self.memory)

y, x, host = torch.full((1,), 5.0, device="cuda"), torch.zeros(1, device="cuda"), torch.zeros(1).pin_memory()
Late.memory = (ctypes.c_char * 4).from_address(host.data_ptr())
torch.add(x, 7.0, out=y)
y.fill_(5.0)
torch.cuda.synchronize()
torch.cuda._sleep(300_000_000)
torch.add(x, 7.0, out=y)
host.copy_(y, non_blocking=True)
late = Late()
"""


def test_a_copy_does_not_run_behind_an_operation_that_was_left_out_at_the_end(tmp_path):
    read = tmp_path / "read"
    subprocess.run([sys.executable, "-c", ENDS_AHEAD, str(read)], check=True, timeout=300)
    assert torch.frombuffer(bytearray(read.read_bytes()), dtype=torch.float32).item() in (0.0, 7.0)


def test_memory_that_is_freed_too_early_has_somebody_elses_numbers():
    side = torch.cuda.Stream()
    x = torch.full((1000,), 7.0, device="cuda")
    torch.cuda.synchronize()
    busy(side)
    with torch.cuda.stream(side):
        read = x + 0  # without x.record_stream(side)
    del x
    torch.full((1000,), 9.0, device="cuda")
    torch.cuda.synchronize()
    assert read[0].item() == 9


def made(flags):
    handle = ctypes.c_void_p()
    assert library().cudaStreamCreateWithFlags(ctypes.byref(handle), flags) == 0
    return torch.cuda.ExternalStream(handle.value)


def test_the_default_stream_and_blocking_streams_wait_for_each_other():
    blocking, free = made(0), made(NON_BLOCKING)
    x = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    busy()
    x.add_(1)
    with torch.cuda.stream(free):
        not_behind = x.clone()
    free.synchronize()
    with torch.cuda.stream(blocking):
        behind = x.clone()
        torch.cuda._sleep(LONG)
        x.add_(1)
    last = x.clone()
    torch.cuda.current_stream().synchronize()
    assert blocking.query()
    assert (not_behind.item(), behind.item(), last.item()) == (0, 1, 2)


def test_two_devices_have_their_own_streams_and_memory():
    assert torch.cuda.device_count() == 2
    one, other = torch.ones(3, device="cuda:0"), torch.full((3,), 2.0, device="cuda:1")
    torch.cuda.synchronize(1)
    with torch.cuda.device(1):
        busy()
    assert (one + 1).tolist() == [2, 2, 2]
    assert not torch.cuda.current_stream(1).query()
    assert (other.to("cuda:0") + one).tolist() == [3, 3, 3]
    attributes = (ctypes.c_char * 256)()  # struct cudaPointerAttributes has 88 bytes in CUDA 13, and 24 in CUDA 12
    assert library().cudaPointerGetAttributes(attributes, ctypes.c_void_p(other.data_ptr())) == 0
    assert int.from_bytes(attributes[4:8], "little") == 1


def test_a_graph_does_again_what_was_captured():
    x = torch.ones(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        z = y + 1
    assert z.isnan().all() or not torch.equal(z, x * 2 + 1)  # nothing has run yet
    for number in (1.0, 5.0):
        x.fill_(number)
        graph.replay()
        assert z.tolist() == [2 * number + 1] * 3


def test_a_context_is_made_where_a_device_is_used_alone(alone):
    code = (
        "import json, torch\n"
        "from stand_in_cuda.library import library\n"
        "x = torch.ones(3, device='cuda:1') + 1\n"
        "torch.cuda.synchronize(1)\n"
        "print(json.dumps(library().stand_in_contexts()))"
    )
    assert alone(code) == 0b10
