"""An independent look at where a non-finite value is made, to check the truths with: slow, and by other means.

`run.py --plain` starts the scripts under torchrun with this instead of gpuwatch. It finds the first module call with
finite inputs and weights and a non-finite output; and, with torch's full backward hooks, the first module whose
backward turned finite gradients into a non-finite one. gpuwatch itself uses neither such hooks nor isfinite.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils._pytree import tree_leaves

VARIABLE = "SCENARIO_WITNESS"


def _bad(values: Any, worse_than_neginf: bool = False) -> bool:
    for value in tree_leaves(values):
        if not isinstance(value, torch.Tensor) or value.is_meta or value.layout != torch.strided or value.is_quantized:
            continue
        value = value.detach()
        value = value.to_local() if hasattr(value, "to_local") else value
        if value.is_nested or not (value.is_floating_point() or value.is_complex()) or value.element_size() == 1:
            continue
        bad = ~value.isfinite()
        if worse_than_neginf and not value.is_complex():
            bad &= value != float("-inf")
        if bool(bad.any()):
            return True
    return False


class Witness:
    """Says the first birth of a non-finite value in a forward and the first in a backward, as one line each."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.depth = 0
        self.calls: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self.said: set[str] = set()
        self.handed: list[bool] = []
        self.root = -1
        self.recorded: set[int] = set()

    def start(self) -> None:
        hooks.register_module_forward_pre_hook(self.enter)
        hooks.register_module_forward_hook(self.leave, with_kwargs=True, always_call=True)
        hooks.register_module_full_backward_hook(self.backward)

    def say(self, phase: str, module: nn.Module, what: str) -> None:
        if phase in self.said:
            return
        self.said.add(phase)
        name, batch = self.names.get(id(module), "?"), self.calls.get(self.root, 0) - 1
        sys.stdout.write(
            f"witness rank={self.rank} phase={phase} module={name} class={type(module).__name__} "
            f"batch={batch} what={what.replace(' ', '_')}\n"
        )
        sys.stdout.flush()

    def enter(self, module: nn.Module, args: Any) -> None:
        recomputed = torch._C._current_graph_task_id() != -1
        if self.depth == 0 and not recomputed:
            self.root = id(module)
            self.calls[self.root] = self.calls.get(self.root, 0) + 1
            inner = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
            inner = getattr(inner, "_orig_mod", inner)
            for name, child in inner.named_modules():
                self.names[id(child)] = name
                for role, parameter in child.named_parameters(recurse=False):
                    if parameter.requires_grad and parameter.is_leaf and id(parameter) not in self.recorded:
                        self.recorded.add(id(parameter))
                        parameter.register_hook(lambda grad, child=child, role=role: self.gradient(child, role, grad))
        self.depth += 1

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        self.depth -= 1  # after an exception torch calls this without the keywords
        weights_bad = _bad(list(module.parameters(recurse=False)))
        if weights_bad:
            self.say("weight", module, "a weight was bad in its forward")
        if _bad(output, worse_than_neginf=True) and not _bad([args, kwargs]) and not weights_bad:
            self.say("forward", module, "finite inputs and weights, output not")

    def backward(self, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        if _bad(grad_input) and not _bad(grad_output):
            self.say("backward", module, "finite grad output, grad input not")

    def gradient(self, module: nn.Module, role: str, grad: torch.Tensor) -> None:
        if _bad(grad):
            self.say("gradient", module, f"the gradient of {role} was bad")


def start(rank: int) -> None:
    """Watch this process."""
    Witness(rank).start()
