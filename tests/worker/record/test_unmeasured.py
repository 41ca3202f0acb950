"""A tensor of floats that nothing can read keeps a run from being clean. Tensors without numbers do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpuwatch.core.events import UnmeasuredTensor
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

X = torch.randn(2, 4)


class Wrapper(torch.Tensor):
    """Has no memory of its own, as the tensors of a quantized weight."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda leaf: leaf.inner if isinstance(leaf, cls) else leaf, (args, kwargs or {}))
        found = func(*args, **kwargs)
        return cls(found) if func in _STAYS else found


_STAYS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.t.default)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def with_weight(trained: bool) -> nn.Module:
    model = net()
    model[0].weight = nn.Parameter(Wrapper(torch.randn(4, 4)), requires_grad=trained)
    return model


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
