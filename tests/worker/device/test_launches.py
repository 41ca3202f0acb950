"""How many kernels a training step launches to be read: GPT-2 of 12 layers on the late device.

The kernels only count: all numbers are 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from gpuwatch.core.recorder.layout import VALUES_PER_SEGMENT
from gpuwatch.tests.fakes.late_device import LateDevice
from gpuwatch.worker.compile import dynamo
from gpuwatch.worker.device.triton_reader import TritonReader
from gpuwatch.worker.hooks import native_writer
from torch import nn

from ..conftest import Watched, use_late_device

LAYERS = 12
WEIGHTS = 12 * LAYERS + 4


class Kernel:
    """A kernel of Triton's, which is launched in the ordinary way."""

    def __init__(self, launches: Counter[str], name: str) -> None:
        self.launches, self.name = launches, name

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.launch

    def launch(self, *arguments: torch.Tensor, **options: bool) -> None:
        self.launches.update([self.name])
        if self.name == "pack":
            arguments[1].zero_()


class Kernels:
    """As kernel.py."""

    INTERPRETED = False
    element = str

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.read, self.read_many, self.pack = (Kernel(self.launches, name) for name in ("read", "read_many", "pack"))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """A late device on which every tensor is, and the launches of its reader."""
    driver, kernels = LateDevice(7), Kernels()
    use_late_device(monkeypatch, driver)
    monkeypatch.setattr("gpuwatch.worker.device.reader_choice.TorchReader", lambda: TritonReader(kernels))
    return kernels


class Block(nn.Module):
    """A layer of GPT-2, with its parameters: 12 of them."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.c_attn, self.attn_proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.c_fc, self.mlp_proj = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.c_attn(self.ln_1(x)).chunk(3, -1)
        x = x + self.attn_proj(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp_proj(nn.functional.gelu(self.c_fc(self.ln_2(x))))


class GPT2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(64, 8), nn.Embedding(8, 8)
        self.h = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.ln_f = nn.LayerNorm(8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.ln_f(self.h(self.wte(ids) + self.wpe(torch.arange(8))))


@pytest.mark.parametrize("native", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_weights_of_a_step_and_of_a_forward_are_read_by_few_launches(tmp_path, monkeypatch, kernels, native):
    if not native:
        monkeypatch.setattr(native_writer, "NativeFrameWriter", None)
    elif native_writer.NativeFrameWriter is None:
        pytest.skip("worker/native was not built where gpuwatch was installed")
    model = GPT2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.zeros(1, 8, dtype=torch.long)
    watched = Watched(tmp_path / "recorder", watch=("forward", "weights"))
    try:
        for _ in range(2):
            kernels.launches.clear()
            loss = model(ids).sum()
            forward = Counter(kernels.launches)
            loss.backward()
            optimizer.step()
            at_step = kernels.launches - forward
            optimizer.zero_grad()
        assert watched.faults == []
        frames = watched.last.frames
        weights = {row.value for frame in frames if frame.phase == "optimizer" for row in frame.rows}
        read = {row.value for frame in frames if frame.phase == "forward" for row in frame.rows if row.value >= 0}
    finally:
        watched.close()
    assert len(weights) == len(list(model.parameters())) == WEIGHTS
    segments = -(-len(read | weights) // VALUES_PER_SEGMENT)
    # before, each of them was a launch: as many as there are weights, in the forward and again after the step
    assert at_step["read"] == 0
    assert at_step["read_many"] <= 2  # a segment of the recorder may end among them
    assert forward["read_many"] <= segments
    # the weights of a frame at the begin of a segment are read alone: see DeviceStatsBuffer._numbers_of
    assert len(read) - WEIGHTS <= forward["read"] <= len(read) - WEIGHTS + 2 * segments


class FSDPModule(GPT2):
    """Has the name by which a sharded model is known: the memory of its weights may be freed after each call."""


def partitioned() -> GPT2:
    """As DeepSpeed's ZeRO 3 keeps a model: each parameter has a rank's part."""
    model = GPT2()
    for parameter in model.parameters():
        parameter.ds_tensor = parameter.detach()[:1]
    return model


@pytest.mark.parametrize("sharded", [FSDPModule, partitioned])
def test_a_sharded_models_weights_are_dealt_with_before_their_memory_is_freed(tmp_path, kernels, sharded):
    model = sharded()
    ids = torch.zeros(1, 8, dtype=torch.long)
    watched = Watched(tmp_path / "recorder", watch=("forward", "weights"))
    at_ends = []
    model.h[3].register_forward_hook(lambda *_: at_ends.append(kernels.launches["read_many"]))
    model.h[4].ln_1.register_forward_hook(lambda *_: at_ends.append(kernels.launches["read_many"]))
    try:
        for _ in range(2):
            kernels.launches.clear()
            model(ids)
        assert watched.faults == []
    finally:
        watched.close()
    assert at_ends[:2] == [0, 0]  # read for the first time, each alone
    assert at_ends[3] == at_ends[2] + 1
    assert 70 <= kernels.launches["read_many"] <= 75  # frames with weights, but for those that begin a segment


@pytest.mark.slow
def test_what_a_graph_has_written_is_read_by_one_launch(tmp_path, monkeypatch, kernels):
    monkeypatch.setattr(dynamo, "in_host_memory", lambda device: False)
    torch.compiler.reset()
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    watched = Watched(tmp_path / "recorder", watch=("forward",))
    try:
        graph = torch.compile(model, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            kernels.launches.clear()
            graph(torch.ones(2, 4))
            watched.hooks.settle()
        assert watched.faults == []
        rows = [row for frame in watched.last.frames for row in frame.rows]
    finally:
        watched.close()
        torch.compiler.reset()
    assert len({row.value for row in rows}) >= 7  # the input of the first module, and what each returned
    assert kernels.launches == {"read_many": 1, "pack": 1}


def test_the_reduced_gradients_of_a_step_are_read_by_few_launches(tmp_path, monkeypatch, kernels):
    monkeypatch.setattr("gpuwatch.worker.hooks.optimizer.ranks", lambda: 2)
    model = GPT2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = Watched(tmp_path / "recorder", watch=("grads",))
    try:
        model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
        kernels.launches.clear()
        optimizer.step()
        at_step = Counter(kernels.launches)
        assert watched.faults == []
        read = [row for frame in watched.last.frames if frame.phase == "collective" for row in frame.rows]
    finally:
        watched.close()
    assert len(read) == WEIGHTS
    assert at_step["read"] == 0
    assert 1 <= at_step["read_many"] <= 2
