"""Whose own code lies between a bad value of a forward and the tensors that frames show, from autograd's graph.

A frame shows the arguments and results of a call. No frame shows a tensor that goes from one module to another through
an attribute, a list or a closure, and the module that takes it out looks like its maker:

    x + encoder.kept    x is an argument of a call; encoder.kept was made by MulBackward0 of `encoder`, not returned

The search follows the graph backwards from the bad tensor, up to tensors that frames show. While the forward runs,
its tensors are available. If the numbers arrive later, from a device, only the graph of its backward is, and shapes
identify the call of a node. Called only for the first alarm of a rank.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from ...core.events.looked_again import OwnCodeModule
from ...core.frames import Frame, Row, RowKind
from ...core.roles import RoleKind
from ..record.autograd_graph import MOST_NODES, AutogradGraph, GraphCalls, NodesOfCall, next_node, outwards, shapes_of
from ..record.names import CALL, inputs_of, outputs_of
from ..record.roots import ModuleInfo

_MOST_TOLD = 8
_KINDS = (RoleKind.INPUT, RoleKind.OUTPUT)
_NO_TENSORS = (RowKind.NONE, RowKind.NOT_A_TENSOR)


class ShownTensors(NamedTuple):
    """How many tensors the frames of a page show for the calls of each module, by its name."""

    handed: Mapping[str, int]
    returned: Mapping[str, int]
    """Without its arguments, and without the results of calls inside of it."""


def shown_in(frames: Iterable[Frame]) -> ShownTensors:
    """Counts what frames show."""
    handed: Counter[str] = Counter()
    returned: Counter[str] = Counter()
    known: set[int] = set()
    for frame in sorted(frames, key=lambda frame: frame.index):
        given = [row.value for row in frame.inputs if row.kind not in _NO_TENSORS]
        handed[frame.module] += len(given)
        made = [row.value for row in frame.outputs if row.kind not in _NO_TENSORS and row.value not in given]
        returned[frame.module] += sum(value < 0 or value not in known for value in made)
        known.update(made)
    return ShownTensors(handed, returned)


def explaining_row(frame: Frame) -> Row | None:
    """The row that explains an alarm of a forward: the first bad one. Arguments come before results."""
    bad = [row for row in frame.rows if not row.finite and row.role_kind in _KINDS]
    return next((row for row in bad if not row.only_neginf), bad[0] if bad else None)


def sources_now(
    row: Row,
    named: str,
    module: nn.Module,
    hook: CodeType,
    calls: GraphCalls,
    running: Sequence[tuple[ModuleInfo, int]],
    shown: ShownTensors,
) -> list[OwnCodeModule]:
    """The sources of a row of a call of `module`, which is called `named`, in the forward that is running.

    `hook` is the code of the hook that torch is calling; its frame has the arguments and results of a call that has
    just returned. That is the call of `module`, or one around it, which showed that the value spread. `calls` have
    returned, `running` have not, the outermost first, each with the number of its first node. Empty if the graph does
    not show the sources.
    """
    frame = outwards(sys._getframe(), lambda frame: frame.f_code is hook)
    if frame is None:
        return []
    arguments, returned = inputs_of(frame.f_locals["args"], frame.f_locals["kwargs"]), frame.f_locals["output"]
    handed = {leaf.grad_fn for _, leaf in arguments if isinstance(leaf, torch.Tensor)} | _arguments(
        [info for info, _ in running]
    )
    end = next_node() + 1
    closed = {(info.id, first) for info, first, _ in calls.calls}
    still = [(info, first, end) for info, first in running[::-1] if (info.id, first) not in closed]
    whole = GraphCalls(calls.page)
    whole.calls = [*calls.calls, *still]
    outputs = outputs_of(returned)
    if frame.f_locals["module"] is not module:
        roots = [leaf.grad_fn for _, leaf in outputs if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
        return _GraphSources(whole, roots, shown, handed).of_row(row, named)
    tensor = next((leaf for role, leaf in [*arguments, *outputs] if role == row.role), None)
    if not isinstance(tensor, torch.Tensor) or tensor.grad_fn is None:
        return []
    exact = ShownTensors({}, shown.returned)  # the arguments of this call and those around it are known
    return _GraphSources(whole, [tensor.grad_fn], exact, handed).of(tensor.grad_fn)


def sources_later(row: Row, module: str, graph: AutogradGraph, shown: ShownTensors) -> list[OwnCodeModule]:
    """The sources of a row of a call of the module of this name, from the graph of its batch's backward."""
    return _GraphSources(graph.calls, graph.roots, shown, set()).of_row(row, module)


def sources_of_loss(graph: AutogradGraph, shown: ShownTensors) -> list[OwnCodeModule]:
    """The sources of what a backward has begun from; empty if it used nothing but what frames show."""
    sources = _GraphSources(graph.calls, graph.roots, shown, set())
    return [each for root in graph.roots for each in sources.of(root)][:_MOST_TOLD]


class _GraphSources:
    def __init__(self, calls: GraphCalls, roots: Iterable[Any], shown: ShownTensors, handed: AbstractSet[Any]) -> None:
        """`roots` are the nodes from which on the graph is known, and `handed` those that are known to be shown."""
        self._calls = calls
        self._left: dict[str, set[Any]] = {}
        """Module -> nodes of its calls that were used outside of them."""
        self._entered: dict[str, set[Any]] = {}
        """Module -> nodes from outside that were used in its calls."""
        for root in roots:
            made = self._call(root)
            if made is not None:
                self._left.setdefault(made.info.name, set()).add(root)
        for user, used in _edges(roots, frozenset()):
            self._add(user, used)
        self._shown = set(handed)
        for name, nodes in self._left.items():
            if len(nodes) <= shown.returned.get(name, 0):
                self._shown |= nodes
        for name, nodes in self._entered.items():
            if len(nodes) <= shown.handed.get(name, 0):
                self._shown |= {node for node in nodes if self._is_of_caller(node, name)}

    def _is_of_caller(self, node: Any, module: str) -> bool:
        """Whether the own code of a module around the call made a node, as for an argument of the call."""
        made = self._call(node)
        return made is None or made.info.name == "" or module.startswith(f"{made.info.name}.")

    def _add(self, user: Any, used: Any) -> None:
        made, taken = self._call(used), self._call(user)
        if made is not None and not _is_in(user, made):
            self._left.setdefault(made.info.name, set()).add(used)
        if taken is not None and not _is_in(used, taken):
            self._entered.setdefault(taken.info.name, set()).add(used)

    def _call(self, node: Any) -> NodesOfCall | None:
        """The innermost call that made a node."""
        return self._calls.innermost(node._sequence_nr())

    def of_row(self, row: Row, module: str) -> list[OwnCodeModule]:
        """As `of`, for the only node that may have made a row's tensor; empty if there are several, or none."""
        nodes = (self._entered if row.role_kind is RoleKind.INPUT else self._left).get(module, set())
        found = [node for node in nodes if row.shape is not None and tuple(row.shape) in shapes_of(node)]
        return self.of(found[0]) if len(found) == 1 else []

    def of(self, start: Any) -> list[OwnCodeModule]:
        """The modules, the earliest first, whose own code lies behind a node."""
        found = {start, *(used for _, used in _edges([start], self._shown - {start}))}
        own: dict[str, OwnCodeModule] = {}
        for node in sorted(found, key=lambda node: node._sequence_nr()):
            call = self._call(node)
            if call is not None and not call.info.is_wrapper:
                own.setdefault(call.info.name, OwnCodeModule(call.info.name, call.info.cls, node.name()))
        return list(own.values())[:_MOST_TOLD]


def _edges(starts: Iterable[Any], stops: AbstractSet[Any]) -> Iterator[tuple[Any, Any]]:
    """(user, node that it has used) from some nodes backwards, up to leaves and `stops`, without these."""
    left = list(starts)
    seen = set(left)
    while left and len(seen) < MOST_NODES:
        user = left.pop()
        for used, _ in user.next_functions:
            if used is None or used in stops or getattr(used, "variable", None) is not None:
                continue
            yield user, used
            if used not in seen:
                seen.add(used)
                left.append(used)


def _is_in(node: Any, call: NodesOfCall) -> bool:
    return bool(call.first <= node._sequence_nr() < call.end)


def _arguments(running: Sequence[ModuleInfo]) -> set[Any]:
    """The nodes that made the arguments of the running calls, which will be in their frames."""
    modules = {id(info.ref()) for info in running}
    found: set[Any] = set()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CALL and id(frame.f_locals.get("self")) in modules:
            leaves = inputs_of(frame.f_locals["args"], frame.f_locals["kwargs"])
            found |= {leaf.grad_fn for _, leaf in leaves if isinstance(leaf, torch.Tensor)}
        frame = frame.f_back
    return found
