"""A module that TorchScript compiles around an optimizer of RPC. It reads the source of this file, comments too."""

from typing import Any

import torch
from torch import nn


class ScriptedStep(nn.Module):
    """One operation, the optimizer's own step, one operation."""

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
