"""Looks at the module of an alarm once more: its weights, its shard of them, its buffers. It waits for the device.

And at what the attributes of all modules hold: a value that one module leaves in an attribute and another takes out
is in no frame.

A weight is read once per optimizer step, and a script may change it in between. The ranks of FSDP gather a weight from
all of them, so only a rank's own shard tells whose it is. Called for the first alarm of a rank alone.
"""

from __future__ import annotations

import hashlib
import re
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from ...core.events import GraphNode, HeldValue, LookedAgain, OptimizerStep
from ...core.frames import RowKind
from ...core.values import NonFinite, name_of
from ..record.autograd_graph import AutogradGraph, GraphCalls, NodesOfCall
from ..record.names import class_of
from ..stats.device import is_on_device
from ..stats.tensor_stats import measure
from ..stats.without_modes import without_modes

_MOST = 8
_MOST_HELD = 256
"""Attributes that are measured."""
_OF_TORCH = frozenset(vars(nn.Module()))
"""Parameters, buffers, modules and hooks."""
_CONTAINERS = (list, tuple, dict, deque)


def look_again(root: nn.Module | None, module: nn.Module) -> LookedAgain:
    """What is in the module now. `root` is the model that it is a part of."""
    return without_modes(_look_again, root, module)


def _look_again(root: nn.Module | None, module: nn.Module) -> LookedAgain:
    weights = {name: _found(each) for name, each in list(module._parameters.items())[:_MOST] if each is not None}
    buffers = {name: _found(each) for name, each in list(module._buffers.items())[:_MOST] if each is not None}
    shards = {name: _found(local) for name, local in _shards(root, module)}
    return LookedAgain(
        weights={name: found for name, found in weights.items() if found},
        shards={name: found for name, found in shards.items() if found},
        buffers={name: found for name, found in buffers.items() if found not in ("", "finite")},
        autocast=_autocast(module),
        computed=[name for name, each in module._parameters.items() if each is not None and each.grad_fn is not None],
        held=list(islice(_held(root), _MOST)) if root is not None else [],
    )


def _held(root: nn.Module) -> Iterator[HeldValue]:
    """What attributes of all modules hold that is nan or +inf. A -inf is a mask's, a single inf a bound or a start."""
    for name, module, key, tensor in islice(_attributes(root), _MOST_HELD):
        found = _found(tensor)
        if found not in ("", "finite", "-inf") and not (found == "+inf" and tensor.numel() == 1):
            yield HeldValue(name, class_of(module), key, found)


def _attributes(root: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """(module's name, module, attribute, tensor) of all attributes that are tensors, or hold some in a container."""
    for name, module in root.named_modules():
        for key, value in list(vars(module).items()):
            if key in _OF_TORCH:
                continue
            if isinstance(value, torch.Tensor):
                yield name, module, key, value
            elif isinstance(value, _CONTAINERS):
                inside = value.values() if isinstance(value, dict) else value
                for each in list(islice(inside, _MOST)):
                    if isinstance(each, torch.Tensor):
                        yield name, module, key, each


def _found(tensor: torch.Tensor) -> str:
    """`finite`, `nan`, `+inf`, `-inf`; "" if it cannot be measured."""
    numbers = measure(tensor)
    return name_of(NonFinite(numbers.meta & 0xFF)) if numbers.kind == RowKind.MEASURED else ""


def _shards(root: nn.Module | None, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(parameter, this rank's part of it) of a module that FSDP2 shards.

    Within a forward the module holds the whole parameter. The shard is known to the module that FSDP was applied to:
    internals of torch 2.6 to 2.13, so whatever is missing there means that nothing is known.
    """
    for holder in root.modules() if root is not None else ():
        state: Any = getattr(holder, "_get_fsdp_state", None)
        group: Any = getattr(state(), "_fsdp_param_group", None) if callable(state) else None
        for held in getattr(group, "fsdp_params", None) or ():
            info = getattr(held, "_module_info", None)
            local = getattr(getattr(held, "sharded_param", None), "_local_tensor", None)
            if info is not None and info.module is module and isinstance(local, torch.Tensor):
                yield info.param_name, local


def _autocast(module: nn.Module) -> str:
    """The dtype that autocast computes in, where it is on; else ""."""
    device = next((each.device.type for each in module.parameters(recurse=False)), "cpu")
    try:
        on = torch.is_autocast_enabled(device)
        return str(torch.get_autocast_dtype(device)).removeprefix("torch.") if on else ""
    except (RuntimeError, TypeError):  # a device without autocast, or torch 2.5
        return ""


# What has used a tensor whose gradient is bad, as autograd's graph has it. Called for the first alarm of a rank alone.
#
# The gradient of a tensor is the sum of what its users' backwards make. A module's frame shows which calls were handed
# a tensor, and not whether the code between the calls has used it as well. The graph shows both:
#
# x + f(norm(x))     x is used by NativeLayerNormBackward0 of `norm`, and by AddBackward0 of the block's own code
#
# The graph is followed from the tensor towards the loss, up to tensors that modules have returned: there are frames of
# their gradients. What the numbers in those frames then exclude is for the collector to say.

_MOST_NODES = 200_000
_MOST_TOLD = 200
_PASSES = re.compile(
    "(Alias|Cat|Clone|Detach|Diagonal|Flatten|MaskedFill|Movedim|Neg|Permute|Relu|ReshapeAlias|Roll|Select|Slice|Split|"
    "SplitWithSizes|Squeeze|Stack|Sum|Swapaxes|T|Transpose|Unbind|UnsafeSplit|UnsafeView|Unsqueeze|View|Where)"
    "Backward[0-9]"
)
"""Operations whose backward moves or masks gradients: of finite ones it makes finite ones."""
_PRODUCT = "MulBackward0"
_SUMS = frozenset(("AddBackward0", "SubBackward0"))
"""They pass gradients on, unless they multiply by an alpha, or sum over what they have repeated (broadcasting)."""


class BadOutput(NamedTuple):
    """An output whose gradient is bad, and what is known of it to find its node."""

    module: int
    """The id of the module that returned it."""
    shape: tuple[int, ...] | None
    """None if it is not known."""
    is_only_one: bool
    """The module returned nothing else. Of several outputs one may be used in the call itself, and nowhere else."""
    maker: Any
    """The node that is making the gradient now; None if its numbers have come later, from a device."""


def graph_users(graphs: Sequence[AutogradGraph], tensor: torch.Tensor | BadOutput) -> list[GraphNode]:
    """What leads from the bad gradient of `tensor`, a parameter or an output, to the gradients above it.

    Empty if that is not known. The first node is the one that has made the tensor. Each node names those that have used
    what it returned by their positions in the list. `graphs` are those of one batch.
    """
    users = _GraphUsers(graphs)
    made = users.of_output(tensor) if isinstance(tensor, BadOutput) else users.of_parameter(tensor)
    return users.towards_the_loss(made) if made is not None else []


class _GraphUsers:
    """The nodes of one batch's graphs, and what has used what each of them returned."""

    def __init__(self, graphs: Sequence[AutogradGraph]) -> None:
        self._calls: dict[Any, GraphCalls] = {}
        """Node -> the calls among which it was made."""
        self._users: dict[Any, list[tuple[Any, int]]] = {}
        """Node -> (node that has used it, which of its outputs that one used)."""
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
        while left and len(self._users) < _MOST_NODES:
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
        """A checkpoint has run a stretch again, on a copy of what it was handed, and goes back through that."""
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
            found = [node for node in found if output.shape in _shapes(node)]
        return found[0] if len(found) == 1 else None

    def _call(self, node: Any) -> NodesOfCall | None:
        """The innermost call that made a node; None for the script's own code and for leaves."""
        return self._calls[node].innermost(node._sequence_nr())

    def _module(self, node: Any) -> int:
        call = self._call(node)
        return call.info.id if call is not None else -1

    def _is_output(self, node: Any) -> bool:
        """Whether what the node returned was used outside of its call, or began the backward."""
        call, calls = self._call(node), self._calls[node]
        if node in self._roots and not self._users[node]:
            return True
        return call is not None and any(
            self._calls[user] is not calls or not call.first <= user._sequence_nr() < call.end
            for user, _ in self._users[node]
        )

    # -- what has used it ---------------------------------------------------------------------------------------

    def towards_the_loss(self, made: Any) -> list[GraphNode]:
        """The nodes from one up to outputs of calls; empty if that is not known."""
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
                )
            )
        return told

    def _operands(self, node: Any, made: Any) -> list[str]:
        """The modules that returned what a node was handed. `made` is known to have returned an output."""
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


def _keeps_shape(node: Any) -> bool:
    """Whether what a node was handed has the shape of what it returned: nothing was repeated."""
    shapes = [_shape(used, output) for used, output in node.next_functions if used is not None]
    return all(shape is not None and shape == _shape(node, 0) for shape in shapes)


def _shapes(node: Any) -> list[tuple[int, ...]]:
    """The shapes of all that a node returned, as far as torch tells."""
    return [tuple(returned.shape) for returned in getattr(node, "_input_metadata", ())]


def _shape(node: Any, output: int) -> tuple[int, ...] | None:
    """The shape of what a node returned; None if torch does not tell."""
    shapes = _shapes(node)
    return shapes[output] if output < len(shapes) else None


# The digest of a batch's tensors, so that the sample behind an overflow can be found in the data again.

_BYTES = 8
_MOST_BYTES = 1 << 28
"""Of a larger tensor there is no digest: it would take a second."""
_MOST_DIGESTED = 16


def batch_digest(arguments: list[tuple[str, Any]]) -> dict[str, str]:
    """Role -> digest, of the arguments that are tensors in host memory.

    It is `hashlib.blake2b(tensor.contiguous().view(torch.uint8).numpy(), digest_size=8).hexdigest()`.
    """
    found: dict[str, str] = {}
    for role, leaf in arguments:
        if len(found) < _MOST_DIGESTED and isinstance(leaf, torch.Tensor) and _is_plain(leaf):
            data: Any = leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            found[role] = hashlib.blake2b(data, digest_size=_BYTES).hexdigest()
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and not is_on_device(tensor)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and 0 < tensor.numel() * tensor.element_size() <= _MOST_BYTES
    )


# Whose optimizer step wrote a weight, and with which settings: evidence for a weight that is bad after it.

_KEPT = 16
"""Steps. The numbers of a step on a device arrive a batch later, in which several optimizers may step."""


class _StepFrames(NamedTuple):
    number: int
    """Steps finished after it."""
    optimizer: weakref.ref[Any]
    groups: list[dict[str, float]]


class OptimizerSteps:
    """The last steps of a rank."""

    def __init__(self) -> None:
        self._steps: deque[_StepFrames] = deque(maxlen=_KEPT)

    def add(self, number: int, optimizer: Any) -> None:
        """Remember a step. `number`: steps finished, with this one. Waits for no device."""
        groups = [_numbers(group) for group in optimizer.param_groups]
        self._steps.append(_StepFrames(number, weakref.ref(optimizer), groups))

    def last(self) -> OptimizerStep | None:
        """The last step, with the settings of its first parameter group; None before the first."""
        if not self._steps:
            return None
        _, reference, groups = self._steps[-1]
        optimizer = reference()
        if optimizer is None:
            return None
        return OptimizerStep(_name_of(optimizer), groups[0] if groups else {})

    def find(self, since: int, parameter: torch.Tensor) -> OptimizerStep | None:
        """The first step on a parameter after step `since`; None if it is not known."""
        for number, reference, groups in self._steps:
            optimizer = reference()
            if number <= since or optimizer is None:
                continue
            for group, settings in zip(optimizer.param_groups, groups, strict=False):
                if any(held is parameter for held in group["params"]):
                    return OptimizerStep(_name_of(optimizer), settings)
        return None


def _name_of(optimizer: Any) -> str:
    """`torch.optim.adamw.AdamW`; one that TorchScript runs has a name of its own (hooks/rpc_optimizer.py)."""
    return getattr(optimizer, "gpuwatch_name", "") or f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _numbers(group: dict[str, Any]) -> dict[str, float]:
    """The settings of a parameter group that are numbers.

    >>> _numbers({"params": [], "lr": 0.1, "betas": (0.9, 0.99), "fused": None})
    {'lr': 0.1, 'betas[0]': 0.9, 'betas[1]': 0.99}
    """
    found: dict[str, float] = {}
    for key, value in group.items():
        if isinstance(value, tuple):
            for position, part in enumerate(value):
                if isinstance(part, int | float):
                    found[f"{key}[{position}]"] = float(part)
        elif isinstance(value, int | float) or _is_on_host(value):
            found[key] = float(value)
    return found


def _is_on_host(value: Any) -> bool:
    """A learning rate may be a tensor. One on a device is not read: that waits for the device."""
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1
