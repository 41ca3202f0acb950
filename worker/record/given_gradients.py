"""The gradients that the outputs of a root were given by the backward that is running, for a second run of it.

They are kept by reference, and only until the backward has ended and its numbers have arrived, or until the next step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .autograd_graph import MOST_NODES, AutogradGraph
from .plain_tensor import version_of

MOST_BYTES = 64 << 20
"""A larger gradient is not kept alive: the script's memory is for its training."""


_GONE = "the gradients of the model's outputs were gone"


class GivenGradient(NamedTuple):
    """The gradient of one output, with what other uses of that output within the root have added to it."""

    node: int
    """The number of the node that made the output."""
    gradient: torch.Tensor | None
    """None: it is not kept."""
    version: int


class GivenGradients:
    """Those of the outputs of the latest backward, by the page of the root's call and the place of the output."""

    def __init__(self) -> None:
        self.is_on = False
        """A second run may ask for them."""
        self._of_page: dict[int, dict[int, GivenGradient]] = {}

    def begins(self, page: int) -> None:
        """A backward has reached the first output of the root of this page."""
        self._of_page.pop(page, None)

    def add(self, page: int, place: int, node: Any, gradient: torch.Tensor) -> None:
        """The backward has reached an output. `node`: the one that runs, which has made that output."""
        is_plain = type(gradient) is torch.Tensor and gradient.layout is torch.strided
        kept = gradient if is_plain and gradient.nbytes <= MOST_BYTES else None
        self._of_page.setdefault(page, {})[place] = GivenGradient(node._sequence_nr(), kept, version_of(gradient))

    def forget(self) -> None:
        """No second run needs them."""
        self._of_page.clear()

    def from_outside(self, graph: AutogradGraph) -> tuple[dict[int, torch.Tensor], str]:
        """(gradient of each output that the backward has entered the root by, why they are not known).

        An output from which the root makes another one is entered only if code outside has used it, too.
        """
        found = self._of_page.get(graph.calls.page, {})
        if not found:
            return {}, _GONE
        nodes = _entered(graph, {each.node for each in found.values()})
        if nodes is None:
            return {}, "the loss was made of tensors of the model that it had not returned"
        given = {place: each for place, each in found.items() if each.node in nodes}
        kept = {place: each.gradient for place, each in given.items() if each.gradient is not None}
        if len(kept) < len(given):
            most = f"{MOST_BYTES >> 20} MiB"
            return (
                {},
                f"the gradient of an output of the model is larger than {most}, or no plain tensor, and was not kept",
            )
        if any(version_of(gradient) != given[place].version for place, gradient in kept.items()):
            return {}, "the gradient of an output of the model was changed in place"
        return kept, "" if kept else _GONE


def _entered(graph: AutogradGraph, outputs: set[int]) -> set[int] | None:
    """Which of these nodes the backward has reached from outside of the root's call; None if it went in elsewhere."""
    if not graph.calls.calls:
        return None
    _, first, end = graph.calls.calls[-1]
    known, left, found = set(graph.roots), list(graph.roots), set()
    while left:
        node = left.pop()
        number = node._sequence_nr()
        if number in outputs:
            found.add(number)
        elif first <= number < end:
            return None
        elif number >= first:  # else it was made before the call, and leads to nothing of it
            new = {used for used, _ in node.next_functions if used is not None} - known
            known |= new
            left += new
        if len(known) > MOST_NODES:
            return None
    return found
