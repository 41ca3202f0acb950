from __future__ import annotations

import gc
import weakref

import gpuwatch
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ..conftest import Watched


@pytest.fixture
def swaps():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype = torch.float32) -> None:
    model(torch.ones(3, 4, dtype=dtype)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def trained(watch, swaps) -> tuple[Watched, nn.Module, torch.optim.Optimizer]:
    watched = watch()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        step(model, optimizer)
    return watched, model, optimizer


def test_a_model_is_converted_and_watched_as_before(trained):
    watched, model, optimizer = trained
    before = list(model.parameters())
    model.double()
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True)), "else nothing was swapped"
    step(model, optimizer, torch.float64)
    assert watched.faults == []
    rows = {
        (frame.module, frame.phase, row.role): row.dtype
        for frame in watched.last.frames
        for row in frame.rows
        if row.role in ("weight", "grad weight")
    }
    assert rows[("0", "forward", "weight")] == rows[("0", "backward", "grad weight")] == "float64"
    assert rows[("1", "backward", "grad weight")] == "float64"


def test_weights_are_read_again_after_they_were_loaded(trained):
    watched, model, _ = trained
    model(torch.ones(3, 4))
    loaded = {name: torch.full_like(each, 7.0) for name, each in model.state_dict().items()}
    model.load_state_dict(loaded)
    model(torch.ones(3, 4))
    (frame,) = [frame for frame in watched.last.frames if frame.module == "1" and frame.phase == "forward"]
    assert {row.role: row.abs_max for row in frame.rows if row.role in ("weight", "bias")} == {"weight": 7, "bias": 7}


def test_a_hook_of_the_script_runs_after_a_swap(trained):
    _, model, optimizer = trained
    model.double()
    called: list[int] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda _: called.append(1))
    step(model, optimizer, torch.float64)
    assert called == [1], "so it is without gpuwatch"


def test_a_swap_after_the_watch_has_ended(swaps):
    model = nn.Linear(4, 2)
    with gpuwatch.watch(model):
        step(model, torch.optim.SGD(model.parameters(), lr=0.01))
    model.double()
    gc.collect()
    model.float()
    assert model.weight.dtype is torch.float32


def test_what_torch_refuses_without_gpuwatch_it_still_refuses(trained):
    _, model, _ = trained
    gone = weakref.ref(model[0].weight, lambda _: None)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.ones(4, 4)))
    del gone
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.ones(4, 4)))
    with pytest.raises(RuntimeError, match="slots"):
        torch.utils.swap_tensors(model[0].weight, torch.ones(4, 4).as_subclass(WithSlots))
    assert torch.utils.swap_tensors.__globals__["weakref"] is weakref


class WithSlots(torch.Tensor):
    __slots__ = ("own",)


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_dtensors_is_converted(watch, alone_in_a_group):
    """`Module.to` swaps these of its own accord. FSDP2 shards parameters so."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    watched = watch()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        step(model, optimizer)
    model.to(torch.float64)
    step(model, optimizer, torch.float64)
    assert model[0].weight.dtype is torch.float64
    assert watched.faults == []
    assert {frame.module for frame in watched.last.frames if frame.phase == "backward"} >= {"0", "1"}
