"""Faults in the backward of a model's own code, with the line whose backward makes the value: written for tests alone.

That line ends in `# fault: <name>`. Each forward is finite. Row 3 of the bad batch is 0, and so is what `enter` makes.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

FILE = Path(__file__)
SOURCE = FILE.read_text().splitlines()
BAD = 2
Site = Callable[[torch.Tensor], torch.Tensor]
SITES: dict[str, Site] = {}


def line_of(fault: str) -> int:
    (line,) = [number for number, text in enumerate(SOURCE, 1) if text.endswith(f"# fault: {fault}")]
    return line


def site(function: Site) -> Site:
    SITES[function.__name__] = function
    return function


@site
def root_of_square(h: torch.Tensor) -> torch.Tensor:
    size = h * h
    return h + size.sqrt()  # fault: root_of_square


@site
def length(h: torch.Tensor) -> torch.Tensor:
    total = h.square().sum(-1, keepdim=True)
    norm = total**0.5  # fault: length
    return h / norm.clamp(min=1e-6)


@site
def spread(h: torch.Tensor) -> torch.Tensor:
    variance = h.var(-1, keepdim=True)
    deviation = torch.sqrt(variance)  # fault: spread
    return (h - h.mean(-1, keepdim=True)) / (deviation + 1e-5)


@site
def logarithm_hidden_by_where(h: torch.Tensor) -> torch.Tensor:
    size = h.abs()
    scaled = torch.log(size)  # fault: logarithm_hidden_by_where
    return torch.where(size > 0, scaled, torch.zeros_like(h))


@site
def quotient_hidden_by_where(h: torch.Tensor) -> torch.Tensor:
    sign = h / h.abs()  # fault: quotient_hidden_by_where
    return torch.where(h == 0, torch.zeros_like(h), sign)


@site
def exponential_hidden_by_where(h: torch.Tensor) -> torch.Tensor:
    large = h.detach() == 0
    grown = torch.exp(h + large * 100.0)  # fault: exponential_hidden_by_where
    return torch.where(large, h, grown)


@site
def root_hidden_by_where(h: torch.Tensor) -> torch.Tensor:
    inverse = h.square().rsqrt()  # fault: root_hidden_by_where
    return torch.where(h.abs() > 1e-12, inverse, h).tanh()


@site
def reciprocal_hidden_by_fill(h: torch.Tensor) -> torch.Tensor:
    inverse = h.reciprocal()  # fault: reciprocal_hidden_by_fill
    return inverse.masked_fill(h == 0, 0.0).tanh()


@site
def softmax_hidden_by_nan_to_num(h: torch.Tensor) -> torch.Tensor:
    closed = torch.where((h == 0).all(-1, keepdim=True), float("-inf"), 0.0)
    scores = h + closed
    attended = scores.softmax(-1)  # fault: softmax_hidden_by_nan_to_num
    return attended.nan_to_num(0.0) * h


@site
def small_power(h: torch.Tensor) -> torch.Tensor:
    compressed = h.abs().pow(0.3)  # fault: small_power
    return compressed * h.sign()


@site
def angle(h: torch.Tensor) -> torch.Tensor:
    left, right = h.chunk(2, -1)
    slope = left / right  # fault: angle
    turned = torch.where(right == 0, right, slope.atan())
    return torch.cat([turned, right], -1)


@site
def hypotenuse(h: torch.Tensor) -> torch.Tensor:
    left, right = h.chunk(2, -1)
    return torch.cat([torch.hypot(left, right), left], -1)  # fault: hypotenuse


@site
def arc_cosine(h: torch.Tensor) -> torch.Tensor:
    cosine = (1 - h.square()).clamp(min=-0.9)
    return torch.acos(cosine)  # fault: arc_cosine


@site
def arc_sine(h: torch.Tensor) -> torch.Tensor:
    return h + torch.asin(torch.exp(-h.square()))  # fault: arc_sine


@site
def area_cosine(h: torch.Tensor) -> torch.Tensor:
    return torch.acosh(1 + h.square())  # fault: area_cosine


@site
def entropy(h: torch.Tensor) -> torch.Tensor:
    p = h.square() / 100
    return torch.special.entr(p)  # fault: entropy


@site
def geometric_mean(h: torch.Tensor) -> torch.Tensor:
    logs = h.abs().log()  # fault: geometric_mean
    return h * logs.mean(-1, keepdim=True).exp()


@site
def cosine_by_hand(h: torch.Tensor) -> torch.Tensor:
    other = h.roll(1, -1)
    dot = (h * other).sum(-1, keepdim=True)
    sizes = (h.pow(2).sum(-1, keepdim=True) * other.pow(2).sum(-1, keepdim=True)).sqrt()  # fault: cosine_by_hand
    return h * dot / (sizes + 1e-8)


@site
def straight_through(h: torch.Tensor) -> torch.Tensor:
    change = (h - h.detach()) * 1e30  # fault: straight_through
    return h + change * 1e30


@site
def masked_by_product(h: torch.Tensor) -> torch.Tensor:
    open_ = (h.detach() != 0).float()
    size = h.square().sum(-1, keepdim=True).sqrt()  # fault: masked_by_product
    return h + size * open_


@site
def half_of_a_large_gradient(h: torch.Tensor) -> torch.Tensor:
    half = h.half().tanh()
    wide = half.float()  # fault: half_of_a_large_gradient
    return wide * 1e6


@site
def half_product(h: torch.Tensor) -> torch.Tensor:
    small = (h * 1e-3).half()
    scaled = small * 3e4 * (1 / 3e4)
    return (scaled * 2e2 * 3e2).float()  # fault: half_product


@site
def in_place_power(h: torch.Tensor) -> torch.Tensor:
    copied = h.abs()
    copied[:, :4].pow_(0.5)  # fault: in_place_power
    return copied


@site
def eigenvectors(h: torch.Tensor) -> torch.Tensor:
    moment = h[3:4].T @ h[3:4] + 0.0 * h.T @ h
    _, vectors = torch.linalg.eigh(moment)  # fault: eigenvectors
    return h @ vectors


class Quotient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient / x  # fault: own_function


@site
def own_function(h: torch.Tensor) -> torch.Tensor:
    return Quotient.apply(h)


class RootFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        root = x.abs().sqrt()
        ctx.save_for_backward(root, x.sign())
        return root

    @staticmethod
    def backward(ctx, gradient):
        root, sign = ctx.saved_tensors
        slope = (2 * root).reciprocal()  # fault: own_root_function
        return gradient * slope * sign


@site
def own_root_function(h: torch.Tensor) -> torch.Tensor:
    return RootFunction.apply(h) + h


@site
def tensor_hook(h: torch.Tensor) -> torch.Tensor:
    size = h.detach().abs().amax(-1, keepdim=True)

    def normalized(gradient: torch.Tensor) -> torch.Tensor:
        return gradient / size  # fault: tensor_hook

    middle = h.tanh()
    middle.register_hook(normalized)
    return middle * 2


def safe_root(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0).sqrt()  # fault: in_a_helper


@site
def in_a_helper(h: torch.Tensor) -> torch.Tensor:
    return h * safe_root(h.square())


@site
def soft_logarithm(h: torch.Tensor) -> torch.Tensor:
    inside = 1 - torch.exp(-h.square())
    logs = torch.log(inside)  # fault: soft_logarithm
    return torch.where(inside == 0, h, logs)


@site
def quantile_of_powers(h: torch.Tensor) -> torch.Tensor:
    generalized = h.abs().pow(1.0).sum(-1, keepdim=True)
    pooled = generalized.pow(1 / 3.0)  # fault: quantile_of_powers
    return h + pooled


class Inner(nn.Module):
    def __init__(self, function: Site) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Net(nn.Module):
    """`place`: where the fault is: in a module inside of the root, in the root's own code, or in a part that is
    checkpointed."""

    def __init__(self, function: Site, place: str = "inside") -> None:
        super().__init__()
        self.place = place
        self.enter, self.leave = nn.Linear(8, 8, bias=False), nn.Linear(8, 2)
        self.inner = nn.Sequential(Inner(function), nn.Dropout(0.1)) if place != "root" else nn.Dropout(0.1)
        self.norm, self.function = nn.BatchNorm1d(8), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(x)
        if self.place == "root":
            h = self.inner(self.function(h))
        elif self.place == "checkpointed":
            h = checkpoint(self.inner, h, use_reentrant=False)
        else:
            h = self.inner(h)
        return self.leave(self.norm(h) + h)


def batch(n: int, bad: int = BAD) -> torch.Tensor:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(n))
    if n == bad:
        x[3] = 0
    return x


def fit(
    net: nn.Module, bad: int = BAD, loss: Callable[[torch.Tensor], torch.Tensor] = lambda out: out.square().mean()
) -> None:
    """Four steps on a net; nothing is seen of what raises."""
    optimizer = torch.optim.SGD(net.parameters(), 1e-4)
    for n in range(4):
        optimizer.zero_grad()
        loss(net(batch(n, bad))).backward()
        optimizer.step()


def trained(net: nn.Module, bad: int = BAD) -> list[torch.Tensor]:
    """The parameters after it, or as the abort has left them."""
    from gpuwatch.core.errors import OverflowDetected

    with contextlib.suppress(OverflowDetected), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(net, bad)
    return [parameter.detach().clone() for parameter in net.parameters()]
