"""Numerical bugs that others have described, written anew in PyTorch: `start.py formulas.py NAME`.

Each is a small training in which the bad number comes about as it does there: nothing is put in. programs.py says whose
bug it is and what is known of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 40
Formula = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The loss, of the net's output [16, classes] and of classes [16]."""


def net(*widths: int, between: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for of, to in pairwise(widths):
        layers += [nn.Linear(of, to), between()]
    return nn.Sequential(*layers[:-1])


def train(model: nn.Module, loss: Formula, lr: float, scale: float = 1.0, make: Any = torch.optim.SGD) -> None:
    """On 16 samples a batch, of four classes that can be told apart, in 8 numbers of about `scale`."""
    optimizer = make(model.parameters(), lr)
    centres = torch.randn(4, 8)
    for _ in range(STEPS):
        classes = torch.randint(4, (16,))
        x = (centres[classes] + 0.3 * torch.randn(16, 8)) * scale
        made = loss(model(x), classes)
        optimizer.zero_grad()
        made.backward()
        optimizer.step()


class LossModule(nn.Module):
    """A loss that is a module, as torch's own are; the others here are functions."""

    def __init__(self, formula: Formula) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, out: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return self.formula(out, classes)


def one_hot(classes: torch.Tensor) -> torch.Tensor:
    return F.one_hot(classes, 4).float()


def by_hand(out: torch.Tensor) -> torch.Tensor:
    """A softmax without the subtraction of the greatest."""
    return out.exp() / out.exp().sum(1, keepdim=True)


# Logarithms


def log_of_softmax() -> None:
    """In the loop itself, as GRIST's programs have it."""
    model = net(8, 32, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    centres = torch.randn(4, 8)
    for _ in range(STEPS):
        classes = torch.randint(4, (16,))
        hypothesis = F.softmax(model((centres[classes] + 0.3 * torch.randn(16, 8)) * 20), 1)
        cost = -(one_hot(classes) * torch.log(hypothesis)).sum()
        optimizer.zero_grad()
        cost.backward()
        optimizer.step()


def log_of_sigmoid() -> None:
    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        p, wanted = torch.sigmoid(out), one_hot(y)
        return -(wanted * torch.log(p) + (1 - wanted) * torch.log(1 - p)).sum(1).mean()

    train(net(8, 32, 4), LossModule(loss), 0.5, 20.0)


class ConvolutionNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.conv(F.pad(x.reshape(-1, 1, 2, 4), (1, 1, 1, 1))).relu().amax((2, 3))
        return F.softmax(self.fc(pooled), 1)


def log_in_a_convolution_net() -> None:
    train(ConvolutionNet(), lambda p, y: -(one_hot(y) * torch.log(p)).sum(), 0.2, 20.0, torch.optim.Adam)


class VotingNet(nn.Module):
    """Its output is a probability, as skorch's classifier asks; a relu makes some of them 0."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net(8, 32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        votes = self.inner(x).relu()
        return votes / (votes.sum(1, keepdim=True) + 1e-6)


def log_of_a_module_output() -> None:
    train(VotingNet(), LossModule(lambda p, y: F.nll_loss(torch.log(p), y)), 0.1)


def log_of_a_ranking() -> None:
    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        pairs = torch.cat([out[::2], out[1::2]], 1)
        labels = torch.zeros_like(pairs)
        labels[:, 0] = 1.0
        return -(labels * torch.log(F.softmax(pairs, -1))).sum(-1).mean()

    train(net(8, 32, 4), loss, 0.5, 50.0)


def log_of_an_inner_product() -> None:
    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        edge = torch.sigmoid((out[::2] * out[1::2]).sum(1))
        same = y[::2] == y[1::2]
        return -torch.log(torch.where(same, edge, 1 - edge)).mean()

    train(net(8, 32, 4), loss, 0.01, 20.0)


def log1p_of_minus_1() -> None:
    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return -torch.log1p(-F.softmax(out, 1)[range(16), (y + 1) % 4]).mean()

    train(net(8, 32, 4), LossModule(loss), 0.5, 200.0)


# Exponentials


def exp_by_hand() -> None:
    train(net(8, 32, 4), LossModule(lambda out, y: F.nll_loss((by_hand(out) + 1e-7).log(), y)), 0.5, 40.0)


class FreeEnergy(nn.Module):
    """Of a restricted Boltzmann machine, log(1 + exp(x)) as it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(32, 8) * 0.01), nn.Parameter(torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -F.linear(x, self.weight, self.bias).exp().add(1).log().sum(1, keepdim=True)


def exp_of_an_energy() -> None:
    train(FreeEnergy(), lambda out, y: out.mean(), 0.1, 8.0)


class VariationalNet(nn.Module):
    def __init__(self, root_of_exp: bool) -> None:
        super().__init__()
        self.encode, self.decode = net(8, 32, 8), net(4, 32, 8)
        self.root_of_exp = root_of_exp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, log_variance = self.encode(x).chunk(2, 1)
        deviation = log_variance.exp().sqrt() if self.root_of_exp else (0.5 * log_variance).exp()
        made = self.decode(mean + deviation * torch.randn_like(mean))
        latent = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)
        return (made - x).square().sum(1) + latent


def exp_of_a_log_variance() -> None:
    train(VariationalNet(False), lambda out, y: out.mean(), 0.05, 30.0)


def root_of_an_exp() -> None:
    class OnlyLatent(VariationalNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mean, log_variance = self.encode(x).chunk(2, 1)
            return (mean + log_variance.mul(40).exp().sqrt()).sum(1)

    train(OnlyLatent(True), lambda out, y: out.mean(), 0.01, 10.0)


def expm1_of_a_large_number() -> None:
    train(net(8, 32, 4), LossModule(lambda out, y: torch.expm1(out).sub(1).abs().mean()), 0.01, 2000.0)


def pixel_softmax() -> None:
    class PixelNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits = self.conv2(self.conv1(x.reshape(-1, 1, 2, 4)).relu())
            return logits.exp() / logits.exp().sum(1, keepdim=True)

    def dice(p: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        wanted = (y % 2).float().reshape(-1, 1, 1).expand_as(p[:, 1])
        return 1 - 2 * (p[:, 1] * wanted).sum() / (1e-5 + p[:, 1].sum() + wanted.sum())

    train(PixelNet(), dice, 0.5, 400.0)


# Divisions and roots


def division_by_a_sum_of_exp() -> None:
    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weight = (-out.square()).exp()
        return ((weight / weight.sum(1, keepdim=True)) * out).mean()

    train(net(8, 32, 4), loss, 0.05, 30.0)


class ScaledNet(nn.Module):
    """Divides by the greatest of its activations, which a relu may all make 0."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(x).relu()
        return self.leave(h / h.amax(1, keepdim=True))


def division_by_a_greatest() -> None:
    train(ScaledNet(), F.cross_entropy, 0.1)


def reciprocal_of_0() -> None:
    train(net(8, 32, 4), LossModule(lambda out, y: torch.reciprocal(out.relu()).mean()), 0.01)


def rsqrt_of_a_variance() -> None:
    class Normed(nn.Module):
        """A batch norm without its eps, behind a relu that leaves one channel at 0."""

        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)
            nn.init.constant_(self.enter.bias[:1], -60.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.enter(x).relu()
            return self.leave((h - h.mean(0)) * torch.rsqrt(h.var(0, unbiased=False)))

    train(Normed(), F.cross_entropy, 0.1)


def sqrt_of_a_negative() -> None:
    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (out.square().mean(0) - out.mean(0).square() - 1e-3).sqrt().sum()

    train(net(8, 32, 4), LossModule(loss), 0.05)


def root_of_a_distance() -> None:
    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (out[:, None] - out[None]).square().sum(2).sqrt().mean()

    train(net(8, 32, 4), loss, 0.05)


def power_of_a_negative() -> None:
    train(net(8, 32, 4), LossModule(lambda out, y: out.pow(1.5).mean()), 0.05)


def mean_of_nothing() -> None:
    train(net(8, 32, 4), lambda out, y: F.cross_entropy(out[y == 2], y[y == 2]), 0.05)


# Trainings that diverge, and float16


def exploding_gradient() -> None:
    train(net(8, 64, 64, 64, 64, 1), lambda out, y: F.mse_loss(out[:, 0], y.float()), 10.0)


def learning_rate_too_high() -> None:
    train(net(8, 16, 1), lambda out, y: F.mse_loss(out[:, 0], y.float()), 1e3)


class HalfNet(nn.Module):
    """A product whose sum of 512 passes 65,504."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 512, dtype=torch.float16), nn.Linear(512, 4, dtype=torch.float16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(x.half())
        return self.leave(h @ h.T @ h).float()


def half_product() -> None:
    train(HalfNet(), F.cross_entropy, 1e-3, 10.0)


def half_square() -> None:
    class HalfSquare(HalfNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.leave(self.enter(x.half()).square()).float()

    train(HalfSquare(), F.cross_entropy, 1e-3, 300.0)


# Silent: no number is bad


def vanishing_gradient() -> None:
    train(net(8, *[16] * 12, 4, between=nn.Sigmoid), F.cross_entropy, 0.1)


def dying_relu() -> None:
    model = net(8, 16, 16, 4)
    for layer in (model[0], model[2]):
        nn.init.constant_(layer.bias, -30.0)
    train(model, F.cross_entropy, 0.1)


def oscillating_loss() -> None:
    train(net(8, 16, 4), F.cross_entropy, 30.0)


def slow_convergence() -> None:
    train(net(8, 16, 4), F.cross_entropy, 1e-7)


def wrong_loss() -> None:
    train(net(8, 16, 4), lambda out, y: F.l1_loss(out[:, 0], y.float()), 0.1)


def wrong_activation() -> None:
    train(net(8, 16, 4), lambda out, y: F.cross_entropy(F.softmax(out.relu(), 1), y), 0.1)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
