"""What autograd has saved of an operation gives its result again, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from gpuwatch.worker.explain.loss_graph import _GraphSearch
from gpuwatch.worker.explain.node_operations import NODE_RULES

from ...cases import case

X = torch.linspace(0.11, 0.93, 12).reshape(3, 4).requires_grad_()
Y = torch.linspace(0.85, 0.21, 12).reshape(3, 4).requires_grad_()
V = torch.linspace(0.2, 0.7, 4).requires_grad_()
B = torch.linspace(0.2, 0.7, 3).requires_grad_()
LABELS = torch.tensor([1, 2, -100])
IMAGE = torch.linspace(-3, 3, 16).reshape(1, 4, 2, 2).requires_grad_()

ELEMENTWISE = (
    "acos",
    "asin",
    "atanh",
    "cos",
    "cosh",
    "digamma",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "neg",
    "reciprocal",
    "relu",
    "rsqrt",
    "sigmoid",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "abs",
)
CASES: dict[str, Callable[[], torch.Tensor]] = {
    **{name: (lambda name=name: getattr(X, name)()) for name in ELEMENTWISE},
    "acosh": lambda: (X + 1).acosh(),
    "silu": lambda: F.silu(X),
    "softplus": lambda: F.softplus(X, 2, 1.1),
    "logit": lambda: X.logit(1e-3),
    "leaky_relu": lambda: F.leaky_relu(X - 0.5, 0.2),
    "log_sigmoid": lambda: F.logsigmoid(X),
    "add": lambda: X + Y,
    "sub": lambda: torch.sub(X, Y, alpha=3),
    "mul": lambda: X * Y,
    "mul by a number": lambda: X.sum() * 2.3,
    "div": lambda: X / Y,
    "div by a count": lambda: X.sum() / 3,
    "pow": lambda: X**2.5,
    "pow of tensors": lambda: X**Y,
    "xlogy": lambda: torch.xlogy(X, Y),
    "hypot": lambda: torch.hypot(X, Y),
    "maximum": lambda: torch.maximum(X, Y),
    "minimum": lambda: torch.minimum(X, Y),
    "logaddexp": lambda: torch.logaddexp(X, Y),
    "clamp": lambda: X.clamp(0.2, 0.5),
    "clamp_min": lambda: X.clamp_min(0.2),
    "clamp_max": lambda: X.clamp_max(0.2),
    "mm": lambda: X @ Y.t(),
    "mv": lambda: X @ V,
    "dot": lambda: V @ V,
    "bmm": lambda: torch.bmm(X[None], Y.t()[None]),
    "addmm": lambda: F.linear(X, Y, B),
    "sum": lambda: X.sum(),
    "sum of rows": lambda: X.sum(-1, keepdim=True),
    "mean": lambda: X.mean(),
    "mean of columns": lambda: X.mean(0),
    "prod": lambda: X.prod(),
    "prod of rows": lambda: X.prod(-1),
    "cumsum": lambda: X.cumsum(-1),
    "cumprod": lambda: X.cumprod(0),
    "std": lambda: X.std(),
    "std of rows": lambda: X.std(-1, keepdim=True),
    "var": lambda: X.var(0, unbiased=False),
    "norm": lambda: torch.linalg.vector_norm(X, 3, -1),
    "logsumexp": lambda: X.logsumexp(-1),
    "amax": lambda: X.amax(-1),
    "amin": lambda: X.amin((0, 1)),
    "max": lambda: X.max(),
    "min": lambda: X.min(),
    "softmax": lambda: X.softmax(-1),
    "log_softmax": lambda: X.log_softmax(0),
    "nll_loss": lambda: F.nll_loss(X, LABELS),
    "nll_loss2d": lambda: F.nll_loss(IMAGE, torch.tensor([[[0, 1], [2, 3]]])),
    "mse_loss": lambda: F.mse_loss(X, Y, reduction="sum"),
    "view": lambda: X.view(-1),
    "reshape of a copy": lambda: X.t().reshape(12),
    "reshape of a view": lambda: X.t().view(4, 3).unflatten(0, (2, 2)),
    "squeeze": lambda: X[None].squeeze(),
    "squeeze of a dim": lambda: X[None].squeeze(0),
    "squeeze of dims": lambda: X[None, None].squeeze((0, 1)),
    "unsqueeze": lambda: X.unsqueeze(-1),
    "clone": lambda: X.clone(),
    "expand": lambda: V.expand(3, 4),
    "t": lambda: X.t(),
    "transpose": lambda: X.transpose(0, -1),
    "permute": lambda: X.permute(1, 0),
    "select": lambda: X[:, -1],
    "slice": lambda: X[1:, ::2],
    "diagonal": lambda: X.diagonal(1),
    "split": lambda: X.chunk(2, 1)[1],
    "split of sizes": lambda: X.split([1, 3], 1)[1],
    "unbind": lambda: X.unbind(0)[2],
    "index": lambda: X[torch.tensor([0, 2]), torch.tensor([1, 3])],
    "index of columns": lambda: X[:, torch.tensor([1, 3])],
    "index of a mask": lambda: X[X > 0.4],
    "gather": lambda: X.gather(1, torch.tensor([[1], [0], [3]])),
    "masked_select": lambda: X.masked_select(X > 0.4),
    "embedding": lambda: F.embedding(torch.tensor([2, 0]), X),
    "cat": lambda: torch.cat([X, Y, X], -1),
    "stack": lambda: torch.stack([X, Y], 1),
    "where": lambda: torch.where(X > 0.4, X, Y),
    "to": lambda: X.to(torch.bfloat16),
}


def test_the_result_is_computed_again_to_the_bit():
    for name, make in CASES.items():
        with case(name):
            made = make()
            search, node = _GraphSearch(), made.grad_fn
            with torch.no_grad():
                rule = NODE_RULES[node.name()]
                again = search._run(node, rule, search._operands(node, rule))[made.output_nr]
            assert again is not None
            assert torch.equal(again, made)


def test_each_rule_is_tried():
    tried = {make().grad_fn.name() for make in CASES.values()}
    assert set(NODE_RULES) - tried == {"ReshapeAliasBackward0"}  # of a tensor that torch cannot view, on some devices
