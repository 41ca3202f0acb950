"""What goes wrong on demand: errors that stay, forks, a host that spins, and what is not computed."""

from __future__ import annotations

import pytest
import torch
from stand_in_cuda.library import library

STICKY = """
import json, torch
x = torch.arange(4.0, device="cuda")
found = []
def attempt(call):
    try:
        call()
        found.append("")
    except RuntimeError as error:
        found.append(str(error).splitlines()[0])
y = x[torch.tensor([9], device="cuda")]
attempt(torch.cuda.synchronize)
attempt(lambda: torch.ones(1, device="cuda"))
attempt(lambda: x.cpu())
torch.ones(1, device="cuda:1")
print(json.dumps(found))
"""

FORK = """
import json, os, torch
torch.ones(1, device="cuda")
reading, writing = os.pipe()
if not os.fork():
    import ctypes
    from stand_in_cuda.library import library
    os.write(writing, str(library().cudaStreamSynchronize(None)).encode())
    os._exit(0)
os.wait()
print(json.dumps([int(os.read(reading, 9)), torch.ones(3, device="cuda").sum().item()]))
"""

WATCHED = """
import json, torch, gpuwatch
from torch import nn

class Picks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, index):
        return self.last(self.first(x)[index])

net, x = Picks().cuda(), torch.rand(3, 4, device="cuda")
watch = gpuwatch.watch(net)
found = []
try:
    with watch:
        for batch in range(4):
            net(x, torch.tensor([0, 9 if batch == 2 else 1], device="cuda")).sum().backward()
            torch.cuda.synchronize()
except RuntimeError as error:
    found.append(type(error).__name__)
for _ in range(2):
    verdict = watch.verdict()
    found.append([verdict.kind, verdict.certainty, verdict.statement.partition(" raised ")[2]])
print(json.dumps(found))
"""

FLOAT4 = """
import json, torch, gpuwatch
from torch import nn

class Packs(nn.Module):
    def forward(self, x):
        return (x * 0).to(torch.uint8).view(torch.float4_e2m1fn_x2)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.packs = nn.Linear(4, 4), Packs()

    def forward(self, x):
        found = self.linear(x)
        self.packs(found)
        return found

net = Net().cuda()
with gpuwatch.watch(net) as watch:
    for _ in range(2):
        net(torch.rand(3, 4, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    frames = [frame for frame in watch.frames(1) if frame.module == "packs"]
    rows = [[row.role, row.dtype, row.kind] for row in frames[0].rows if row.role == "output"]
    print(json.dumps([watch.verdict().kind, rows]))
"""

STATE = """
import json, os, threading, torch
torch.cuda.synchronize()
here = threading.get_native_id()
torch.cuda._sleep(400_000_000)
states = []
def look():
    while not done.is_set():
        states.append(open(f"/proc/self/task/{here}/stat").read().rpartition(")")[2].split()[0])
        done.wait(0.01)
done = threading.Event()
watcher = threading.Thread(target=look)
watcher.start()
torch.cuda.synchronize()
done.set()
watcher.join()
print(json.dumps(max(set(states), key=states.count)))
"""


def test_an_index_out_of_range_is_an_assertion_that_stays(alone):
    after = alone(STICKY)
    assert after == ["CUDA error: device-side assert triggered"] * 3


def test_a_forked_child_has_no_driver(alone):
    initialization_error = 3
    assert alone(FORK) == [initialization_error, 3.0]


@pytest.mark.parametrize(("spins", "state"), [("0", "S"), ("1", "R")])
def test_a_host_that_waits_sleeps_or_spins(alone, spins, state):
    assert alone(STATE, STAND_IN_CUDA_SPIN=spins) == state


def test_what_nobody_computes_says_so_and_harms_nothing(capfd):
    refused = library().stand_in_count(14)
    with pytest.raises(RuntimeError, match="operation not supported"):
        torch.nn.LSTMCell(3, 3, device="cuda")(torch.ones(1, 3, device="cuda"))
    assert "lstm_cell_forward" in capfd.readouterr().err
    assert library().stand_in_count(14) > refused
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_the_verdict_after_an_assertion_of_the_device_is_a_crash(alone):
    """Also when the hooks are off; and what gpuwatch holds does not abort the process at its end."""
    crash = ["crash", "established", "AcceleratorError: CUDA error: device-side assert triggered."]
    assert alone(WATCHED) == ["AcceleratorError", crash, crash]


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no float4")
def test_a_module_that_returns_float4_is_not_copied(alone):
    """Torch has no such copy. It would fail as its kernel runs, and the device with it."""
    assert alone(FLOAT4) == ["clean", [["output", "unknown", "not_measurable"]]]
