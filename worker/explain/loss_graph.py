"""Finds the operation that made a bad loss, by arithmetic, in front of the loss's backward.

    p = torch.softmax(scores, 1)        p holds a 0
    loss = -(y * torch.log(p)).sum()    loss is nan

Until a backward runs, autograd's nodes hold what their derivatives need. From the loss on, each bad result is computed
again from the operands of its node, and the bad one among these is followed. The search ends at a node whose operands
are all finite: its operation has made the value. Where an operand is not to be had, or several operations have made bad
values, no operation is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from ...core.events.alarm_evidence import BadOperation
from ...core.signal_errors import from_outside, suppress_own
from ..record.bad_elements import pattern_of
from .kept_loss import KeptLoss
from .node_operations import NODE_RULES, NodeCall, NodeRule
from .operands import has_numbers, number_of, numbers_of
from .operation_trials import with_trials
from .saved_operands import saved_tensor

_MOST_NODES = 2048
"""Nodes whose results are computed, and nodes that are followed."""
_MOST_ELEMENTS = 1 << 26
"""Of all results that are computed."""
_RESULTS = ("result", "result0")

Edge = tuple[Any, int]
"""(node, number of its result)"""


class LossOrigin:
    """The node whose operation made a bad loss, and that operation."""

    def __init__(self, node: Any, operation: BadOperation, handed: Sequence[Edge]) -> None:
        self.node, self.operation, self.handed = node, operation, handed
        """`handed`: the nodes that made its operands; (None, 0) for a tensor of the script's without a gradient."""


def origin_of(loss: torch.Tensor | KeptLoss) -> LossOrigin | None:
    """What made the nan or inf of a tensor out of finite numbers; None if that is not certain. Waits for the device."""
    with suppress_own(Exception):  # an operation that this torch computes in another way, or no memory
        return _GraphSearch().origin(loss)
    return None


class _GraphSearch:
    def __init__(self) -> None:
        self._results: dict[Any, tuple[torch.Tensor | None, ...]] = {}
        self._elements = 0

    def origin(self, loss: torch.Tensor | KeptLoss) -> LossOrigin | None:
        left, found = [(loss.grad_fn, loss.output_nr, True)], dict[Any, LossOrigin]()
        seen: set[Edge] = set()
        while left:
            node, place, is_bad = left.pop()
            if node is None or len(seen) > _MOST_NODES:
                return None  # a tensor that needs no gradient: no node made it
            if (node, place) in seen:
                continue
            seen.add((node, place))
            further, are_bad = self._bad_before(node, place)
            left += [(*edge, are_bad) for edge in further]
            if further:
                continue
            made = self._made_by(node, place)
            if made is not None:
                found[node] = made
            elif is_bad:
                return None
        if len({each.operation.op for each in found.values()}) != 1:
            return None
        return min(found.values(), key=lambda each: each.node._sequence_nr())

    def _bad_before(self, node: Any, place: int) -> tuple[list[Edge], bool]:
        """(the operands that made a result of a node bad, whether it is certain that they are bad themselves).

        None of them if all are finite. Of those that may be bad, each makes the result bad if it is. A node of None
        stands for a tensor that needs no gradient, and for operands of which it is not certain which one it is.
        """
        rule = NODE_RULES.get(node.name())
        if rule is None:
            return [], True
        edges, operands = _edges_of(node, rule), self._operands(node, rule)
        bad = [at for at, each in enumerate(operands) if each is not None and _is_bad(each)]
        if not bad:
            unknown = [edges[at] for at, each in enumerate(operands[: rule.keeps]) if each is None and edges[at][0]]
            is_moved = rule.moves and len(edges) == 1 and operands[0] is None
            return (edges, True) if is_moved else (unknown, False)
        if any(at >= rule.keeps for at in bad):
            if any(each is None for each in operands):
                return [(None, 0)], True
            bad = [at for at in bad if self._is_enough(node, rule, operands, at, place)]
        return [edges[at] for at in bad] or [(None, 0)], True

    def _is_enough(self, node: Any, rule: NodeRule, operands: list[Any], at: int, place: int) -> bool:
        """Whether one bad operand makes the result bad while the others are finite."""
        given = [each if number == at else _cured(each) for number, each in enumerate(operands)]
        result = self._run(node, rule, given)[place]
        return result is not None and _is_bad(result)

    def _made_by(self, node: Any, place: int) -> LossOrigin | None:
        """The operation of a node, if it has made something bad of operands that are all there, and finite."""
        rule = NODE_RULES.get(node.name())
        operands = self._operands(node, rule) if rule is not None else [None]
        if rule is None or any(each is None for each in operands):
            return None
        call = rule.call(node, tuple(operands))
        result = self._run(node, rule, operands)[place]
        if result is None or not _is_bad(result):
            return None
        return LossOrigin(node, _described(call, result), _edges_of(node, rule))

    # -- the results of nodes -----------------------------------------------------------------------------------

    def _operands(self, node: Any, rule: NodeRule) -> list[torch.Tensor | None]:
        """What the forward of a node was handed; None for what is not to be had."""
        pairs = [(_saved_in(node, name), edge) for name, edge in _named_edges(node, rule)]
        found = [saved if saved is not None else self._result(*edge) for saved, edge in pairs]
        return [_as_handed(node, each) for each in found]

    def _result(self, node: Any, place: int) -> torch.Tensor | None:
        """What a node returned, computed from what the nodes before it returned, as far as that is needed."""
        left = [node]
        while left:
            each = left[-1]
            if each is None or each in self._results:
                left.pop()
                continue
            if len(self._results) > _MOST_NODES:
                return None
            waits = [before for before in self._needed(each) if before not in self._results]
            if waits:
                left += waits
                continue
            self._results[each] = self._computed(each)
            left.pop()
        results = self._results.get(node, ())
        return results[place] if place < len(results) else None

    def _needed(self, node: Any) -> Iterator[Any]:
        """The nodes before this one whose results its own is computed from."""
        rule = NODE_RULES.get(node.name())
        if rule is None or _whole(node) is not None:
            return
        for name, (before, _) in _named_edges(node, rule):
            if before is not None and _saved_in(node, name) is None:
                yield before

    def _computed(self, node: Any) -> tuple[torch.Tensor | None, ...]:
        known = _whole(node)
        if known is not None:
            return (known,)
        rule = NODE_RULES.get(node.name())
        if rule is None:
            return ()
        operands = self._operands(node, rule)
        return self._run(node, rule, operands) if all(each is not None for each in operands) else ()

    def _run(self, node: Any, rule: NodeRule, operands: Sequence[Any]) -> tuple[torch.Tensor | None, ...]:
        """Compute what a node returned. None in place of what is not of the shape or dtype that it was then."""
        count = sum(each.numel() for each in operands)
        shapes = node._input_metadata
        self._elements += count + sum(math.prod(each.shape) for each in shapes)
        if self._elements > _MOST_ELEMENTS:
            raise MemoryError("the graph is too large to be computed again")
        call = rule.call(node, tuple(operands))
        try:
            made = call.func(*call.args, **call.kwargs)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            if from_outside(error):
                raise
            return (None,) * len(shapes)
        results = list(made) if isinstance(made, list | tuple) else [made]
        pairs = zip(results, shapes, strict=False)
        return tuple(each if [*each.shape] == [*was.shape] and each.dtype is was.dtype else None for each, was in pairs)


def _edges_of(node: Any, rule: NodeRule) -> list[Edge]:
    edges = list(node.next_functions)
    return edges[: len(rule.operands)] if len(rule.operands) > 1 else edges


def _named_edges(node: Any, rule: NodeRule) -> list[tuple[str, Edge]]:
    """Each operand's name in the node, "" where the node has none for it, and what made the operand."""
    edges = _edges_of(node, rule)
    names = rule.operands if len(rule.operands) == len(edges) else [""] * len(edges)
    return list(zip(names, edges, strict=True))


def _saved_in(node: Any, name: str) -> torch.Tensor | None:
    """A tensor that a node has saved under a name; None if there is none, or it was changed since."""
    if not name:
        return None
    try:
        return saved_tensor(node, name)
    except RuntimeError as error:
        if from_outside(error):
            raise
        return None


def _whole(node: Any) -> torch.Tensor | None:
    """The result of a node, if that is there as it is: a leaf, or a result that was saved."""
    leaf = getattr(node, "variable", None)
    if isinstance(leaf, torch.Tensor):
        return leaf.detach()
    return next((saved for name in _RESULTS if (saved := _saved_in(node, name)) is not None), None)


def _as_handed(node: Any, operand: torch.Tensor | None) -> torch.Tensor | None:
    """A number of Python's own is saved as a tensor of float64."""
    if operand is None or operand.dim() or not operand.dtype.is_floating_point:
        return operand
    dtype = node._input_metadata[0].dtype
    is_number = operand.dtype is torch.float64 and dtype.is_floating_point
    return operand.to(dtype) if is_number else operand


def _is_bad(tensor: torch.Tensor) -> bool:
    return has_numbers(tensor) and not bool(tensor.isfinite().all())


def _cured(tensor: torch.Tensor) -> torch.Tensor:
    return torch.where(tensor.isfinite(), tensor, torch.ones_like(tensor)) if has_numbers(tensor) else tensor


def _described(call: NodeCall, result: torch.Tensor) -> BadOperation:
    """The operation with its numbers, and its trials: alone, in float64 and as it was."""
    inputs, output = list(_inputs_of(call.args)), numbers_of(result)[0]
    found = BadOperation(str(call.func), "", "", 0, "", inputs, output, pattern_of(result))
    with suppress_own(Exception):  # no memory for a trial: the operation is known all the same
        return with_trials(found, result, call.func, call.args, dict(call.kwargs))
    return found


def _inputs_of(args: Iterable[Any]) -> Iterator[Any]:
    for value in args:
        if isinstance(value, float):
            yield number_of(value)
        for leaf in _pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and has_numbers(leaf):
                yield numbers_of(leaf)[0]
