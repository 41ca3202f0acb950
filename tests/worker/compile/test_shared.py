"""Modules of one class that share what torch.compile has made of one of them, as the compiled blocks of a model do."""

from __future__ import annotations

import math
from collections import Counter

import gpuwatch
import pytest
import torch
from gpuwatch.core.events.own_limits import NotLookedInto
from gpuwatch.worker.compile import dynamo
from gpuwatch.worker.compile.region_parts import compiled_views
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

pytestmark = [
    pytest.mark.quick_here(1),
    pytest.mark.skipif(not compiled_views().gradients, reason=compiled_views().missing),
    pytest.mark.filterwarnings(
        "ignore:Using `torch.compile.module.` when there are global hooks",
        "ignore:The .grad attribute of a Tensor",  # torch, where it goes on after a break
        "ignore:Profiler record function",
        "ignore:.*world size",
    ),
]

GRADIENTS = ("forward", "weights", "grads")


@pytest.fixture(autouse=True)
def no_graph_is_left():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture(params=["operator", "in the graph"])
def on_host(request, monkeypatch):
    """The two ways in which a graph reads a tensor."""
    if request.param != "operator":
        monkeypatch.setattr(dynamo, "in_host_memory", lambda device: False)
    return request.param == "operator"


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.act = nn.GELU()
        self.down = nn.Linear(32, 16)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self, factor=None, breaks=False):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mlp = FeedForward()
        self.factor = factor
        self.breaks = breaks

    def forward(self, x):
        h = self.norm(x)
        if self.breaks:
            torch._dynamo.graph_break()
        if self.factor is not None:
            h = h * self.factor
        return x + self.mlp(h)


class Model(nn.Module):
    def __init__(self, order=(0, 1, 2, 3), *, checkpoints=False, factors=False, breaks=False, blocks=4):
        super().__init__()
        self.enter = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block(1.0 + i if factors else None, breaks) for i in range(blocks))
        self.head = nn.Linear(16, 1)
        self.order = order
        self.checkpoints = checkpoints

    def forward(self, x):
        x = self.enter(x)
        for i in self.order:
            block = self.blocks[i]
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x)


class ByName(Model):
    """Compiled by `torch.compile(block)`, which puts a wrapper in each block's place."""


class Frozen(Model):
    """Of every block only a part is trained, as with adapters."""

    def __init__(self):
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("up" in name)


def made(kind):
    options = {
        "in another order": {"order": (3, 1, 0, 2)},
        "checkpoints": {"checkpoints": True},
        "a graph each": {"factors": True},
        "breaks": {"breaks": True},
    }
    cls = {"a part is trained": Frozen, "by name": ByName}.get(kind, Model)
    torch.manual_seed(0)
    return cls(**options.get(kind, {}))


def compile_blocks(model, backend="aot_eager"):
    for i, block in enumerate(model.blocks):
        if isinstance(model, ByName):
            model.blocks[i] = torch.compile(block, backend=backend)
        else:
            block.compile(backend=backend)


def train(model, *, top=None, batches=3, sizes=(4, 4, 4), spoil=None):
    losses = []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for batch in range(batches):
        torch.manual_seed(batch)
        if spoil is not None and batch == batches - 1:
            spoil(model)
        loss = (model if top is None else top)(torch.randn(sizes[batch], 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def told(watched):
    """Of each page: its forward in order, its gradients, and the numbers of both, rounded."""
    watched.hooks.settle()
    assert watched.faults == []
    found = []
    for page in watched.pages:
        frames = [frame for frame in page.frames if frame.phase in ("forward", "recompute", "backward")]
        forward = [(f.phase, f.module, f.cls, f.depth) for f in frames if f.phase != "backward"]
        numbers = Counter(
            (f.phase, f.module, row.role, *(float(f"{value:.3g}") for value in (row.abs_min, row.abs_max)))
            for f in frames
            for row in f.rows
            if row.abs_max is not None
        )
        found.append((forward, numbers))
    return found


KINDS = ["method", "by name", "in another order", "checkpoints", "a graph each", "breaks", "a part is trained"]


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", [*KINDS, "shapes", "DDP", "FSDP2"])
def test_all_is_told_that_is_told_without_the_compiler(watch, alone_in_a_group, on_host, kind):
    def run(compiled):
        model = made(kind)
        if compiled:
            compile_blocks(model)
        watched = watch(watch=GRADIENTS)
        top = model
        if kind == "DDP":
            top = nn.parallel.DistributedDataParallel(model)
        elif kind == "FSDP2":
            mesh = init_device_mesh("cpu", (1,))
            for part in (*model.blocks, model):
                fully_shard(part, mesh=mesh)
        losses = train(model, top=top, sizes=(4, 5, 6) if kind == "shapes" else (4, 4, 4))
        pages = told(watched)
        untold = watched.of(NotLookedInto)
        watched.close()
        return losses, pages, untold

    losses, pages, _ = run(compiled=False)
    losses_compiled, pages_compiled, untold = run(compiled=True)
    assert losses_compiled == pytest.approx(losses)
    assert untold == []
    assert [forward for forward, _ in pages_compiled] == [forward for forward, _ in pages]
    for (_, numbers), (_, numbers_compiled) in zip(pages, pages_compiled, strict=True):
        # what runs again in eager code stops at the last tensor that the backward needs
        names, names_compiled = (
            Counter(key[:3] for key in each.elements() if key[0] != "recompute") for each in (numbers, numbers_compiled)
        )
        assert names_compiled == names
        assert (numbers - numbers_compiled).total() < 0.05 * numbers.total()  # some are rounded the other way


@pytest.mark.quick(1)
def test_each_module_has_its_own_faults(watch, on_host):
    def spoil(model):
        with torch.no_grad():
            model.blocks[2].mlp.down.bias[3] = math.nan

    watched = watch(watch=GRADIENTS)
    model = made("method")
    compile_blocks(model)
    train(model, spoil=spoil)
    watched.hooks.settle()
    first = watched.anomalies[0]
    assert (first.where.batch, first.module, first.role) == (2, "blocks.2.mlp.down", "bias")


@pytest.mark.slow
def test_there_are_as_many_graphs_as_without_gpuwatch(watch):
    """Ten blocks: had each a graph of its own, that would be more than dynamo makes of one function."""

    def graphs():
        torch.compiler.reset()
        counters.clear()
        model = Model(order=range(10), blocks=10)
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        train(model)
        return counters["stats"]["unique_graphs"]

    alone = graphs()
    watched = watch(watch=GRADIENTS)
    assert (graphs(), alone) == (1, 1)
    watched.hooks.settle()
    assert (watched.faults, watched.of(NotLookedInto)) == ([], [])


@pytest.mark.slow
@pytest.mark.quick(1)
def test_what_two_models_share_is_told_of_each(watch, on_host):
    """A student and its teacher."""
    watched = watch()
    student, teacher = Model(), Model()
    graphs = [torch.compile(model, backend="aot_eager") for model in (student, teacher)]
    with torch.no_grad():
        teacher.head.bias[0] = math.inf
        for graph in graphs:
            graph(torch.ones(4, 16))
    watched.hooks.settle()
    assert [page.root for page in watched.pages] == ["Model", "Model#2"]
    assert len({tuple((f.module, f.depth) for f in page.frames) for page in watched.pages}) == 1
    assert [(a.where.root, a.module, a.role) for a in watched.anomalies][:1] == [("Model#2", "head", "bias")]
    assert watched.of(NotLookedInto) == []


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.sample(1)
@pytest.mark.parametrize("whole", [True, False], ids=["the model", "its blocks"])
def test_a_graph_that_runs_twice_before_its_backward_trains(watch, on_host, whole):
    """Autograd refuses the first run's backward if that of the second has changed a tensor that both have kept."""

    def losses():
        torch.compiler.reset()
        model = made("method")
        if not whole:
            compile_blocks(model)
        graph = torch.compile(model, backend="aot_eager") if whole else model
        found = []
        for batch in range(2):
            loss = (graph(torch.ones(4, 16) + batch) - graph(torch.zeros(4, 16))).square().mean()
            loss.backward()
            found.append(loss.item())
        return found

    alone = losses()
    watched = watch(watch=GRADIENTS)
    assert losses() == alone
    watched.hooks.settle()
    assert watched.faults == []
    assert watched.of(NotLookedInto)  # the gradients of the first run


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.sample(1)
@pytest.mark.parametrize("removed", [True, False], ids=["after gpuwatch is removed", "in batches left out"])
def test_blocks_train_where_nothing_is_recorded(watch, on_host, removed):
    """No hook sees then that their graph runs for one after the other."""

    def losses(before_second=lambda: None):
        torch.compiler.reset()
        model = made("method")
        compile_blocks(model)
        first = train(model)
        before_second()
        return first + train(model)

    alone = losses()
    watched = watch(watch=GRADIENTS, every=1 if removed else 3)
    assert losses(watched.hooks.detach if removed else lambda: None) == alone
    assert watched.faults == []


@pytest.mark.quick(1)
@pytest.mark.parametrize("gradients", [True, False])
def test_a_compiled_function_that_runs_twice_before_its_backward_trains(watch, on_host, gradients):
    """No hook sees when it runs: its gradients are not recorded, nor is a first run. That is told."""
    watched = watch(watch=GRADIENTS if gradients else ("forward",))
    model = Block()
    function = torch.compile(lambda x: model(x) * 2, backend="aot_eager")
    loss = function(torch.ones(4, 16)).square().mean()
    watched.hooks.settle()
    assert len(watched.of(NotLookedInto)) == gradients
    loss.backward()
    (function(torch.ones(4, 16)) - function(torch.zeros(4, 16))).square().mean().backward()
    watched.hooks.settle()
    assert watched.faults == []
    assert len(watched.of(NotLookedInto)) == 1
    assert [page.root for page in watched.pages] == ["Block"] * 2
    assert ("mlp.down", "output") in watched.rows("forward", page=0)


@pytest.mark.slow
def test_gradients_of_a_module_that_runs_twice_are_told_as_not_all_seen(watch, on_host):
    watched = watch(watch=GRADIENTS)
    model = Model(order=(0, 1, 1, 2))
    compile_blocks(model)
    train(model)
    watched.hooks.settle()
    assert watched.faults == []
    assert [module for _, module, _, _ in told(watched)[0][0]].count("blocks.1.norm") == 2
    assert [event.module for event in watched.of(NotLookedInto)] == ["blocks.1"]
    inside = {module for module, role in watched.rows("backward", page=0) if role == "grad output"}
    assert ("blocks.0.mlp.up" in inside, "blocks.1.mlp.up" in inside) == (True, False)


@pytest.mark.slow
@pytest.mark.quick(1)
def test_gradients_in_blocks_without_any_of_their_own_are_told_as_not_seen(watch, on_host):
    """Only a gradient of a parameter tells whose the gradients in a graph are."""
    watched = watch(watch=GRADIENTS)
    model = Model()
    for i in (1, 3):
        model.blocks[i].requires_grad_(False)
    compile_blocks(model)
    train(model)
    watched.hooks.settle()
    assert watched.faults == []
    assert [event.module for event in watched.of(NotLookedInto)] == ["blocks.1", "blocks.3"]
    assert {f.module for f in watched.frames("backward")} >= {"blocks.0.mlp.up", "blocks.2.mlp.up", "blocks.3"}


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.sample(1)
@pytest.mark.parametrize("whole", [True, False], ids=["the model", "its blocks"])
def test_what_has_no_gradient_is_not_told_as_not_seen(watch, on_host, whole):
    """The loss uses nothing of what the first modules have made."""

    class Unused(Model):
        def forward(self, x):
            self.kept = self.blocks[0](self.enter(x))
            return self.head(self.blocks[2](self.blocks[1](x)))

    watched = watch(watch=GRADIENTS)
    model = Unused()
    if not whole:
        compile_blocks(model)
    train(model, top=torch.compile(model, backend="aot_eager") if whole else model)
    watched.hooks.settle()
    assert (watched.faults, watched.of(NotLookedInto)) == ([], [])
    seen = [{m for m, role in watched.rows("backward", page=i) if role == "grad output"} for i in range(3)]
    assert [{"blocks.1.mlp.up", "blocks.2.mlp.up"} <= modules for modules in seen] == [True] * 3


class Root(nn.Module):
    """Its gradient is nan where `zero` is one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("zero", torch.tensor(0.0))

    def forward(self, x):
        return ((x * x + 1) * (1 - self.zero)).sqrt()


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.sample(1)
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen blocks", "a graph that runs twice"])
def test_what_made_a_gradient_where_none_was_seen_is_not_made_up(on_host, frozen):
    """The block is named, and nothing inside of it."""
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        block.mlp.act = Root()
    if frozen:
        for i in (1, 3):
            model.blocks[i].requires_grad_(False)
    compile_blocks(model)
    handle = gpuwatch.watch(model, on_overflow="continue", watch=GRADIENTS)
    try:
        for batch in range(3):
            model.blocks[1].mlp.act.zero = torch.tensor(float(batch == 2))
            loss = model(torch.randn(4, 16))
            if not frozen:
                model.blocks[1].mlp.act.zero = torch.tensor(0.0)
                loss = loss - model(torch.randn(4, 16))
            loss.square().mean().backward()
        verdict = handle.verdict()
    finally:
        handle.remove()
    assert (verdict.kind, verdict.phase, verdict.certainty) == ("overflow", "backward", "supported"), verdict.statement
    assert verdict.module == "blocks.1", verdict.statement
    assert any("blocks.1" in line and "not inspected" in line for line in verdict.evidence), verdict.evidence


def test_a_model_that_is_not_watched_and_shares_a_graph_with_one_that_is():
    """Its graph is compiled first, without our reads."""
    model, other = Model(), Model()
    handle = gpuwatch.watch(model, on_overflow="continue")
    try:
        for each in (other, model):
            compile_blocks(each)
            each(torch.ones(4, 16))
        assert {page.root for page in handle.pages()} == {"Model"}
        assert handle.verdict().statement.startswith("No overflow seen, but it is not proven")
    finally:
        handle.remove()
