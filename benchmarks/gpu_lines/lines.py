"""All lines, in the order in which they run."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .outcome import Row


@dataclass(frozen=True)
class Line:
    """`what` is for people; `run` is `module:function` in this folder; `late`: a late device on the CPU can answer."""

    name: str
    run: str
    what: str
    late: bool = False
    limit_s: int = 400

    def rows(self, device: torch.device) -> Iterator[Row]:
        """Measure; each row as soon as it is known."""
        module, _, function = self.run.partition(":")
        found: Iterator[Row] = getattr(importlib.import_module(f"gpu_lines.{module}"), function)(device)
        return found


LINES = (
    Line("environment", "machine:environment", "what this machine has", late=True),
    Line("registration", "driver:registration", "the recorder's memory, registered with the driver", late=True),
    Line("contexts", "driver:contexts", "CUDA contexts per process"),
    Line("syncs", "driver:syncs", "host syncs per step"),
    Line("launches", "driver:launches", "kernel launches, and microseconds for each"),
    Line("bandwidth", "driver:bandwidth", "GB/s of the reader per dtype"),
    Line("eager", "cost:eager", "step ratio, eager", late=True, limit_s=600),
    Line("compiled", "cost:compiled", "step ratio, compiled", late=True, limit_s=900),
    Line("overflow", "jobs:overflow", "an fp16 overflow, named right", late=True, limit_s=600),
    Line("graphed", "same:graphed", "torch.cuda.make_graphed_callables"),
    Line("reduce-overhead", "same:reduce_overhead", 'torch.compile(mode="reduce-overhead")', late=True, limit_s=600),
    Line("bits", "same:bits", "the same bits with and without", late=True, limit_s=600),
    Line("preflight", "jobs:preflight", "seconds of the preflight", late=True),
    Line("ddp", "jobs:ddp", "DistributedDataParallel", late=True),
    Line("fsdp2", "jobs:fsdp2", "FSDP2", late=True),
    Line("example", "jobs:example", "the example of the README", late=True, limit_s=1500),
)
