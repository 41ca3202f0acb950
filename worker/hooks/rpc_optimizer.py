"""Steps of RPC's DistributedOptimizer, which run in threads of RPC: none of torch's step hooks sees them.

Up to torch 2.13, the process that holds the parameters compiles an optimizer for them (TorchScript). It is compiled
within a module that calls one operation of gpuwatch's before each step and one after it; what the step computes is the
same. From torch 2.14 on that optimizer is a class of Python, whose `step` is replaced. The process that calls
`DistributedOptimizer.step` counts the step where none of the parameters is its own.

Without this file, an inf that the last of these steps makes would be in a run that is called clean, established. One of
an earlier step would be laid to the script or to memory, since no step was counted between two forwards.
"""

# no `from __future__ import annotations`: TorchScript reads the annotations of ScriptedStep

import functools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...core.signal_errors import from_outside
from ..patches import PatchLedger, after_import
from ..record.progress import FaultGuard

_MODULE = "torch.distributed.optim.optimizer"


class ScriptedStep(nn.Module):
    """One operation, the optimizer's own step, one operation. TorchScript compiles it, and reads its comments too."""

    def __init__(self, optimizer: Any, place: torch.Tensor) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.place = place

    @torch.jit.export
    def step(self, autograd_ctx_id: int) -> None:
        """As torch's `_ScriptLocalOptimizer` has it."""
        torch.ops.gpuwatch.rpc_step(self.place, autograd_ctx_id, True)
        self.optimizer.step(autograd_ctx_id)
        torch.ops.gpuwatch.rpc_step(self.place, autograd_ctx_id, False)


class ScriptedOptimizer:
    """An optimizer that TorchScript runs, as far as the frames of its steps need it."""

    def __init__(self, name: str, parameters: list[torch.Tensor], settings: dict[str, Any]) -> None:
        self.gpuwatch_name = name
        self.state: dict[Any, Any] = {}
        """Empty: the optimizer's state is inside of TorchScript, and is not read."""
        self.gradients: dict[int, torch.Tensor] = {}
        """id of a parameter -> the gradient that this step got. RPC does not put it into `.grad`."""
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._settings = settings

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As torch.optim has them."""
        held = [parameter for reference in self._parameters if (parameter := reference()) is not None]
        return [{**self._settings, "params": held}]


_optimizers: list[ScriptedOptimizer] = []
"""The operation gets the place of one in this list."""
_told: list[Callable[[ScriptedOptimizer, dict[torch.Tensor, torch.Tensor], bool], None]] = []
"""The hooks of this process, which the operation calls."""


def _step(place: torch.Tensor, context: int, begins: bool) -> None:
    """The operation. An error here must not end the step."""
    try:
        autograd: Any = torch.distributed.autograd
        gradients = autograd.get_gradients(context) if begins else {}
        for tell in list(_told):
            tell(_optimizers[int(place)], gradients, begins)
    except Exception as error:  # the context is gone, or the process ends
        if from_outside(error):
            raise
        return


@functools.cache
def _define() -> Any:
    """Define the operation. `place` counts as written to, so that TorchScript drops no call."""
    library: Any = torch.library.Library("gpuwatch", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("rpc_step(Tensor(a!) place, int context, bool begins) -> ()")
    library.impl("rpc_step", _step, "CompositeExplicitAutograd")
    return library


@dataclass(eq=False, repr=False)
class RpcOptimizers:
    """Sees the steps of DistributedOptimizer in this process."""

    _before: Callable[[ScriptedOptimizer], None]
    _after: Callable[[ScriptedOptimizer], None]
    _count: Callable[[], None]
    _faults: FaultGuard

    def attach(self, patches: PatchLedger) -> None:
        """Begin, or wait until the script imports the optimizer's module."""
        patches.at_undo(after_import(_MODULE, lambda: self._replace(patches)))

    def _replace(self, patches: PatchLedger) -> None:
        module: Any = sys.modules[_MODULE]
        if hasattr(module, "_FunctionalLocalOptimizer"):
            patches.replace(module._FunctionalLocalOptimizer, "step", self._around_functional)
        else:
            _told.append(self._tell)
            patches.at_undo(lambda: _told.remove(self._tell))
            patches.replace(module, "_new_script_local_optimizer", lambda new: self._around_new(module, new))
        patches.replace(module.DistributedOptimizer, "step", self._around_step)

    def _around_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def step_seen(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            # outside of our guard: an error of the step is the script's
            result = step(optimizer, *args, **kwargs)
            with self._faults:
                if not any(each.is_owner() for each in optimizer.remote_optimizers):
                    self._count()
            return result

        return step_seen

    def _around_functional(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """torch 2.14 and later: an object of a class of its own holds the parameters of this process, and steps."""
        known: weakref.WeakKeyDictionary[Any, ScriptedOptimizer] = weakref.WeakKeyDictionary()

        def seen_as(optimizer: Any) -> ScriptedOptimizer:
            seen = known.get(optimizer)
            if seen is None:
                name = f"{_MODULE}.{type(optimizer.optim).__name__}"
                defaults = getattr(optimizer.optim, "defaults", None)  # learning rate and the like
                settings = dict(defaults) if isinstance(defaults, dict) else {}
                seen = known[optimizer] = ScriptedOptimizer(name, optimizer._local_params, settings)
            return seen

        @functools.wraps(step)
        def step_seen(optimizer: Any, context: int, *args: Any, **kwargs: Any) -> Any:
            with self._faults:
                gradients = torch.distributed.autograd.get_gradients(context)  # type: ignore[attr-defined]  # of C++
                self._tell(seen_as(optimizer), gradients, True)
            result = step(optimizer, context, *args, **kwargs)
            with self._faults:
                self._tell(seen_as(optimizer), {}, False)
            return result

        return step_seen

    def _around_new(self, module: Any, new: Callable[..., Any]) -> Callable[..., Any]:
        compiled = torch.jit.script
        local, interface = module._ScriptLocalOptimizer, module._ScriptLocalOptimizerInterface

        @functools.wraps(new)
        def new_seen(optim_cls: Any, local_params_rref: Any, *args: Any, **kwargs: Any) -> Any:
            with self._faults:
                _define()
                name = f"{_MODULE}.{getattr(optim_cls, '__name__', '?')}"
                parameters = [rref.local_value() for rref in local_params_rref]
                place = len(_optimizers)
                made = local(optim_cls, local_params_rref, *args, **kwargs)
                with local.compile_lock:
                    seen = compiled(ScriptedStep(made, torch.tensor(place)))
                    _optimizers.append(ScriptedOptimizer(name, parameters, kwargs))
                return torch.distributed.rpc.RRef(seen, interface)
            return new(optim_cls, local_params_rref, *args, **kwargs)

        return new_seen

    def _tell(self, optimizer: ScriptedOptimizer, gradients: dict[torch.Tensor, torch.Tensor], begins: bool) -> None:
        with self._faults:
            if begins:
                optimizer.gradients = {id(parameter): gradient for parameter, gradient in gradients.items()}
                self._before(optimizer)
            else:
                self._after(optimizer)
                optimizer.gradients = {}
