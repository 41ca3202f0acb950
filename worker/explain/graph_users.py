"""Which nodes of autograd's graph used a tensor whose gradient is bad. Called only for the first alarm of a rank.

The gradient of a tensor is the sum of the gradients that its users' backwards make. Frames show which calls took a
tensor as an argument, but not whether the code between the calls used it as well. The graph shows both:

x + f(norm(x))     x is used by NativeLayerNormBackward0 of `norm`, and by AddBackward0 of the block's own code

The search follows the graph from the tensor towards the loss, up to tensors that modules returned: their gradients have
frames. The collector decides which causes the numbers in those frames exclude.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from ...core.events.looked_again import GraphNode
from ..record.autograd_graph import MOST_NODES, AutogradGraph, GraphCalls, NodesOfCall, shapes_of

_MOST_TOLD = 200
_PASSES = re.compile(
    "(Alias|Cat|Clone|Detach|Diagonal|Flatten|MaskedFill|Movedim|Neg|Permute|Relu|ReshapeAlias|Roll|Select|Slice|Split|"
    "SplitWithSizes|Squeeze|Stack|Sum|Swapaxes|T|Transpose|Unbind|UnsafeSplit|UnsafeView|Unsqueeze|View|Where)"
    "Backward[0-9]"
)
"""Operations whose backward moves or masks gradients: finite gradients stay finite."""
_PRODUCT = "MulBackward0"
_SUMS = frozenset(("AddBackward0", "SubBackward0"))
"""They pass gradients on, unless they multiply by an alpha, or sum over repeated elements (broadcasting)."""


class BadOutput(NamedTuple):
    """An output whose gradient is bad, with the facts that identify its node."""

    module: int
    """The id of the module that returned it."""
    shape: tuple[int, ...] | None
    """None if it is not known."""
    is_only_one: bool
    """The module returned nothing else. If it returned several tensors, one may be used only inside the call itself."""
    maker: Any
    """The node that is making the gradient now; None if the numbers arrived later, from a device."""


def graph_users(graphs: Sequence[AutogradGraph], tensor: torch.Tensor | BadOutput) -> list[GraphNode]:
    """The nodes from the bad gradient of `tensor`, a parameter or an output, to the gradients above it.

    Empty if unknown. The first node made the tensor. Each node lists the positions of the nodes that used its outputs.
    `graphs` are those of one batch.
    """
    users = _GraphUsers(graphs)
    made = users.of_output(tensor) if isinstance(tensor, BadOutput) else users.of_parameter(tensor)
    return users.towards_the_loss(made) if made is not None else []


def a_leaf_of(graph: AutogradGraph) -> torch.Tensor | None:
    """A tensor that collects a gradient at the end of a graph; None if there is none, or the graph is too large."""
    known, left = set(graph.roots), list(graph.roots)
    while left and len(known) < MOST_NODES:
        node = left.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            return leaf
        further = {used for used, _ in node.next_functions if used is not None} - known
        known |= further
        left += further
    return None


class _GraphUsers:
    """The nodes of one batch's graphs, and the users of each node's outputs."""

    def __init__(self, graphs: Sequence[AutogradGraph]) -> None:
        self._calls: dict[Any, GraphCalls] = {}
        """Node -> the calls among which it was made."""
        self._users: dict[Any, list[tuple[Any, int]]] = {}
        """Node -> (a node that used it, index of the output that was used)."""
        self._copied: dict[Any, Any] = {}
        """Node of a copy that a checkpoint has made -> the node that made the original."""
        self._roots = {root for graph in graphs for root in graph.roots}
        for graph in graphs:
            self._add(graph)
        for graph in graphs:
            if graph.within is not None:
                self._join(graph)

    def _add(self, graph: AutogradGraph) -> None:
        left = [root for root in graph.roots if root not in self._users]
        self._users |= {root: [] for root in left}
        self._calls |= dict.fromkeys(left, graph.calls)
        while left and len(self._users) < MOST_NODES:
            node = left.pop()
            for used, output in node.next_functions:
                if used is None:
                    continue
                if used not in self._users:
                    self._users[used] = []
                    self._calls[used] = graph.calls
                    left.append(used)
                self._users[used].append((node, output))

    def _join(self, graph: AutogradGraph) -> None:
        """Join the graph of a stretch that a checkpoint ran again, on a copy of its inputs, to the graph around it."""
        begun = graph.within
        leaves = [
            node
            for node, calls in self._calls.items()
            if calls is graph.calls and not isinstance(getattr(node, "variable", nn.Parameter()), nn.Parameter)
        ]
        handed = [used for used, _ in getattr(begun, "next_functions", ()) if used is not None]
        if begun not in self._users or len(leaves) != 1 or len(handed) != 1:
            return  # which of several copies is which is not known
        self._users[handed[0]] = [
            each for user in self._users[handed[0]] for each in (self._users[leaves[0]] if user[0] is begun else [user])
        ]
        self._copied[leaves[0]] = handed[0]
        for root in graph.roots:
            self._users[root] += self._users[begun]

    # -- the node that made a tensor ----------------------------------------------------------------------------

    def of_parameter(self, parameter: torch.Tensor) -> Any:
        """The node that collects the gradient of a parameter."""
        return next((node for node in self._users if getattr(node, "variable", None) is parameter), None)

    def of_output(self, output: BadOutput) -> Any:
        """The node that made the output: the one whose gradient is being made now, or the only one that may be it."""
        if output.maker in self._users and self._module(output.maker) == output.module:
            return output.maker
        found = [node for node in self._users if self._module(node) == output.module]
        if output.is_only_one:
            found = [node for node in found if self._is_output(node)]
        if output.shape is not None or not output.is_only_one:
            found = [node for node in found if output.shape in shapes_of(node)]
        return found[0] if len(found) == 1 else None

    def _call(self, node: Any) -> NodesOfCall | None:
        """The innermost call that made a node; None for the script's own code and for leaves."""
        return self._calls[node].innermost(node._sequence_nr())

    def _module(self, node: Any) -> int:
        call = self._call(node)
        return call.info.id if call is not None else -1

    def _is_output(self, node: Any) -> bool:
        """Whether the node's result was used outside of its call, or began the backward."""
        call, calls = self._call(node), self._calls[node]
        if node in self._roots and not self._users[node]:
            return True
        return call is not None and any(
            self._calls[user] is not calls or not call.first <= user._sequence_nr() < call.end
            for user, _ in self._users[node]
        )

    # -- users of a node ----------------------------------------------------------------------------------------

    def towards_the_loss(self, made: Any) -> list[GraphNode]:
        """The nodes from `made` up to outputs of calls; empty if unknown."""
        if len({output for _, output in self._users[made]}) > 1:
            return []  # it returned several tensors, and which of their gradients is bad is not known
        order = [made]
        positions = {made: 0}
        told: list[GraphNode] = []
        numbers: dict[NodesOfCall | None, int] = {None: -1}
        for node in order:
            call = self._call(node)
            is_output = call is not None and node is not made and self._is_output(node)
            users = [] if is_output else [user for user, _ in self._users[node]]
            for user in users:
                if user not in positions:
                    positions[user] = len(order)
                    order.append(user)
            if len(order) > _MOST_TOLD:
                return []
            operands = self._operands(node, made) if node.name() in (*_SUMS, _PRODUCT) else []
            told.append(
                GraphNode(
                    op=node.name(),
                    module=call.info.name if call is not None else "",
                    call=numbers.setdefault(call, len(numbers) - 1),
                    users=sorted({positions[user] for user in users}),
                    output=is_output,
                    passes=_passes(node),
                    operands=operands,
                    product=node.name() == _PRODUCT and len(operands) == 2 and _keeps_shape(node),
                    opaque=isinstance(node, BackwardCFunction),
                    exponent=_exponent(node),
                )
            )
        return told

    def _operands(self, node: Any, made: Any) -> list[str]:
        """The modules that returned the inputs of a node. `made` is known to have returned an output."""
        found = []
        for each, _ in node.next_functions:
            used = self._copied.get(each, each)
            call = self._call(used) if used in self._users else None
            if call is not None and (used is made or self._is_output(used)):
                found.append(call.info.name)
        return found


def _passes(node: Any) -> bool:
    name = node.name()
    if name not in _SUMS:
        return _PASSES.fullmatch(name) is not None
    if getattr(node, "_saved_alpha", None) != 1:  # scalars that a node keeps outlive its backward
        return False
    return _keeps_shape(node)


def _exponent(node: Any) -> float | None:
    number = getattr(node, "_saved_exponent", None) if node.name() == "PowBackward0" else None
    return float(number) if isinstance(number, int | float) else None


def _keeps_shape(node: Any) -> bool:
    """Whether the inputs of a node have the shape of its result: no element was repeated."""
    shapes = [_shape(used, output) for used, output in node.next_functions if used is not None]
    return all(shape is not None and shape == _shape(node, 0) for shape in shapes)


def _shape(node: Any, output: int) -> tuple[int, ...] | None:
    """The shape of a node's result; None if torch does not report it."""
    shapes = shapes_of(node)
    return shapes[output] if output < len(shapes) else None
