"""What graphs of torch.compile let us see, and that they stay what they are without us."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from gpuwatch.core.events.alarms import IgnoredAlarm
from gpuwatch.core.events.own_limits import NotLookedInto
from gpuwatch.core.recorder.layout import HeadField
from gpuwatch.worker.compile import dynamo
from gpuwatch.worker.compile.region_parts import compiled_views
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.convert_frame import input_codes
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import checkpoint

pytestmark = [
    pytest.mark.quick_here(2),
    pytest.mark.skipif(not compiled_views().gradients, reason=compiled_views().missing),
    pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # torch, where it goes on after a break
]

GRADIENTS = ("forward", "weights", "grads")


@pytest.fixture(autouse=True)
def no_graph_is_left():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)
        self.act = nn.GELU()

    def forward(self, x):
        return self.act(self.up(x))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(16, 16)

    def forward(self, x):
        return self.head(self.inner(x))

    def inner(self, x):
        return self.block(x)


class Checkpointed(Plain):
    def inner(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


class Mapped(Plain):
    def inner(self, x):
        return torch.func.vmap(self.block)(x)


class Differentiated(Plain):
    def inner(self, x):
        return torch.func.grad(lambda y: self.block(y).sum())(x)


class Conditional(Plain):
    def inner(self, x):
        return torch.cond(x.sum() > 0, lambda y: self.block(y), lambda y: self.block(y) * 2, (x,))


class Autocast(Plain):
    def inner(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.block(x).float()


class Residual(Plain):
    def inner(self, x):
        return x + self.block(x) * self.block(x + 1)


class Notes:
    def __init__(self):
        self.is_new = True


class Noting(Plain):
    """As a cache of keys and values: it sets attributes of an object, before and after a module was called."""

    def inner(self, x):
        notes = Notes()
        x = self.block(x)
        if notes.is_new:
            notes.dtype = x.dtype
        return x.to(notes.dtype)


def train(cls, *, batches=3, spoil=None, **how):
    torch.manual_seed(0)
    model = cls()
    compiled_model = torch.compile(model, fullgraph=True, **(how or {"backend": "aot_eager"}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in range(batches):
        torch.manual_seed(batch)
        x = torch.randn(4, 16)
        if spoil is not None:
            spoil(batch, model, x)
        loss = compiled_model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.quick(2)
@pytest.mark.sample(4)
@pytest.mark.parametrize("on_host", [True, False], ids=["operator", "in the graph"])
@pytest.mark.parametrize("cls", [Plain, Checkpointed, Mapped, Differentiated, Conditional, Autocast, Residual, Noting])
def test_every_kind_of_body_compiles_and_trains_as_it_does_without_us(watch, monkeypatch, cls, on_host):
    losses, weights = train(cls)
    torch.compiler.reset()
    counters.clear()
    if not on_host:
        monkeypatch.setattr(dynamo, "in_host_memory", lambda device: False)
    watched = watch(on_overflow="continue", watch=GRADIENTS)
    ours, our_weights = train(cls)

    assert ours == losses
    assert all(torch.equal(one, other) for one, other in zip(our_weights, weights, strict=True))
    assert counters["stats"]["unique_graphs"] == 1
    assert watched.faults == []
    pages = [page for page in watched.pages if page.root == cls.__name__]
    assert [page.batch for page in pages] == [0, 1, 2]
    forward = {frame.module for frame in pages[-1].frames if frame.phase == "forward"}
    assert "head" in forward
    assert ("block.up" in forward) == (cls not in (Mapped, Differentiated, Conditional))


def rows(page):
    return {
        (frame.module, row.role): (row.dtype, row.shape, row.nan, row.posinf, row.neginf, row.abs_min, row.abs_max)
        for frame in page.frames
        for row in frame.rows
        if row.kind == "measured" and frame.module and not row.role.startswith("before ")  # eager's alone
    }


class ChangedInPlace(Plain):
    """What the layer returns is largest where it is negative: nothing is left of that."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential()
        self.block.up = nn.Linear(16, 16)
        self.block.act = nn.ReLU(inplace=True)
        with torch.no_grad():
            self.block.up.bias.fill_(-2)


@pytest.mark.quick(2)
@pytest.mark.sample(4)
@pytest.mark.parametrize("on_host", [True, False], ids=["operator", "in the graph"])
@pytest.mark.parametrize("value", [None, math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize("cls", [Plain, ChangedInPlace])
def test_a_graph_shows_the_same_numbers_as_eager_does(watch, monkeypatch, cls, value, on_host):
    if not on_host:
        monkeypatch.setattr(dynamo, "in_host_memory", lambda device: False)

    def spoil(batch, model, x):
        if value is not None and batch == 2:
            with torch.no_grad():
                model.block.up.bias[3] = value

    eager = watch(on_overflow="continue", watch=GRADIENTS)
    torch.compiler.set_stance("force_eager")
    train(cls, spoil=spoil)
    torch.compiler.set_stance("default")
    eager.hooks.detach()
    graph = watch(on_overflow="continue", watch=GRADIENTS)
    train(cls, spoil=spoil)

    expected, found = rows(eager.last), rows(graph.last)
    assert found.keys() - expected.keys() <= {("block", "grad output")}  # of what was changed in place
    unlike = {key for key in expected if not same(found[key], expected[key], on_host)}
    assert {key: (found[key], expected[key]) for key in unlike} == {}
    assert [(a.where.batch, a.module, a.role, a.value) for a in graph.anomalies][:1] == [
        (a.where.batch, a.module, a.role, a.value) for a in eager.anomalies
    ][:1]


def same(one, other, on_host):
    """In the graph, a nan hides what else there is, and the shape is not known."""
    if not on_host and other[2]:
        return one[0] == other[0] and one[2]
    known = one[:5] == other[:5] if on_host else one[0] == other[0] and one[2:5] == other[2:5]
    return known and all(
        a is b is None or a == b or (a != a and b != b) or math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-5)
        for a, b in zip(one[5:], other[5:], strict=True)
    )


@pytest.mark.quick(1)
@pytest.mark.parametrize("on_host", [True, False], ids=["operator", "in the graph"])
def test_a_batch_that_is_left_out_leaves_nothing_to_the_next(watch, monkeypatch, on_host):
    """Its gradients, too, are written by the graph. That of its first parameter is read in every batch."""
    if not on_host:
        monkeypatch.setattr(dynamo, "in_host_memory", lambda device: False)

    watched = watch(on_overflow="continue", watch=GRADIENTS, every=2)
    torch.manual_seed(0)
    model = Plain()
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    for batch in range(5):
        loss = graph(torch.full((4, 16), 0.5 + batch)).sum()
        (loss * (math.inf if batch == 3 else 1)).backward()  # nothing in its forward is bad
        model.zero_grad()

    assert [page.batch for page in watched.pages if page.frames] == [0, 2, 3, 4]
    rows = [row for page in watched.pages for frame in page.frames for row in frame.rows]
    assert len([row for row in rows if row.role == "grad output"]) == 9
    first, _ = next(model.named_parameters())
    bad = [
        (page.batch, frame.module, row.role)
        for page in watched.pages
        for frame in page.frames
        for row in frame.rows
        if row.flags
    ]
    assert bad == [(3, first.rpartition(".")[0], "grad weight")]


@pytest.mark.slow
def test_no_more_is_kept_for_the_backward_than_without_us(watch):
    """AOTAutograd keeps what stands behind a look at what it is made of, and would compute it again else."""

    class Tanh(nn.Module):
        def forward(self, x):
            return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x**3)))

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(64, 64), Tanh())))

        def forward(self, x):
            return self.layers(x)

    def kept():
        sizes = []

        def forward(graph, inputs):
            (output,) = (node for node in graph.graph.nodes if node.op == "output")
            made = [node for node in output.args[0] if isinstance(node, torch.fx.Node) and node.op != "placeholder"]
            sizes.append(sum(node.meta["val"].numel() for node in made))
            return make_boxed_func(graph.forward)

        backend = aot_autograd(
            fw_compiler=forward,
            bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
            partition_fn=min_cut_rematerialization_partition,
        )
        torch.compile(Deep(), fullgraph=True, backend=backend)(torch.randn(32, 64)).sum().backward()
        torch.compiler.reset()
        return sizes[0]

    without = kept()
    watched = watch(on_overflow="continue", watch=GRADIENTS)
    assert kept() <= without * 1.02
    assert watched.faults == []


def test_the_end_of_a_graph_that_was_never_reached_is_not_measured(watch):
    """An earlier run's numbers are not shown as this one's."""

    @torch.library.custom_op("gpuwatch_test::refuse", mutates_args=())
    def refuse(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 1e6:
            raise ValueError("refused")
        return x.clone()

    refuse.register_fake(lambda x: torch.empty_like(x))

    class Net(Plain):
        def inner(self, x):
            return refuse(self.block(x))

    watched = watch(on_overflow="continue")
    model = Net()
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        graph(torch.ones(4, 16))
        with pytest.raises(ValueError, match="refused"):
            graph(torch.full((4, 16), 1e9))

    kinds = {frame.module: {row.role: row.kind for row in frame.rows} for frame in watched.last.frames}
    assert kinds["block"]["output"] == "measured"
    assert kinds["head"]["output"] == "not_measurable"


# -- the operator ---------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    dtype=st.sampled_from(DTYPES),
    spoilt=st.sampled_from([None, math.inf, -math.inf, math.nan]),
    turned=st.booleans(),
    gapped=st.booleans(),
)
def test_the_compiled_look_sees_what_the_other_one_does(shape, dtype, spoilt, turned, gapped):
    tensor = (torch.randn(shape) * 3).to(dtype)
    if spoilt is not None and dtype.is_floating_point and tensor.numel():
        tensor.view(-1)[-1] = spoilt
    if turned:
        tensor = tensor.transpose(0, -1) if tensor.dim() else tensor
    if gapped and tensor.dim():
        tensor = tensor[..., ::2]
    place = dynamo.new_place()
    try:
        torch.ops.gpuwatch.look(tensor, torch.zeros(1), place)
        found = dynamo.SEEN[place]
        dynamo._look(tensor, torch.zeros(1), place)
        assert found == dynamo.SEEN[place]
        assert type(found) is dynamo.TensorReading
        assert found.shape == tuple(tensor.shape)
    finally:
        dynamo.SEEN[place] = None


def test_a_look_never_raises():
    token = torch.zeros(1)
    place = dynamo.new_place()
    torch.ops.gpuwatch.look(torch.ones(3)[None].expand(4, 3), token, place)
    assert dynamo.SEEN[place].shape == (4, 3)
    torch.ops.gpuwatch.look(torch.ones(3), token, 1 << 40)  # a place that nobody made
    torch.ops.gpuwatch.look(torch.ones(3), token, -1)


@pytest.mark.parametrize("on_host", [True, False], ids=["operator", "in the graph"])
def test_a_row_that_a_rule_covers_is_counted_in_a_graph_too(watch, monkeypatch, on_host):
    if not on_host:
        monkeypatch.setattr(dynamo, "in_host_memory", lambda device: False)

    def spoil(batch, model, x):
        if batch == 2:
            with torch.no_grad():
                model.block.up.bias[3] = math.inf

    watched = watch(on_overflow="abort", watch=("forward", "weights"), ignore=["*"])
    train(Plain, spoil=spoil)
    assert watched.anomalies == []
    assert watched.reader[HeadField.IGNORED] > 0
    assert ("block.up", "output") in {(event.module, event.role) for event in watched.of(IgnoredAlarm)}


def test_a_weight_that_something_else_has_changed_is_read_again(watch):
    watched = watch(on_overflow="continue", watch=GRADIENTS)
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = torch.compile(model, backend="aot_eager")
    for batch in range(3):
        if batch == 2:
            model.block.up.weight.data[0, 0] = math.inf
        step(torch.ones(2, 16)).sum().backward()
        if batch < 2:
            optimizer.step()
            optimizer.zero_grad()
    watched.hooks.settle()
    anomaly = watched.anomalies[0]
    assert (anomaly.module, anomaly.role, anomaly.value) == ("block.up", "weight", "+inf")


class Scaled(Plain):
    """Dynamo compiles it again when its attribute changes."""

    factor = 1

    def forward(self, x):
        return super().forward(x) * self.factor


def test_a_function_that_is_compiled_again_is_told_as_not_looked_into(watch):
    """Whose graph it is then is not known."""
    watched = watch()
    model = Scaled()
    graph = torch.compile(lambda x: model(x), backend="eager")
    for batch in range(4):
        model.factor = 1 + batch // 2
        graph(torch.ones(4, 16)).sum().backward()
    watched.hooks.settle()
    (told,) = watched.of(NotLookedInto)
    assert (told.module, told.cls, told.around) == ("", "Scaled", False)
    assert watched.faults == []


HAS_LITE = hasattr(inductor_config, "selective_decompose")


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`")  # inductor, at its first import
@pytest.mark.skipif(not HAS_LITE, reason="this torch has no mode 'lite'")
@pytest.mark.parametrize("on_host", [True, False], ids=["operator", "in the graph"])
def test_a_graph_of_mode_lite_is_told_as_not_looked_into_and_trains_as_without_us(watch, monkeypatch, on_host):
    """It ended the run at gpuwatch's operation, and its backward dropped what is written to a place."""
    losses, weights = train(Plain, mode="lite")
    torch.compiler.reset()
    if not on_host:
        monkeypatch.setattr(dynamo, "in_host_memory", lambda device: False)
    watched = watch(on_overflow="continue", watch=GRADIENTS)
    ours, our_weights = train(Plain, mode="lite")
    assert ours == losses
    assert all(torch.equal(one, other) for one, other in zip(our_weights, weights, strict=True))
    (told,) = watched.of(NotLookedInto)
    assert (told.module, told.cls) == ("", "Plain")
    assert watched.faults == []


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("on_host", [True, False], ids=["operator", "in the graph"])
def test_a_module_that_is_compiled_again_has_both_graphs_looked_into(watch, monkeypatch, on_host):
    if not on_host:
        monkeypatch.setattr(dynamo, "in_host_memory", lambda device: False)
    watched = watch(on_overflow="continue", watch=GRADIENTS)
    model = Scaled()
    graph = torch.compile(model, backend="aot_eager")
    for batch, factor in enumerate((1, 2, 1, 2)):
        model.factor = factor
        model.zero_grad()
        with torch.no_grad():
            model.block.up.bias[3] = 1.0 if batch < 3 else math.nan
        graph(torch.full((4, 16), float(batch))).sum().backward()
    watched.hooks.settle()
    assert counters["stats"]["unique_graphs"] == 2
    assert (watched.of(NotLookedInto), watched.faults) == ([], [])
    names = [[(f.phase, f.module) for f in page.frames] for page in watched.pages if page.frames]
    assert len(names) == 4
    assert names[0] == names[1] == names[2] == names[3]
    inputs = [next(f.rows[-2].abs_max for f in page.frames if f.module == "block.up") for page in watched.pages]
    assert inputs == [0.0, 1.0, 2.0, 3.0]
    assert [(a.where.batch, a.module, a.role) for a in watched.anomalies][:1] == [(3, "block.up", "bias")]


class Weighing(nn.Module):
    """Returns what it made before its last layer was called, too, as attention does with its weights."""

    def __init__(self):
        super().__init__()
        self.value, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, mask):
        weights = (self.value(x) + mask).softmax(-1)
        return self.out(weights * x), weights


class Weighed(nn.Module):
    """Its second layer is handed the mask by a keyword, as the first one is."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Weighing() for _ in range(3))

    def forward(self, x):
        mask = (x > 0).float()
        for layer in self.layers[:2]:
            x, _ = layer(x, mask=mask)
        return {"hidden": x}


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = Weighed(), nn.Linear(16, 16)

    def forward(self, x):
        return self.head(self.inner(x)["hidden"])


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("on_host", [True, False], ids=["operator", "in the graph"])
def test_a_graph_shows_gradients_in_the_order_in_which_they_are_made(watch, monkeypatch, on_host):
    """A module hands on what it made long before it returned: its gradient comes after that of what came later."""
    if not on_host:
        monkeypatch.setattr(dynamo, "in_host_memory", lambda device: False)
    watched = watch(watch=GRADIENTS)
    model = Outer()
    torch.compile(model, backend="aot_eager")(torch.randn(4, 16)).sum().backward()
    watched.hooks.settle()
    order = [
        (f.module, r.role) for f in watched.last.frames if f.phase == "backward" for r in f.rows if "output" in r.role
    ]
    assert order == [
        ("head", "grad output"),
        ("inner.layers.1.out", "grad output"),
        ("inner.layers.1", "grad output[1]"),
        ("inner.layers.1.value", "grad output"),
        ("inner.layers.0.out", "grad output"),
        ("inner.layers.0", "grad output[1]"),
        ("inner.layers.0.value", "grad output"),
    ]
    assert watched.faults == []


class Inner(Plain):
    def forward(self, x):
        return super().forward(x).relu()


class HeadBehind(nn.Module):
    """Its head is in no graph that is inspected. Its backward comes before that of the graph."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = Inner(), nn.Linear(16, 16)

    def forward(self, x):
        x = self.inner(x)
        torch._dynamo.graph_break()
        return self.last(x)


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("on_host", [True, False], ids=["operator", "in the graph"])
def test_what_a_graph_has_not_made_yet_is_not_taken_for_what_it_made_before(watch, monkeypatch, on_host):
    if not on_host:
        monkeypatch.setattr(dynamo, "in_host_memory", lambda device: False)
    found = []
    for stance in ("force_eager", "default"):
        torch.manual_seed(0)
        torch.compiler.set_stance(stance)
        watched = watch(on_overflow="continue", watch=GRADIENTS)
        model = HeadBehind()
        graph = torch.compile(model, backend="aot_eager")
        for batch in range(3):
            loss = graph(torch.full((4, 16), 0.5 + batch)).sum() * (1 + batch)
            loss.backward()
            model.zero_grad()
        watched.hooks.settle()
        assert watched.faults == []
        found.append(
            [
                (page.batch, f.module, row.role, row.abs_max)
                for page in watched.pages
                for f in page.frames
                if f.phase == "backward" and f.module.startswith("inner.")
                for row in f.rows
            ]
        )
        watched.hooks.detach()
    eager, compiled = {(batch, *name): most for batch, *name, most in found[0]}, found[1]
    assert len(compiled) == len({tuple(name) for *name, _ in compiled}) == 3 * 7
    assert {tuple(name): most for *name, most in compiled} == {
        tuple(name): pytest.approx(eager[tuple(name)], rel=1e-4) for *name, _ in compiled
    }
    first = next(at for at, each in enumerate(compiled) if each[2] == "grad weight")
    assert ("inner.head", "grad output") in [each[1:3] for each in compiled[:first]]


class InParts(Plain):
    """Two graphs, with a call between them that is in none."""

    def __init__(self):
        super().__init__()
        self.middle = nn.Linear(16, 16)

    @torch._dynamo.disable
    def apart(self, x):
        return self.middle(x)

    def inner(self, x):
        return self.apart(self.block(x))


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("on_host", [True, False], ids=["operator", "in the graph"])
def test_the_graphs_of_one_forward_and_what_is_called_between_them_are_in_order(watch, monkeypatch, on_host):
    if not on_host:
        monkeypatch.setattr(dynamo, "in_host_memory", lambda device: False)
    watched = watch(on_overflow="continue", watch=GRADIENTS)
    model = InParts()
    graph = torch.compile(model, backend="aot_eager")
    for batch in range(3):
        with torch.no_grad():
            model.block.up.bias[3] = 1.0 if batch < 2 else math.nan
        graph(torch.full((4, 16), 0.5 + batch)).sum().backward()
    watched.hooks.settle()
    assert (watched.of(NotLookedInto), watched.faults) == ([], [])
    for page in watched.pages:
        frames = [f for f in page.frames if f.phase == "forward"]
        assert [(f.module, f.depth) for f in frames] == [
            ("block.up", 2),
            ("block.act", 2),
            ("block", 1),
            ("middle", 1),
            ("head", 1),
            ("", 0),
        ]
        values = {(f.module, row.role): row.value for f in frames for row in f.rows}
        assert values["head", "output"] == values["", "output"]
    assert [(a.where.batch, a.module, a.role) for a in watched.anomalies][:1] == [(2, "block.up", "bias")]


class Wide(nn.Module):
    """Two megabytes of weights in each block: DDP has a bucket, and torch.compile a graph, for each."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(720, 720) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore")  # what DDP says of a world of one
@pytest.mark.parametrize("on_host", [True, False], ids=["operator", "in the graph"])
def test_the_several_graphs_that_ddp_makes_of_one_train_and_are_looked_into(
    watch, monkeypatch, alone_in_a_group, on_host
):
    if not on_host:
        monkeypatch.setattr(dynamo, "in_host_memory", lambda device: False)
    watched = watch(on_overflow="continue", watch=GRADIENTS)
    torch.manual_seed(0)
    model = Wide()
    graph = torch.compile(nn.parallel.DistributedDataParallel(model, bucket_cap_mb=2), backend="aot_eager")
    for batch in range(3):
        with torch.no_grad():
            model.blocks[1].weight[0, 0] = math.nan if batch == 2 else 0.0
        graph(torch.full((2, 720), 0.1 + batch)).sum().backward()
    watched.hooks.settle()
    assert (watched.of(NotLookedInto), watched.faults) == ([], [])
    expected = ["blocks.0", "blocks.1", "blocks.2", ""]
    assert [[f.module for f in page.frames if f.phase == "forward"] for page in watched.pages] == [expected] * 3
    outputs = [r.abs_max for page in watched.pages for f in page.frames for r in f.rows if r.role == "grad output"]
    assert len(outputs) == 3 * 4
    assert (watched.anomalies[0].where.batch, watched.anomalies[0].module, watched.anomalies[0].role) == (
        2,
        "blocks.1",
        "weight",
    )


@pytest.mark.slow
def test_no_graph_is_made_of_our_hooks(watch):
    """Where a call breaks, dynamo compiles each function that it calls, one by one."""
    watched = watch(watch=GRADIENTS)
    model = Broken()
    compiled_model = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        compiled_model(torch.ones(4, 16)).sum().backward()
    watched.hooks.settle()
    hooks = [watched.hooks._calls.before, watched.hooks._calls.after, watched.hooks._steps.before]
    assert [torch._C._dynamo.eval_frame._debug_get_cache_entry_list(hook.__code__) for hook in hooks] == [[], [], []]
    compiled = {code.co_name for code in (reference() for reference in input_codes.seen) if code is not None}
    assert compiled & {"before", "after", "traced_before"} == set()
    assert watched.faults == []


class Layers(nn.Module):
    """Dynamo knows nothing in it under two names."""

    def __init__(self):
        super().__init__()
        self.block = Product()
        self.head = Product()

    def forward(self, x):
        return self.head(self.block(x))


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((16, 16), 0.1))

    def forward(self, x):
        return x @ self.weight


@pytest.mark.quick(1)
@pytest.mark.parametrize("on_host", [True, False], ids=["operator", "in the graph"])
def test_no_guard_in_python_is_ours(watch, monkeypatch, on_host):
    """Dynamo drops what a signal's handler raises in such a guard, which its own code calls after all others."""
    pairs = []
    of_two_names = GuardBuilder.DUPLICATE_INPUT

    def noted(builder, guard, source_b):
        pairs.append((guard.name, source_b))
        of_two_names(builder, guard, source_b)

    monkeypatch.setattr(GuardBuilder, "DUPLICATE_INPUT", noted)
    train(Layers)
    assert pairs == []
    torch.compiler.reset()
    if not on_host:
        monkeypatch.setattr(dynamo, "in_host_memory", lambda device: False)
    watched = watch(on_overflow="continue", watch=GRADIENTS)
    train(Layers)
    assert pairs == []
    assert watched.faults == []


def test_a_backward_outside_of_compiled_autograds_setting_runs_on(watch):
    """The setting holds within the compiled forward, where a hook of a gradient would be handed to it."""
    with torch._dynamo.config.patch(compiled_autograd=True):
        plain = train(Layers)
        torch.compiler.reset()
        watched = watch(on_overflow="continue", watch=GRADIENTS)
        assert train(Layers)[0] == plain[0]
    assert watched.faults == []
    assert watched.of(NotLookedInto)  # its gradients


@pytest.mark.slow
def test_a_graph_reads_a_tensor_once_whoever_is_handed_it(watch):
    """Even where dynamo has no way from the arguments to the module: in a slice of a ModuleList."""
    watched = watch(watch=GRADIENTS)
    model = Outer()
    torch.compile(model, backend="aot_eager")(torch.randn(4, 16)).sum().backward()
    watched.hooks.settle()
    calls = {f.module: f for f in watched.last.frames if f.phase == "forward"}

    def value(module, role):
        return next(row.value for row in calls[module].rows if row.role == role)

    assert value("inner.layers.0", "kwargs.mask") == value("inner.layers.1", "kwargs.mask")
    assert (
        value("inner.layers.0", "input[0]") == value("inner", "input[0]") == value("inner.layers.0.value", "input[0]")
    )
    assert value("inner", "output.hidden") == value("head", "input[0]") == value("inner.layers.1", "output[0]")


class Broken(Plain):
    """Dynamo gives up the frames of its call, of what is around `forward`, and of that, and looks at each again."""

    def forward(self, x):
        return self.loss_of(super().forward(x))

    def loss_of(self, x):
        torch._dynamo.graph_break()
        return x * 2


def passes_on(call):
    """As a decorator of a library: the frame of what it wraps is not that of the module's call."""

    def wrapper(module, x):
        return call(module, x)

    return wrapper


def passes_all_on(call):
    @functools.wraps(call)
    def wrapper(*args, **kwargs):
        return call(*args, **kwargs)

    return wrapper


class PassesOn:
    """A decorator that is an object."""

    def __init__(self, call):
        functools.update_wrapper(self, call)
        self.call = call

    def __call__(self, *args, **kwargs):
        return self.call(*args, **kwargs)


class Wrapped(Broken):
    forward = passes_on(Broken.forward)


class WrappedTwice(Broken):
    forward = passes_all_on(passes_all_on(Broken.forward))


class WrappedObject(Broken):
    """Its `forward` knows the module as the one that it is bound to."""

    def __init__(self):
        super().__init__()
        self.forward = passes_all_on(self.forward)


class WrappedByObject(Broken):
    def __init__(self):
        super().__init__()
        self.forward = PassesOn(self.forward)


class WrappedInPart(Broken):
    def __init__(self):
        super().__init__()
        self.forward = functools.update_wrapper(functools.partial(passes_on(Broken.forward), self), self.forward)


class BrokenBlock(Block):
    def forward(self, x):
        x = self.up(x)
        torch._dynamo.graph_break()
        return self.act(x)


class Deep(nn.Module):
    """Its blocks share what dynamo compiled for the first of them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(BrokenBlock() for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def graphs_of(cls):
    """How many graphs dynamo makes of two steps of training."""
    torch.compiler.reset()
    counters.clear()
    model = cls()
    compiled_model = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        compiled_model(torch.ones(4, 16)).sum().backward()
    return counters["stats"]["unique_graphs"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("cls", [Broken, Wrapped, WrappedTwice, WrappedObject, WrappedByObject, WrappedInPart])
def test_a_graph_below_a_call_that_breaks_is_looked_into_and_stays_what_it_is(watch, cls):
    alone = graphs_of(cls)
    watched = watch(watch=GRADIENTS)
    assert graphs_of(cls) == alone
    watched.hooks.settle()
    assert {("block.up", "output"), ("block.act", "output"), ("head", "output")} <= set(watched.rows("forward"))
    assert {("block.up", "grad output"), ("block.act", "grad output")} <= set(watched.rows("backward"))
    assert watched.of(NotLookedInto) == []
    assert watched.faults == []


@pytest.mark.slow
@pytest.mark.quick(1)
def test_a_backward_in_compiled_code_compiles_nothing_of_ours(watch, way):
    """Dynamo breaks there, and looks at all Python that the backward calls."""

    def graphs_of_steps():
        torch.compiler.reset()
        counters.clear()
        model = Plain()

        @torch.compile(backend="aot_eager")
        def step(x):
            model(x).sum().backward()

        for _ in range(3):
            step(torch.ones(4, 16))
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    alone = graphs_of_steps()
    watched = watch(watch=GRADIENTS)
    assert graphs_of_steps() == alone
    watched.hooks.settle()
    assert watched.faults == []


@pytest.mark.slow
def test_blocks_that_break_share_a_graph_as_without_us(watch):
    alone = graphs_of(Deep)
    watched = watch(watch=GRADIENTS)
    assert graphs_of(Deep) == alone
    assert (watched.of(NotLookedInto), watched.faults) == ([], [])


@pytest.mark.parametrize("class_name", ["GraphModule", "<lambda>"])
def test_what_a_backend_runs_is_no_module_of_the_model(watch, class_name):
    """Where a call breaks, the backend runs the graph of each part of it as a module of its own making."""
    nodes = torch.fx.Graph()
    nodes.output(nodes.call_function(torch.log, (nodes.placeholder("x"),)))
    part = torch.fx.GraphModule({}, nodes, class_name=class_name)

    class Ran(nn.Module):
        def forward(self, x):
            return part(x)

    watched = watch(on_overflow="continue")
    Ran()(-torch.ones(2))
    assert [frame.module for frame in watched.last.frames] == [""]
    assert [(a.module, a.cls) for a in watched.anomalies] == [("", "Ran")]


def test_an_error_of_ours_ends_no_compilation(watch, monkeypatch):
    watched = watch()
    monkeypatch.setattr(watched.hooks._roots, "child", lambda *args: 1 / 0)
    train(Plain)
    (fault, *_) = watched.faults
    assert fault.part == "a compiled forward"
