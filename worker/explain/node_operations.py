"""The operation of aten whose backward an autograd node is, and its arguments: what the node has saved of a forward.

    LogBackward0    saves `self`     aten.log(self)
    SumBackward1    saves `dim`      aten.sum.dim_IntList(what the node before it returned, dim, keepdim)

A node saves what its derivative needs. Its other operands are what the nodes before it returned, or the tensors of the
script that need no gradient: those are not to be had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from .packed_nodes import may_be_packed

aten = torch.ops.aten
_UNSIGNED = 1 << 63
"""torch shows a dimension of -1 as 2**64 - 1."""
ALL = 1 << 10
Operands = tuple[Any, ...]
"""Tensors, in the order of `NodeRule.operands`."""


class NodeCall(NamedTuple):
    """A call of an operation of aten."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = {}


class NodeRule(NamedTuple):
    """How the forward of a node is computed."""

    operands: tuple[str, ...]
    """The name under which each of its tensors is saved, in the order of the nodes before it; "" if it is not."""
    call: Callable[[Any, Operands], NodeCall]
    """(node, operands) -> the operation"""
    keeps: int = 0
    """How many of its first operands it keeps bad: a bad element makes the result bad, whatever the others hold."""
    moves: bool = False
    """It moves elements, and computes none: a bad result shows a bad operand."""


def saved(node: Any, name: str) -> Any:
    """What a node has saved: a tensor, a number with its sign, or a list of some.

    Raises LookupError if it would have to be unpacked, as `saved_tensor` says.
    """
    raw = getattr(node, f"_raw_saved_{name}", None)
    for each in raw if isinstance(raw, tuple) else (raw,):
        if each is not None and may_be_packed(node, each):
            raise LookupError(f"{name} would have to be unpacked")
    value = getattr(node, f"_saved_{name}")
    if isinstance(value, tuple):
        return [_signed(each) for each in value]
    return _signed(value)


def _signed(value: Any) -> Any:
    return value - 2 * _UNSIGNED if isinstance(value, int) and value >= _UNSIGNED else value


def _without_function(name: str) -> Any:
    """An operation for which torch has no function of this name: its own begins with `_`."""
    return getattr(aten, f"_{name}").default


def _shape(node: Any) -> list[int]:
    return list(node._input_metadata[0].shape)


def _of(
    func: Any, *operands: str, numbers: tuple[str, ...] = (), keeps: int = 0, moves: bool = False, **named: str
) -> NodeRule:
    """A rule of an operation that takes its operands, and then saved numbers. `named`: keyword -> saved number."""

    def call(node: Any, given: Operands) -> NodeCall:
        own = (saved(node, name) for name in numbers)
        return NodeCall(func, (*given, *own), {key: saved(node, name) for key, name in named.items()})

    return NodeRule(operands or ("",), call, keeps, moves)


def _like(func: Any, call: Callable[[Any, Operands], tuple[Any, ...]], *operands: str, **options: Any) -> NodeRule:
    """A rule whose arguments are computed from the node."""
    return NodeRule(operands or ("",), lambda node, given: NodeCall(func, call(node, given)), **options)


_AS_SHAPED = _like(aten.reshape.default, lambda node, given: (given[0], _shape(node)), moves=True, keeps=ALL)


def _indices(node: Any, given: Operands) -> tuple[Any, ...]:
    return given[0], list(saved(node, "indices"))


def _with_mask(node: Any, given: Operands) -> tuple[Any, ...]:
    return given[0], saved(node, "mask")


def _condition(node: Any, given: Operands) -> tuple[Any, ...]:
    return (saved(node, "condition"), *given)


def _gathered(node: Any, given: Operands) -> tuple[Any, ...]:
    return given[0], saved(node, "dim"), saved(node, "index")


def _embedded(node: Any, given: Operands) -> tuple[Any, ...]:
    return given[0], saved(node, "indices")


def _listed(node: Any, given: Operands) -> tuple[Any, ...]:
    return list(given), saved(node, "dim")


def _cast(node: Any, given: Operands) -> NodeCall:
    return NodeCall(_without_function("to_copy"), given, {"dtype": node._input_metadata[0].dtype})


def _linear(node: Any, given: Operands) -> NodeCall:
    scales = {name: saved(node, name) for name in ("beta", "alpha")}
    return NodeCall(aten.addmm.default, given, scales)


def _labelled(node: Any, given: Operands) -> tuple[Any, ...]:
    more = saved(node, "reduction"), saved(node, "ignore_index")
    return given[0], saved(node, "target"), saved(node, "weight"), *more


def _normed(node: Any, given: Operands) -> NodeCall:
    args = saved(node, "ord"), saved(node, "dim"), saved(node, "keepdim")
    return NodeCall(aten.linalg_vector_norm.default, (*given, *args))


def _spread(func: Any) -> NodeRule:
    def call(node: Any, given: Operands) -> NodeCall:
        options = {"correction": saved(node, "correction"), "keepdim": saved(node, "keepdim")}
        return NodeCall(func, (*given, saved(node, "dim")), options)

    return NodeRule(("self",), call)


ELEMENTWISE = (
    "acos",
    "acosh",
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
    "silu",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
)
_CLASSES = {"log1p": "Log1P"}
_KEEPS = ("neg",)


def _elementwise(name: str) -> NodeRule:
    func = getattr(aten, name).default
    # what is not saved under this name is what the node before has returned
    return _of(func, "self", keeps=ALL if name in _KEEPS else 0)


NODE_RULES: dict[str, NodeRule] = {
    **{f"{_CLASSES.get(name, name.capitalize())}Backward0": _elementwise(name) for name in ELEMENTWISE},
    "AbsBackward0": _of(aten.abs.default, "self", keeps=ALL),
    "SoftplusBackward0": _of(aten.softplus.default, "self", numbers=("beta", "threshold")),
    "LogitBackward0": _of(aten.logit.default, "self", numbers=("eps",)),
    "LeakyReluBackward0": _of(aten.leaky_relu.default, "self", numbers=("negative_slope",)),
    "LogSigmoidBackward0": _like(aten.log_sigmoid_forward.default, lambda node, given: given, "self"),
    # arithmetic
    "AddBackward0": _of(aten.add.Tensor, "", "", alpha="alpha", keeps=ALL),
    "SubBackward0": _of(aten.sub.Tensor, "", "", alpha="alpha", keeps=ALL),
    "MulBackward0": _of(aten.mul.Tensor, "self", "other", keeps=ALL),
    "DivBackward0": _of(aten.div.Tensor, "self", "other", keeps=1),
    "PowBackward0": _of(aten.pow.Tensor_Scalar, "self", numbers=("exponent",)),
    "PowBackward1": _of(aten.pow.Tensor_Tensor, "self", "exponent"),
    "XlogyBackward0": _of(aten.xlogy.Tensor, "self", "other"),
    "HypotBackward0": _of(aten.hypot.default, "self", "other"),
    "MaximumBackward0": _of(aten.maximum.default, "self", "other"),
    "MinimumBackward0": _of(aten.minimum.default, "self", "other"),
    "LogaddexpBackward0": _of(aten.logaddexp.default, "self", "other"),
    "ClampBackward1": _of(aten.clamp.default, "self", numbers=("min", "max")),
    "ClampMinBackward0": _of(aten.clamp_min.default, "self", numbers=("min",)),
    "ClampMaxBackward0": _of(aten.clamp_max.default, "self", numbers=("max",)),
    # products
    "MmBackward0": _of(aten.mm.default, "self", "mat2"),
    "MvBackward0": _of(aten.mv.default, "self", "vec"),
    "DotBackward0": _of(aten.dot.default, "self", "tensor"),
    "BmmBackward0": _of(aten.bmm.default, "self", "mat2"),
    "AddmmBackward0": NodeRule(("", "mat1", "mat2"), _linear),
    # reductions
    "SumBackward0": _of(aten.sum.default, keeps=ALL),
    "SumBackward1": _of(aten.sum.dim_IntList, numbers=("dim", "keepdim"), keeps=ALL),
    "MeanBackward0": _of(aten.mean.default, keeps=ALL),
    "MeanBackward1": _of(aten.mean.dim, numbers=("dim", "keepdim"), keeps=ALL),
    "ProdBackward0": _of(aten.prod.default, "self"),
    "ProdBackward1": _of(aten.prod.dim_int, "self", numbers=("dim", "keepdim")),
    "CumsumBackward0": _of(aten.cumsum.default, numbers=("dim",), keeps=ALL),
    "CumprodBackward0": _of(aten.cumprod.default, "self", numbers=("dim",)),
    "StdBackward0": _spread(aten.std.correction),
    "VarBackward0": _spread(aten.var.correction),
    "LinalgVectorNormBackward0": NodeRule(("self",), _normed),
    "LogsumexpBackward0": _of(aten.logsumexp.default, "self", numbers=("dim", "keepdim")),
    "AmaxBackward0": _of(aten.amax.default, "self", numbers=("dim", "keepdim")),
    "AminBackward0": _of(aten.amin.default, "self", numbers=("dim", "keepdim")),
    "MaxBackward1": _of(aten.max.default, "self"),
    "MinBackward1": _of(aten.min.default, "self"),
    # losses
    "SoftmaxBackward0": _like(_without_function("softmax"), lambda node, given: (*given, saved(node, "dim"), False)),
    "LogSoftmaxBackward0": _like(
        _without_function("log_softmax"), lambda node, given: (*given, saved(node, "dim"), False)
    ),
    "NllLossBackward0": _like(aten.nll_loss_forward.default, _labelled, "self"),
    "NllLoss2DBackward0": _like(aten.nll_loss2d_forward.default, _labelled, "self"),
    "MseLossBackward0": _of(aten.mse_loss.default, "self", "target", numbers=("reduction",)),
    # elements that are moved
    **dict.fromkeys(
        (
            "ReshapeAliasBackward0",
            "SqueezeBackward0",
            "SqueezeBackward1",
            "SqueezeBackward2",
            "UnsafeViewBackward0",
            "UnsqueezeBackward0",
            "ViewBackward0",
        ),
        _AS_SHAPED,
    ),
    "CloneBackward0": _of(aten.clone.default, keeps=ALL, moves=True),
    "ExpandBackward0": _like(aten.expand.default, lambda node, given: (given[0], _shape(node)), keeps=ALL, moves=True),
    "TBackward0": _of(aten.t.default, keeps=ALL, moves=True),
    "TransposeBackward0": _of(aten.transpose.int, numbers=("dim0", "dim1"), keeps=ALL, moves=True),
    "PermuteBackward0": _of(aten.permute.default, numbers=("dims",), keeps=ALL, moves=True),
    "SelectBackward0": _of(aten.select.int, numbers=("dim", "index"), moves=True),
    "SliceBackward0": _of(aten.slice.Tensor, numbers=("dim", "start", "end", "step"), moves=True),
    "DiagonalBackward0": _of(aten.diagonal.default, numbers=("offset", "dim1", "dim2"), moves=True),
    "SplitBackward0": _of(aten.split.Tensor, numbers=("split_size", "dim"), moves=True),
    "SplitWithSizesBackward0": _of(aten.split_with_sizes.default, numbers=("split_sizes", "dim"), moves=True),
    "UnbindBackward0": _of(aten.unbind.int, numbers=("dim",), moves=True),
    "IndexBackward0": _like(aten.index.Tensor, _indices, moves=True),
    "GatherBackward0": _like(aten.gather.default, _gathered, moves=True),
    "MaskedSelectBackward0": _like(aten.masked_select.default, _with_mask, moves=True),
    "EmbeddingBackward0": _like(aten.embedding.default, _embedded, moves=True),
    "CatBackward0": _like(aten.cat.default, _listed, keeps=ALL),
    "StackBackward0": _like(aten.stack.default, _listed, keeps=ALL),
    "WhereBackward0": _like(aten.where.self, _condition, "", ""),
    "ToCopyBackward0": NodeRule(("",), _cast),
}
"""Name of a node -> how its forward is computed. A node that is not here has a result that is not known, unless it has
saved it."""
