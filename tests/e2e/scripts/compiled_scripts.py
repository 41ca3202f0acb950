"""Scripts that compile their model, and what must be the same with and without gpuwatch: bits, graphs, recompilations.

    python -m torch.distributed.run --nproc-per-node 1 compiled_scripts.py OUTPUT.json [NAME ...]

runs them one after another in one process, and writes {name: what came of it}. No file of gpuwatch is imported here:
any version of torch since 2.5 runs it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
from torch.utils.checkpoint import checkpoint

SCRIPTS: dict[str, Callable[[], Any]] = {}
WIDTH = 16


def script(run: Callable[[], Any]) -> Callable[[], Any]:
    """A decorator: a script by the name of its function. It yields the tensors whose bits must be the same."""
    SCRIPTS[run.__name__] = run
    return run


class Block(nn.Module):
    def __init__(self, act: nn.Module | None = None, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.act = act if act is not None else nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.up(x))


class Plain(nn.Module):
    """Two blocks and a head."""

    def __init__(self, act: type[nn.Module] = nn.GELU, width: int = WIDTH, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(act(**options), width) for _ in range(2))
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = self.between(block(x))
        return self.head(x)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Broken(Plain):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x


class Checkpointed(Plain):
    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Keys:
    """A cache: it sets attributes of an object before and after a module is called."""

    def __init__(self) -> None:
        self.is_new = True
        self.kept: list[torch.Tensor] = []


class Cached(Plain):
    def forward(self, x: torch.Tensor) -> Any:
        keys = Keys()
        for block in self.blocks:
            x = block(x)
            keys.kept.append(x)
            keys.dtype = x.dtype
            keys.is_new = False
        return {"last": self.head(x.to(keys.dtype)), "kept": tuple(keys.kept)}


class Autocast(Plain):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class Mapped(Plain):
    def forward(self, x: torch.Tensor) -> Any:
        return self.head(torch.func.vmap(self.blocks[0])(x))


def batch_of(number: int, size: int = 4, width: int = WIDTH) -> torch.Tensor:
    torch.manual_seed(number)
    return torch.randn(size, width)


def train(
    model: nn.Module,
    call: Callable[..., Any],
    sizes: tuple[int, ...] = (4, 4, 4),
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    width = next(model.parameters()).shape[-1]
    for number, size in enumerate(sizes):
        output = call(batch_of(number, size, width))
        output = output["last"] if isinstance(output, dict) else output
        loss = output.square().mean()
        with around():
            loss.backward()
        yield loss.detach()
        optimizer.step()
        optimizer.zero_grad()
    yield from (parameter.detach() for parameter in model.parameters())


def whole(model: nn.Module, sizes: tuple[int, ...] = (4, 4, 4), **options: Any) -> Iterator[torch.Tensor]:
    return train(model, torch.compile(model, **{"backend": "aot_eager", **options}), sizes)


@script
def fullgraph() -> Any:
    return whole(Plain(), fullgraph=True)


@script
def forward_alone() -> Any:
    return whole(Plain(), fullgraph=True, backend="eager")


@script
def changed_in_place() -> Any:
    return whole(Plain(nn.ReLU, inplace=True), fullgraph=True)


@script
def dynamic_shapes() -> Any:
    return whole(Plain(), (4, 6, 8), fullgraph=True, dynamic=True)


@script
def changing_batch_size() -> Any:
    return whole(Plain(), (4, 6, 8, 4, 10), fullgraph=True)


@script
def gradients_on_and_off() -> Any:
    model = Plain()
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    for number in range(3):
        yield from train(model, call, (4,))
        with torch.no_grad():
            yield call(batch_of(number))
        with torch.inference_mode():
            yield call(batch_of(number)).clone()
    model.eval()
    yield call(batch_of(9)).detach()


@script
def checkpointing() -> Any:
    return whole(Checkpointed(), fullgraph=True)


@script
def a_cache() -> Any:
    return whole(Cached(), fullgraph=True)


@script
def a_break() -> Any:
    return whole(Broken())


@script
def blocks_one_by_one() -> Any:
    model = Plain()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return train(model, model)


@script
def a_function_around() -> Any:
    model = Plain()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return model(x).square()

    return train(model, loss_of)


@script
def autocast() -> Any:
    return whole(Autocast(), fullgraph=True)


@script
def vmap() -> Any:
    return whole(Mapped(), fullgraph=True)


@script
def frozen_input_gradient() -> Any:
    model = Plain()
    model.blocks[0].requires_grad_(False)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = batch_of(0).requires_grad_()
    call(x).square().mean().backward()
    yield from (x.grad, model.head.weight.grad)


@script
def compiled_step() -> Any:
    model = Plain()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for number in range(3):
        model(batch_of(number)).square().mean().backward()
        step()
        optimizer.zero_grad()
    yield from (parameter.detach() for parameter in model.parameters())


def in_two_buckets() -> nn.Module:
    """DDP has several buckets, and torch.compile makes a graph for each."""
    return nn.parallel.DistributedDataParallel(Plain(width=600), bucket_cap_mb=1)


@script
def ddp() -> Any:
    return whole(in_two_buckets())


@script
def fsdp2() -> Any:
    from torch.distributed._composable.fsdp import fully_shard

    model = Plain()
    for block in model.blocks:
        block.compile(backend="aot_eager")
        fully_shard(block)
    fully_shard(model)
    for tensor in train(model, model):
        yield tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@script
def inductor() -> Any:
    return whole(Plain(), fullgraph=True, backend="inductor")


@script
def inductor_in_place_changing() -> Any:
    return whole(Plain(nn.ReLU, inplace=True), (4, 6, 8), backend="inductor")


@script
def inductor_checkpointing() -> Any:
    return whole(Checkpointed(), fullgraph=True, backend="inductor")


@script
def inductor_ddp() -> Any:
    return whole(in_two_buckets(), backend="inductor")


@script
def a_backward_inside() -> Any:
    """Dynamo breaks there, and looks at all Python that the backward calls."""
    model = Plain()

    @torch.compile(backend="aot_eager")
    def backward_of(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    for number in range(3):
        backward_of(batch_of(number))
        yield from (parameter.grad for parameter in model.parameters())
        model.zero_grad()


@script
def kept_for_the_backward() -> Any:
    """How many bytes each graph keeps, too, but for places of three numbers, as those of gpuwatch, which live on."""
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() > 3:
            kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield from whole(Plain(nn.Tanh), fullgraph=True, backend="inductor")
    yield torch.tensor(kept)


def compiled_autograd() -> AbstractContextManager[Any]:
    """The whole backward is a graph of its own, with the hooks that are in it."""
    from torch._dynamo import compiled_autograd

    enable = getattr(compiled_autograd, "_enable", None) or compiled_autograd.enable
    return enable(torch.compile(backend="aot_eager"))


@script
def the_backward_compiled() -> Any:
    model = Plain()
    call = torch.compile(model, backend="aot_eager")
    with compiled_autograd():
        yield from train(model, call)


@script
def the_backward_alone_compiled() -> Any:
    """The forward has hooks that record, the context is entered after it, and batches have two sizes."""
    model = Plain()
    return train(model, model, (4, 4, 6, 4), compiled_autograd)


@script
def the_backward_compiled_by_its_setting() -> Any:
    torch._dynamo.config.compiled_autograd = True
    try:
        yield from a_backward_inside()
    finally:
        torch._dynamo.config.compiled_autograd = False


def came_of(run: Callable[[], Any]) -> dict[str, Any]:
    """The outcome of a script. An error is its class."""
    torch.compiler.reset()
    counters.clear()
    clear_compilation_metrics()
    torch.manual_seed(0)
    digest = hashlib.sha256()
    error = ""
    try:
        for tensor in run():
            digest.update(tensor.detach().contiguous().numpy().tobytes())
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    compiled = get_compilation_metrics()
    return {
        "error": error,
        "bits": digest.hexdigest()[:16],
        "graphs": counters["stats"]["unique_graphs"],
        "recompilations": sum(not str(each.compile_id).endswith("/0") for each in compiled),
        "breaks": sum(counters["graph_break"].values()),
        "of gpuwatch": sum("gpuwatch/worker/" in (getattr(each, "co_filename", "") or "") for each in compiled),
    }


def main(output: str, *names: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {name: came_of(SCRIPTS[name]) for name in names or SCRIPTS}
    dist.destroy_process_group()
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
