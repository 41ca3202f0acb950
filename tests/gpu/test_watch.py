"""A watched training on a real GPU."""

from __future__ import annotations

import ctypes
import warnings

import gpuwatch
import gpuwatch.worker.watch as watch_module
import pytest
import torch
from torch import nn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Net(nn.Module):
    """`up` overflows in fp16 once its input is large."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(64, 64)
        self.up = nn.Linear(64, 64, bias=False)
        nn.init.constant_(self.up.weight, 4 / 64)

    def forward(self, x):
        largest = x.abs().amax()
        return self.up(torch.sigmoid(self.down(x / largest)) * largest)


def train(net, device, batches=4, bad=None):
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    for batch in range(batches):
        x = torch.rand(8, 64, device=device)
        if batch == bad:
            x.fill_(60000.0)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = net(x).float().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize(device)


@pytest.mark.parametrize("device", ["cuda:0", f"cuda:{torch.cuda.device_count() - 1}"])
def test_an_overflow_is_named_on_the_first_and_on_the_last_device(device):
    net = Net().to(device)
    with gpuwatch.watch(net, on_overflow="continue") as watched:
        train(net, device, bad=2)

    first = watched.anomalies[0]
    assert (first.module, first.value, first.phase) == ("up", "+inf", "forward")
    frames = [frame for frame in watched.frames(1) if frame.module == "up"]
    assert all(row.abs_max is not None for frame in frames for row in frame.rows)


def test_the_line_of_an_overflow_is_found_when_its_numbers_have_arrived():
    net = Net().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    # they mostly arrive behind the forward; where the host is slower than the device, the forward itself raises
    found_it = pytest.raises(gpuwatch.OverflowDetected, match=r"aten\.mm\.default made it at")
    with gpuwatch.watch(net) as watched, found_it:
        torch.cuda._sleep(200_000_000)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = net(torch.full((8, 64), 60000.0, device="cuda")).float().mean()
        loss.backward()
        torch.cuda.synchronize()
        optimizer.step()
    found = watched.verdict().operation
    assert found.code == "return self.up(torch.sigmoid(self.down(x / largest)) * largest)"
    assert (found.module, found.output.dtype, found.element) == ("up", "float16", "everything")


@pytest.mark.parametrize("on_overflow", ["continue", "abort"])
def test_a_step_waits_for_nothing(on_overflow):
    net = Net().cuda()
    with gpuwatch.watch(net, on_overflow=on_overflow):
        train(net, "cuda")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            x = torch.ones(8, 64, device="cuda")
            net(x).mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


def test_a_refused_registration_harms_no_launch_and_the_watch_holds(monkeypatch):
    """The driver refuses memory that is registered already."""
    torch.zeros(1, device="cuda")
    made = watch_module.RecorderWriter
    taken = []

    def registered(*args, **kwargs):
        recorder = made(*args, **kwargs)
        anchor = ctypes.c_char.from_buffer(recorder.memory)
        assert int(torch.cuda.cudart().cudaHostRegister(ctypes.addressof(anchor), len(recorder.memory), 0)) == 0
        taken.append(anchor)
        return recorder

    monkeypatch.setattr(watch_module, "RecorderWriter", registered)
    net = Net().cuda()
    try:
        with gpuwatch.watch(net, on_overflow="continue") as watched:
            train(net, "cuda", bad=2)
        assert torch.ones(4, device="cuda").sum().item() == 4
        assert watched.anomalies[0].module == "up"
    finally:
        for anchor in taken:
            torch.cuda.cudart().cudaHostUnregister(ctypes.addressof(anchor))


def test_the_weights_have_the_same_bits():
    def weights(watch):
        torch.manual_seed(0)
        net = Net().cuda()
        if watch:
            with gpuwatch.watch(net, on_overflow="continue"):
                train(net, "cuda")
        else:
            train(net, "cuda")
        return [weight.detach().cpu() for weight in net.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(weights(False), weights(True), strict=True))


@pytest.mark.parametrize("how", ["alone", "together"])
def test_memory_that_a_side_stream_reads_is_not_given_to_others_before(how):
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).cuda() if how == "alone" else nn.MultiheadAttention(64, 1).cuda()
    side = torch.cuda.Stream()
    with gpuwatch.watch(net, on_overflow="continue") as watched, torch.no_grad():
        for value in (5.0, 7.0):
            x = torch.full((8, 64), value, device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                torch.cuda._sleep(200_000_000)
                net(x) if how == "alone" else net(x, x, x)
            del x
            torch.full((8, 64), 9.0, device="cuda")
            torch.cuda.synchronize()
        for batch, value in enumerate((5.0, 7.0)):
            frame = watched.frames(batch)[0]
            assert next(row.abs_max for row in frame.rows if row.role.startswith("input")) == value
