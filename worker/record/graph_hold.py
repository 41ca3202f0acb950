"""Whether a graph may be kept beyond its batch, until the numbers of its gradients have arrived from a device.

A backward frees the tensors that its nodes have saved. What is left of them are names, shapes and edges: about 1 kB a
node. Three things would keep memory of the script's alive while the next batch needs it, so that a graph with one of
them is let go of when that begins:

- the script keeps the graph (retain_graph), or has gone back through a part of it: saved tensors are still there;
- a torch.autograd.Function keeps more than plain numbers on its `ctx`: `ctx.x = x` is freed with the node;
- a leaf is no parameter: a node holds what a reentrant checkpoint was handed, or an input that has a gradient.

To look at all nodes takes about a microsecond for each. A model is looked at once, and again in one of 64 batches.
"""

from __future__ import annotations

import re
import weakref
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter

from .graph_calls import Graph

_AGAIN = 64
_MOST_KNOWN = 256
_MOST_NODES = 200_000
_TORCHS_OWN = re.compile(r"(\w+Backward\d*|AccumulateGrad|torch::autograd::(AccumulateGrad|CopySlices|CopyBackwards))")
"""Nodes of torch's own. Those of a custom operator in C++ may keep tensors that nobody can see."""
_PLAIN = (type(None), bool, int, float, complex, str, type, torch.dtype, torch.device, torch.layout, weakref.ref)


class GraphHold:
    """What is known of the graphs of a rank's models."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[bool, int]] = {}
        """(calls, roots) of a graph -> (whether it may be kept, for how many more graphs like it)."""

    def may_keep(self, graph: Graph) -> bool:
        """Whether a graph whose backward has ended holds nothing of the script's."""
        if graph.kept or graph.within is not None:
            return False
        key = len(graph.calls.calls), len(graph.roots)
        may, left = self._known.get(key, (False, 0))
        if not left:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            may, left = holds_nothing(graph.roots), _AGAIN
        self._known[key] = may, left - 1
        return may


def holds_nothing(roots: tuple[Any, ...]) -> bool:
    """Whether no node up to these roots keeps a tensor of the script's after its backward, as far as can be seen."""
    known = set(roots)
    left = list(roots)
    while left:
        node = left.pop()
        if isinstance(node, BackwardCFunction):
            if not all(map(_is_plain, vars(node).values())):
                return False
        elif _TORCHS_OWN.fullmatch(node.name()) is None:
            return False
        if not isinstance(getattr(node, "variable", None), Parameter | None):
            return False
        for used, _ in node.next_functions:
            if used is not None and used not in known:
                known.add(used)
                left.append(used)
        if len(known) > _MOST_NODES:
            return False
    return True


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN) or type(value).__module__.startswith("torch.distributed.")
