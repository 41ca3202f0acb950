"""A tensor of floats that nothing can read keeps a run from being clean. Tensors without numbers do not.

A wrapper with one tensor inside is read through it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from gpuwatch.core.events.own_limits import UnmeasuredTensor
from gpuwatch.core.frames import RowKind
from gpuwatch.worker.device.device import without_modes
from gpuwatch.worker.record.bad_elements import pattern_of
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

pytestmark = pytest.mark.quick_here(14)

X = torch.randn(2, 4)


class Wrapper(torch.Tensor):
    """Has no memory of its own, as the tensors of a quantized weight."""

    values_: torch.Tensor
    asked: ClassVar[list[str]] = []
    """The operations that its class was asked for."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, dtype: torch.dtype | None = None) -> Wrapper:
        dtype = dtype or inner.dtype
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=dtype)  # type: ignore[attr-defined]
        made.values_ = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked.append(str(func))
        args, kwargs = tree_map(lambda leaf: leaf.values_ if isinstance(leaf, cls) else leaf, (args, kwargs or {}))
        found = func(*args, **kwargs)
        return cls.around(found) if func in _STAYS else found

    @classmethod
    def around(cls, inner: torch.Tensor) -> Wrapper:
        return cls(inner)


_ATEN = torch.ops.aten
_STAYS = (_ATEN.detach.default, _ATEN.alias.default, _ATEN.t.default, _ATEN.as_strided.default)


class Sole(Wrapper):
    """Says that the tensor inside is its only one, as torchao's weights do."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values_"], {"config": "dynamic"}


class Scaled(Wrapper):
    """Its numbers are those of the tensor inside, times a scale."""

    scale: torch.Tensor

    @classmethod
    def around(cls, inner: torch.Tensor) -> Scaled:
        made = cls(inner)
        made.scale = torch.ones(())
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values_", "scale"], None


class Factored(Sole):
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values_"], {"scale": 0.5}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def with_weight(trained: bool, wrap: Callable[[torch.Tensor], torch.Tensor] = Wrapper) -> nn.Module:
    model = net()
    model[0].weight = nn.Parameter(wrap(torch.randn(4, 4)), requires_grad=trained)
    return model


def train(model: nn.Module, lr: float = 0.1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(3):
        model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def freed() -> torch.Tensor:
    tensor = torch.randn(2, 4)
    tensor.untyped_storage().resize_(0)
    return tensor


def on_alias(model: nn.Module) -> None:
    def call(x: torch.Tensor) -> Any:
        x = x.clone()
        x.view(-1).mul_(torch.inf)  # functionalize applies it to x when x is next used
        return model(x)

    torch.func.functionalize(call)(X)


@pytest.mark.parametrize(
    ("run", "what"),
    [
        (lambda: torch.func.functionalize(net())(X), "input[0] of `0` (Linear) (float32)"),
        (lambda: on_alias(nn.Identity()), "input[0] of the root module (Identity) (float32)"),
        (lambda: nn.Identity()(Wrapper(X)), "input[0] of the root module (Identity) (float32)"),
        (lambda: with_weight(True)(X), "weight of `0` (Linear) (float32)"),
        (lambda: train(with_weight(True, Scaled.around)), "weight of `0` (Linear) (float32)"),
        (lambda: train(with_weight(True, Factored)), "weight of `0` (Linear) (float32)"),
        (
            lambda: nn.Identity()(Sole(X.half(), torch.float32)),
            "input[0] of the root module (Identity) (float32)",
        ),
    ],
)
def test_floats_that_cannot_be_measured_are_a_gap(
    watch: Callable[..., Any], way: str, run: Callable[[], Any], what: str
) -> None:
    watched = watch()
    run()
    assert [(event.dtype, event.where.batch) for event in watched.of(UnmeasuredTensor)] == [("float32", 0)]
    verdict = watched.verdict()
    assert (verdict.kind, verdict.certainty, watched.faults) == ("unknown", "unknown", [])
    assert verdict.missing == [f"rank 0 had tensors that could not be measured, such as {what}"]


def test_a_rule_takes_them_out(watch: Callable[..., Any], way: str) -> None:
    watched = watch(ignore=["*"])
    torch.func.functionalize(net())(X)
    assert (watched.of(UnmeasuredTensor), watched.verdict().kind) == ([], "clean")


def test_tensors_without_numbers_are_no_gap(watch: Callable[..., Any], way: str) -> None:
    watched = watch()
    net()(X)
    with_weight(trained=False)(X)
    look = nn.Identity()
    for leaf in (freed(), torch.empty(0, 4), torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.int64)):
        look(leaf)
    look(torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    look(X.to("meta"))
    torch.func.functionalize(look)(torch.ones(2, dtype=torch.int64))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        net()(mode.from_tensor(X))
        torch.func.functionalize(net())(mode.from_tensor(X))
    make_fx(look, tracing_mode="symbolic")(X)
    make_fx(torch.func.functionalize(look), tracing_mode="symbolic")(X)
    verdict = watched.verdict()
    assert (verdict.kind, verdict.certainty, verdict.missing) == ("clean", "established", [])
    assert watched.of(UnmeasuredTensor) == watched.faults == []


def trained(seed: int = 0) -> tuple[torch.Tensor, list[str]]:
    """(the weight after three steps, the operations that its class was asked for)"""
    torch.manual_seed(seed)
    Wrapper.asked.clear()
    model = with_weight(True, Sole)
    train(model)
    return model[0].weight.values_, list(Wrapper.asked)  # type: ignore[union-attr, index]


def test_a_wrapper_is_read_through_its_only_tensor(watch: Callable[..., Any], way: str) -> None:
    alone, asked = trained()
    watched = watch()
    weight, asked_too = trained()
    assert torch.equal(weight, alone)
    assert asked_too == asked
    (row,) = [row for frame in watched.frames("optimizer") for row in frame.rows if row.role == "weight"]
    assert (row.abs_min, row.abs_max) == (weight.abs().min().item(), weight.abs().max().item())
    verdict = watched.verdict()
    assert (verdict.kind, verdict.certainty, verdict.missing) == ("clean", "established", [])
    assert watched.of(UnmeasuredTensor) == watched.faults == []


@pytest.mark.parametrize("wrap", [Sole, lambda inner: Sole(Sole(inner))], ids=["one", "in another"])
def test_nan_in_a_wrapper_is_found(
    watch: Callable[..., Any], way: str, wrap: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    watched = watch()
    bad = torch.randn(4, 4)
    bad[1, 2] = torch.nan
    model = net()
    model[0].weight = nn.Parameter(wrap(bad))
    model(X)
    first = watched.anomalies[0]
    assert (first.module, first.role, first.value) == ("0", "weight", "nan")
    Wrapper.asked.clear()
    assert without_modes(pattern_of, model[0].weight) == "one element of 16, at [1, 2]"
    assert Wrapper.asked == []


def test_nan_in_the_step_of_a_wrapped_weight_is_named(watch: Callable[..., Any], way: str) -> None:
    watched = watch()
    train(with_weight(True, Sole), lr=torch.inf)
    first = watched.anomalies[0]
    assert (first.phase, first.module, first.role) == ("optimizer", "0", "weight")


class Sharded(Sole):
    """As torchao's float8 weight: FSDP2 gathers another class, which no one can read."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda leaf: leaf.values_ if isinstance(leaf, cls) else leaf, (args, kwargs or {}))
        found = func(*args, **kwargs)
        return tree_map(lambda leaf: cls(leaf) if isinstance(leaf, torch.Tensor) else leaf, found)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[Any, Any]:
        return (self.values_,), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        if out is None:
            return Scaled.around(outputs[0]), outputs
        out.values_.copy_(outputs[0])
        return None


@pytest.mark.parametrize("readable", [True, False])
def test_a_weight_that_is_gathered_from_shards_is_read_as_these_are(
    watch: Callable[..., Any], way: str, alone_in_a_group: None, readable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not readable:
        monkeypatch.setattr(Sharded, "__tensor_flatten__", Factored.__tensor_flatten__)
    model = with_weight(True, Sharded)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    watched = watch()
    train(model)
    rows = [(row.role, row.kind) for frame in watched.frames("forward") for row in frame.rows if row.role == "weight"]
    assert rows == [("weight", RowKind.NOT_MEASURABLE)]
    verdict = watched.verdict()
    kind, certainty = ("clean", "established") if readable else ("unknown", "unknown")
    assert (verdict.kind, verdict.certainty, watched.faults) == (kind, certainty, [])


class Softmax(nn.Module):
    def forward(self, mask: Any) -> torch.Tensor:
        return mask.values_.softmax(-1)


def test_a_mask_in_a_wrapper_is_not_compared_by_its_class(watch: Callable[..., Any], way: str) -> None:
    mask = Sole(torch.full((2, 4), -torch.inf))
    Wrapper.asked.clear()
    watched = watch()
    Softmax()(mask)
    assert [(found.role, found.value) for found in watched.anomalies] == [("output", "nan")]
    assert Wrapper.asked == watched.faults == []
