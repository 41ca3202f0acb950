"""A cell of a notebook that is interrupted while a model is watched: it ends as in a notebook without gpuwatch."""

from __future__ import annotations

from queue import Empty

import pytest
from gpuwatch.tests.waiting import WAIT_S, until

pytestmark = pytest.mark.slow

BEFORE = """
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

def train():
    net(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
WATCH = "import gpuwatch\nwatch = gpuwatch.watch(net)"
ONCE = """
train()
print("begun", flush=True)
while True:
    train()
"""
TWICE = """
try:
    print("begun", flush=True)
    while True:
        train()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    while True:
        train()
"""
AFTER = """
optimizer.zero_grad()
net.load_state_dict({name: torch.full_like(value, 0.25) for name, value in net.state_dict().items()})
train()
print([value.tolist() for value in net.state_dict().values()], torch.is_grad_enabled())
"""


class Notebook:
    """A kernel of Jupyter's, as a notebook starts it."""

    def __init__(self) -> None:
        manager = pytest.importorskip("jupyter_client", reason="needs Jupyter: pip install ipykernel")
        pytest.importorskip("ipykernel", reason="needs Jupyter: pip install ipykernel")
        self.kernel = manager.KernelManager(kernel_name="python3")
        self.kernel.start_kernel()
        self.client = self.kernel.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=WAIT_S)

    def run(self, cell: str, interrupt_after: tuple[str, ...] = ()) -> list[str]:
        """What a cell prints, and the error that ends it. It is interrupted when it has printed each of these lines."""
        told: list[str] = []
        waits, sent = list(interrupt_after), self.client.execute(cell)
        while True:
            message = self.message()
            if message["parent_header"].get("msg_id") != sent:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                told += content["text"].splitlines()
                while waits and waits[0] in told:
                    waits.pop(0)
                    self.kernel.interrupt_kernel()
            elif message["msg_type"] == "error":
                told.append(f"{content['ename']}: {content['evalue']}")
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return told

    def message(self) -> dict:
        def get() -> dict | None:
            try:
                return self.client.get_iopub_msg(timeout=1)
            except Empty:
                return None

        return until(get, "a message of the kernel", look_s=0)

    def close(self) -> None:
        self.client.stop_channels()
        self.kernel.shutdown_kernel(now=True)


@pytest.fixture
def notebook():
    made = []

    def make() -> Notebook:
        made.append(Notebook())
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("cell", "lines"), [(ONCE, ("begun",)), (TWICE, ("begun", "interrupted"))], ids=["once", "twice"]
)
def test_an_interrupted_cell_ends_as_without_gpuwatch(notebook, cell, lines):
    plain, watched = notebook(), notebook()
    told = {}
    for name, one in (("plain", plain), ("watched", watched)):
        assert one.run(BEFORE) == []
        if one is watched:
            assert one.run(WATCH) == []
        told[name] = [one.run(cell, lines), one.run(AFTER)]
    assert told["watched"] == told["plain"]
    assert told["plain"][0] == [*lines, "KeyboardInterrupt: "]
    assert watched.run("print(watch.verdict().kind, len(watch.frames()) > 0, watch.anomalies)") == ["clean True []"]
