"""Runs one program of a peer in a rank, as it is: `start.py PROGRAM [its arguments]`.

Its folder is the working folder, and `standins` is on its path. With PEERS_HOST=1 a GPU that it asks for is the host,
and a process that it would spawn for each GPU is a rank of the launch. PEERS_CALLS: in a program that has no end, how
many calls of the peer's own check of the loss. PEERS_RECORD names a file for what must not differ with and without
gpuwatch: {"steps": 12, "weights": "9f3c...", "leaves": 8, "random": "77ab...", "bad": null}. `bad` is the call in which
the peer's own check first found nan or inf.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import math
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

AFTER_BAD = 3
"""How many calls follow the first with a bad loss: steps of the optimizer, for which the program goes on."""
SEED = 11


class StepRecord:
    """Counts the optimizer's steps, and keeps what a peer's own check has found."""

    def __init__(self, calls: int) -> None:
        self.steps, self.calls, self.most_calls = 0, 0, calls
        self.bad: int | None = None

    def count_step(self, *of: Any) -> None:
        self.steps += 1

    def check(self, loss_val: Any, log_msg: Any = None) -> None:
        """GRIST's `loss_checker`, by its rule. It ends the program a few calls later, and writes no file."""
        self.calls += 1
        if self.bad is None and not bool(torch.isfinite(loss_val.detach()).all()):
            self.bad = self.calls
        if self.calls >= self.most_calls or (self.bad is not None and self.calls >= self.bad + AFTER_BAD):
            raise SystemExit(0)

    def write(self, path: Path) -> None:
        """Weights in any order: which of them the collector of garbage lists first is open."""
        digests = sorted(_digest_of(each) for each in gc.get_objects() if _is_weight(each))
        found = {
            "steps": self.steps,
            "weights": hashlib.sha256("".join(digests).encode()).hexdigest(),
            "leaves": len(digests),
            "random": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
            "bad": self.bad,
        }
        path.write_text(json.dumps(found))


def _is_weight(each: object) -> bool:
    """By its type: `isinstance` would ask proxies, some of which import what they stand for."""
    return issubclass(type(each), torch.Tensor) and each.requires_grad and each.is_leaf


def _digest_of(tensor: torch.Tensor) -> str:
    content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + content).hexdigest()


def use_host() -> None:
    """What asks for a GPU gets the host."""
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *of, **named: self
    for name in ("set_device", "synchronize", "reset_max_memory_allocated", "empty_cache"):
        setattr(torch.cuda, name, lambda *of, **named: None)
    torch.cuda.max_memory_allocated = lambda *of: 0
    torch.cuda.device_count = lambda: int(os.environ["WORLD_SIZE"])
    for owner in (torch.Tensor, torch.nn.Module):
        owner.to = _on_host(owner.to)
    torch.randn = _on_host(torch.randn)


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(first: Any, *of: Any, **named: Any) -> Any:
        moved = {name: _host(value) if name == "device" else value for name, value in named.items()}
        return function(first, *(map(_host, of) if function.__name__ == "to" else of), **moved)

    return call


def _host(place: Any) -> Any:
    is_number = isinstance(place, int) and not isinstance(place, bool)
    is_gpu = isinstance(place, str | torch.device) and str(place).startswith("cuda")
    return "cpu" if is_number or is_gpu else place


def use_ranks() -> None:
    """A process that a program would spawn for each GPU is this rank, in the group of the launch."""
    meets_at = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    init, of_ddp = torch.distributed.init_process_group, torch.nn.parallel.DistributedDataParallel.__init__

    def init_group(*of: Any, **named: Any) -> None:
        os.environ.update(meets_at)
        init("gloo")

    def init_ddp(self: Any, module: Any, device_ids: Any = None, **named: Any) -> None:
        of_ddp(self, module, **named)

    torch.multiprocessing.spawn = lambda fn, args=(), **named: fn(int(os.environ["RANK"]), *args)
    torch.distributed.init_process_group = init_group
    torch.nn.parallel.DistributedDataParallel.__init__ = init_ddp


def use_check(record: StepRecord) -> None:
    """GRIST's programs call its check of their loss in each turn of a loop that has no end."""
    grist = importlib.import_module("scripts.utils.torch_utils")
    grist.TorchScheduler.loss_checker = lambda self, *of, **named: record.check(*of, **named)
    grist.TorchScheduler.check_time = lambda self: setattr(self, "iter_count", self.iter_count + 1)


def main(program: str) -> None:
    record = StepRecord(int(os.environ.get("PEERS_CALLS", "0")))
    register_optimizer_step_post_hook(record.count_step)
    np.Inf = math.inf  # programs of before numpy 2
    if "PEERS_HOST" in os.environ:
        use_host()
        use_ranks()
    if record.most_calls:
        use_check(record)
    torch.manual_seed(SEED)
    np.random.seed(SEED)
    sys.path[0] = str(Path(program).parent.absolute())
    kept: Any = None  # what the program made lives until it is recorded
    try:
        kept = runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        kept = end.__traceback__
        if end.code:
            raise
    record.write(Path(f"{os.environ['PEERS_RECORD']}.{os.environ['RANK']}"))
    del kept


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    main(sys.argv[0])
