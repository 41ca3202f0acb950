"""The second run of an alarm's forward: a table of faults in modules' own code, with the operation and line of each.

A line that makes a bad value ends in `# <name of the fault>`.
"""

from __future__ import annotations

import math
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.events.alarm_evidence import SecondRun
from gpuwatch.tests.fakes.late_device import LateDevice
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from ..conftest import use_late_device

SOURCE = Path(__file__).read_text().splitlines()


def line_of(fault):
    (line,) = [number for number, text in enumerate(SOURCE, 1) if text.endswith(f"# {fault}")]
    return line


class Attention(nn.Module):
    def __init__(self, scale=1e38, weight=1e3):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.scale = scale
        nn.init.constant_(self.qkv.weight, weight)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2)  # scores_product
        scores = scores * self.scale  # scores_scale
        return scores.softmax(-1) @ v


class MaskedSoftmax(nn.Module):
    def forward(self, x):
        mask = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).tril(-1)
        scores = (x @ x.T).masked_fill(~mask, -math.inf)
        return scores.softmax(-1) @ x  # masked_softmax


class MaskedByHand(nn.Module):
    def forward(self, x):
        scores = x @ x.T
        scores[2] = float("-inf")
        shifted = scores - scores.amax(-1, keepdim=True)  # masked_by_hand
        return shifted.exp() @ x


class AdditiveMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((4, 4), -math.inf))

    def forward(self, x):
        return F.softmax(x @ x.T + self.mask, dim=-1) @ x  # additive_mask


class RmsNorm(nn.Module):
    def forward(self, x):
        x = torch.zeros_like(x) * x
        scale = x.pow(2).mean(-1, keepdim=True).rsqrt()  # rms_norm
        return x * scale


class HandNorm(nn.Module):
    def forward(self, x):
        x = x.mean(-1, keepdim=True).expand_as(x)
        centred = x - x.amax(-1, keepdim=True)
        return centred / centred.std(-1, keepdim=True)  # hand_norm


class Variance(nn.Module):
    def forward(self, x):
        first = x[:1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            spread = first.var(0)  # variance
        return x / (1 + spread)


class ExpActivation(nn.Module):
    def forward(self, x):
        x = x.abs() + 1
        return torch.tanh(x) * torch.exp(100 * x)  # exp_activation


class HandSoftplus(nn.Module):
    def forward(self, x):
        grown = 200 * (1 + x.abs())
        return torch.log(
            1 + grown.exp()  # hand_softplus
        )


class LogSumExp(nn.Module):
    def forward(self, x):
        total = (x - 1e3).exp().sum(-1, keepdim=True)
        return x - total.log()  # log_sum_exp


class GatherLog(nn.Module):
    def forward(self, x):
        chosen = F.one_hot(torch.zeros(x.shape[0], dtype=torch.long), x.shape[-1]).to(x.dtype)
        picked = chosen.gather(1, torch.ones(x.shape[0], 1, dtype=torch.long))
        return x + torch.log(picked)  # gather_log


class OuterProduct(nn.Module):
    def forward(self, x):
        big = x.abs() + 1e20
        return torch.einsum("bi,bj->bij", big, big).sum(-1)  # einsum


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.exp(x + 1e3)  # custom_function

    @staticmethod
    def backward(ctx, grad):
        return grad


class WithFunction(nn.Module):
    def forward(self, x):
        return Doubling.apply(x)


class Nll(nn.Module):
    def forward(self, x):
        p = F.relu(-x.abs())
        return -(p.log())  # log_of_zero


class MeanOfNone(nn.Module):
    def forward(self, x):
        chosen = x > 1e9
        mean = (x * chosen).sum() / chosen.sum()  # count_of_zero
        return x - mean


class HalfCast(nn.Module):
    def forward(self, x):
        big = x.abs() + 7e4
        return big.half().to(x.dtype)  # half_cast


class SqrtOfNegative(nn.Module):
    def forward(self, x):
        return torch.sqrt(-1 - x.abs())  # sqrt_of_negative


class Power(nn.Module):
    def forward(self, x):
        return (x.abs() + 100) ** 30  # power


class CumulativeProduct(nn.Module):
    def forward(self, x):
        return torch.cumprod(x.abs() + 1e15, dim=0)  # cumulative_product


class UnitVector(nn.Module):
    def forward(self, x):
        x = x * 0
        return x / x.norm(dim=-1, keepdim=True)  # unit_vector


class Reciprocal(nn.Module):
    def forward(self, x):
        return 1 / F.relu(-x.abs())  # reciprocal


class Arc(nn.Module):
    def forward(self, x):
        return torch.acos(x.abs() + 2)  # arc


class InPlace(nn.Module):
    def forward(self, x):
        x = x.clone()
        x += 1e30
        x *= 1e30  # in_place
        return x


class OneColumn(nn.Module):
    def forward(self, x):
        out = torch.empty_like(x)
        out[:, :1] = x[:, :1] + 1
        out[:, 2:] = x[:, 2:]
        out[:, 1] = x[:, 1] / 0.0  # one_column
        return out


class ScatterSum(nn.Module):
    def forward(self, x):
        index = torch.zeros(x.shape[0], dtype=torch.long)
        return torch.zeros_like(x).index_add(0, index, x.abs() + 3e38)  # scatter_sum


class Matmul(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((8, 8), 1e20))

    def forward(self, x):
        big = x.abs() + 1e20
        return big @ self.weight  # matmul


class Kept(nn.Module):
    """Its helper leaves what it makes in an attribute."""

    def forward(self, x):
        self.grow(x)
        return x + self.kept

    def grow(self, x):
        self.kept = x.abs().add(1e25).square()  # kept


class Helper(nn.Module):
    def forward(self, x):
        return apply_twice(lambda y: y.abs() * 1e25 + 1e20, x)  # helper


def apply_twice(function, x):
    for _ in range(2):
        x = function(x)
    return x


class Fused(nn.Module):
    def forward(self, x):
        q = (x.abs() * 1e20 + 1e20)[None, None]
        return F.scaled_dot_product_attention(q, q, q)[0, 0]  # fused


class Branches(nn.Module):
    """A bad value that is taken away, then one that is not."""

    def forward(self, x):
        safe = torch.where(x > 1e9, 1 / (x * 0), x)
        noise = (x * 0).log().nan_to_num(neginf=0)
        return (safe + noise).abs().add(1e19).pow(3)  # branches


class Sampled(nn.Module):
    def forward(self, x):
        noise = torch.rand_like(x)
        return x + noise.log() / (noise * 0)  # sampled


class Sinks(nn.Module):
    def forward(self, x, *, bias=None):
        return (x.abs() + 1).mul(bias).mul(1e20)  # keyword


class Around(nn.Module):
    """Its own code makes the value between two calls."""

    def __init__(self, inner=None):
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.inner = inner or nn.Linear(8, 8)
        self.leave = nn.Linear(8, 8)

    def forward(self, x):
        h = self.enter(x)
        h = self.inner(h)
        return self.leave(h)


class Between(Around):
    def forward(self, x):
        h = self.enter(x)
        h = (h.abs() + 1) * 3e38  # between
        return self.leave(self.inner(h))


class BetweenKeyword(Around):
    def __init__(self):
        super().__init__(Sinks())

    def forward(self, x):
        return self.leave(self.inner(self.enter(x), bias=torch.tensor(1e30)))


class BigLinear(Around):
    def __init__(self):
        super().__init__()
        nn.init.constant_(self.enter.bias, 1e10)
        nn.init.constant_(self.inner.weight, 3e38)

    def forward(self, x):
        h = self.enter(x)
        h = self.inner(h)  # big_linear
        return self.leave(h)


class Checkpointed(Around):
    reentrant = False

    def forward(self, x):
        h = self.enter(x)
        return self.leave(checkpoint(self.inner, h, use_reentrant=self.reentrant))


class Reentrant(Checkpointed):
    reentrant = True


class Attend(nn.Module):
    """fp16 holds less than the product of two of its numbers."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        nn.init.constant_(self.q.bias, 300)
        nn.init.constant_(self.k.bias, 300)

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        scores = q @ k.T  # half_scores
        return scores.softmax(-1) @ x


class HalfSquare(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)
        nn.init.constant_(self.proj.bias, 300)

    def forward(self, x):
        y = self.proj(x)
        return y * y  # half_square


FAULTS = {
    "scores_scale": (Attention, "aten.mul.Tensor"),
    "scores_product": (lambda: Attention(1.0, 1e30), "aten.mm"),
    "masked_softmax": (MaskedSoftmax, "aten._softmax"),
    "masked_by_hand": (MaskedByHand, "aten.sub"),
    "additive_mask": (AdditiveMask, "aten._softmax"),
    "rms_norm": (RmsNorm, "aten.rsqrt"),
    "hand_norm": (HandNorm, "aten.div"),
    "variance": (Variance, "aten.var"),
    "exp_activation": (ExpActivation, "aten.exp"),
    "hand_softplus": (HandSoftplus, "aten.exp"),
    "log_sum_exp": (LogSumExp, "aten.log"),
    "gather_log": (GatherLog, "aten.log"),
    "einsum": (OuterProduct, "aten."),
    "custom_function": (WithFunction, "aten.exp"),
    "log_of_zero": (Nll, "aten.log"),
    "count_of_zero": (MeanOfNone, "aten.div"),
    "half_cast": (HalfCast, "aten._to_copy"),
    "sqrt_of_negative": (SqrtOfNegative, "aten.sqrt"),
    "power": (Power, "aten.pow"),
    "cumulative_product": (CumulativeProduct, "aten.cumprod"),
    "unit_vector": (UnitVector, "aten.div"),
    "reciprocal": (Reciprocal, "aten.reciprocal"),
    "arc": (Arc, "aten.acos"),
    "in_place": (InPlace, "aten.mul_"),
    "one_column": (OneColumn, "aten.div"),
    "scatter_sum": (ScatterSum, "aten.index_add"),
    "matmul": (Matmul, "aten.mm"),
    "kept": (Kept, "aten.pow"),
    "helper": (Helper, "aten.mul"),
    "fused": (Fused, ("aten._scaled_dot_product", "aten.bmm")),  # as torch has it
    "branches": (Branches, "aten.pow"),
    "sampled": (Sampled, "aten.div"),
    "half_scores": (Attend, "aten.mm"),
    "half_square": (HalfSquare, "aten.mul"),
}
WHOLE = {
    "between": (Between, "aten.mul"),
    "keyword": (BetweenKeyword, "aten.mul"),
    "big_linear": (BigLinear, "aten.addmm"),
}
"""Faults that need a model of their own."""
EAGER = [name for name in FAULTS if not name.startswith("half_s")]
AGAIN = ("masked_softmax", "exp_activation", "custom_function", "between", "count_of_zero", "one_column")
TABLE = [
    *((name, "eager") for name in (*EAGER, *WHOLE)),
    *((name, "bfloat16") for name in ("masked_softmax", "log_of_zero", "matmul", "in_place", "between")),
    *((name, "float16") for name in ("half_scores", "half_square", "masked_softmax", "exp_activation", "between")),
    *((name, "checkpointed") for name in ("masked_softmax", "exp_activation", "gather_log", "custom_function")),
    *((name, "reentrant") for name in ("masked_softmax", "power")),
    *((name, "compiled") for name in AGAIN),
    *((name, "aot_eager") for name in AGAIN),
    *((name, "ddp") for name in ("masked_softmax", "between", "count_of_zero", "power")),
    *((name, "fsdp") for name in ("masked_softmax", "scores_scale", "one_column", "count_of_zero")),
]


def model_of(fault, way):
    if fault in WHOLE:
        return WHOLE[fault][0]()
    kinds = {"checkpointed": Checkpointed, "reentrant": Reentrant}
    return kinds.get(way, Around)(FAULTS[fault][0]())


def train(model, way="eager", x=None):
    """Two steps, as a script makes them."""
    autocast = torch.autocast("cpu", getattr(torch, way)) if way in ("bfloat16", "float16") else nullcontext()
    x = torch.randn(4, 8) if x is None else x
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        with autocast:
            loss = model(x).float().sum()
        loss.backward()
        optimizer.step()


@pytest.mark.quick(8)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo does
@pytest.mark.parametrize(("fault", "way"), TABLE)
def test_the_operation_and_the_line(watch, request, fault, way):
    torch.manual_seed(0)
    model = model_of(fault, way)
    called = model
    if way in ("ddp", "fsdp"):
        request.getfixturevalue("alone_in_a_group")
    watched = watch(on_overflow="abort", sync=way == "fsdp")  # collectives run within the call of the root
    if way == "ddp":
        called = nn.parallel.DistributedDataParallel(model)
    elif way == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    elif way in ("compiled", "aot_eager"):
        called = torch.compile(model, backend="eager" if way == "compiled" else way)
    with pytest.raises(OverflowDetected) as raised:
        train(called, way)
    verdict = watched.verdict()
    assert watched.faults == []
    found = verdict.operation
    assert found is not None, verdict.evidence
    assert all(ran.took_s > 0 for ran in watched.of(SecondRun))
    assert (found.line, found.file) == (line_of(fault), __file__), found
    assert found.op.startswith({**FAULTS, **WHOLE}[fault][1]), found
    assert found.code == SOURCE[found.line - 1].strip()
    if sys.version_info >= (3, 11):
        assert found.columns is not None
        part = found.code[slice(*found.columns)]
        assert part == part.strip() and f"# {fault}" not in part, part
    assert f"test_second_run.py:{found.line}" in verdict.evidence[1]
    assert f"{found.op} made it at {__file__}:{found.line}: " in str(raised.value)


@pytest.mark.parametrize("late", [False, True], ids=["in host memory", "on a late device"])
def test_a_root_of_torchs_own_modules_has_the_line_that_called_it(watch, monkeypatch, late):
    """Its numbers may come later, while another line runs."""
    if late:
        use_late_device(monkeypatch, LateDevice(7))
    watched = watch(on_overflow="abort")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    nn.init.constant_(model[1].weight, 3e38)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pytest.raises(OverflowDetected):
        for _ in range(2):
            loss = model(torch.ones(4, 8)).sum()  # root of torch's modules
            loss.backward()
            watched.collect()
            optimizer.step()
    found = watched.verdict().operation
    assert found is not None, watched.verdict().evidence
    assert (found.line, found.file) == (line_of("root of torch's modules"), __file__), found
    assert sys.version_info < (3, 11) or found.code[slice(*found.columns)] == "model(torch.ones(4, 8))"


def test_code_without_a_source_has_its_place_alone(watch):
    """Such as a cell's that was run by `exec`."""
    names = {"nn": nn}
    cell = "class Grows(nn.Module):\n    def forward(self, x):\n        return x.abs().add(1e3).exp()\n"
    exec(compile(cell, "<ipython-input-3>", "exec"), names)
    watched = watch(on_overflow="abort")
    with pytest.raises(OverflowDetected, match=r"aten\.exp\.default made it at <ipython-input-3>:3; "):
        names["Grows"]()(torch.ones(2))
    assert any(line.startswith("<ipython-input-3>:3, aten.exp.default: ") for line in watched.verdict().evidence)


class HandsNan(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(torch.log(x.abs() * 0) * 0)


class Exponential(nn.Module):
    def forward(self, x):
        return torch.exp(x.abs() + 1e3)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
@pytest.mark.parametrize(
    ("make", "op"),
    [
        (lambda inner: nn.Sequential(nn.Linear(8, 8), inner), "aten.exp.default"),
        (lambda inner: nn.Sequential(nn.Sequential(torch.jit.script(nn.Linear(8, 8))), inner), "aten.exp.default"),
        (lambda inner: nn.Sequential(nn.Linear(8, 8), HandsNan(inner)), "aten.log.default"),
    ],
)
def test_a_scripted_module_in_another_one(watch, make, op):
    """It refuses `register_forward_hook`, which the second run needs for the tensor that was bad."""
    watched = watch(on_overflow="abort")
    model = make(torch.jit.script(Exponential()))
    with pytest.raises(OverflowDetected):
        train(model)
    found = watched.verdict().operation
    assert found is not None, watched.verdict().evidence
    assert found.op == op
    assert watched.faults == []
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
