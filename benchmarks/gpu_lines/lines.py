"""All lines, in the order in which they run, and what comes of one: rows with a figure and pass or fail."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

Verdict = Literal["pass", "fail", "told", "skipped"]
"""`told`: a figure without a target. `skipped`: this machine cannot answer it; the note says what it lacks."""


@dataclass(frozen=True)
class Row:
    """One row of the table. `target` says in words from where on it passes."""

    what: str
    verdict: Verdict
    figure: str = ""
    target: str = ""
    note: str = ""


REHEARSAL = "ACCEPTANCE_REHEARSAL"
"""Variable of the environment. Set: sizes are small, as no figure counts."""


def is_rehearsed() -> bool:
    """Whether sizes are small."""
    return bool(os.environ.get(REHEARSAL))


def passed(good: bool) -> Verdict:
    """As a verdict."""
    return "pass" if good else "fail"


def at_most(what: str, value: float, most: float, unit: str = "", note: str = "") -> Row:
    """A row whose figure may not be larger."""
    return Row(what, passed(value <= most), f"{value:.3g}{unit}", f"at most {most:g}{unit}", note)


def first_line(error: BaseException | str) -> str:
    """An error in one line."""
    text = str(error).strip().splitlines()
    name = "" if isinstance(error, str) else f"{type(error).__name__}: "
    return (name + (text[0] if text else ""))[:300]


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


QUICK = {
    1: ("environment", "registration", "contexts", "places", "bits", "syncs", "launches", "cost"),
    2: (
        "bits-compiled",
        "reduce-overhead",
        "graphed",
        "one-gpu",
        "no-memory",
        "assert",
        "health",
        "preflight",
        "stub",
        "overflow",
    ),
}
"""The two calls of `make gpu-quick`, each in the order of what it decides. Together they are bounded (`--minutes`)."""

LINES = (
    Line("environment", "machine:environment", "what this machine has", late=True),
    Line("registration", "driver:registration", "the recorder's memory, registered with the driver", late=True),
    Line("contexts", "driver:contexts", "CUDA contexts per process"),
    Line("syncs", "driver:syncs", "host syncs per step"),
    Line("launches", "driver:launches", "kernel launches, and microseconds for each"),
    Line("stub", "stub:stub", "the same counts as on the stand-in for a driver"),
    Line("bandwidth", "driver:bandwidth", "GB/s of the reader per dtype"),
    Line("places", "jobs:places", "an overflow in each phase, named with its line", late=True),
    Line("cost", "cost:cost", "step ratio of GPT-2 and of a model of no size, by turns", late=True),
    Line("eager", "cost:eager", "step ratio, eager", late=True, limit_s=600),
    Line("compiled", "cost:compiled", "step ratio, compiled", late=True, limit_s=900),
    Line("overflow", "jobs:overflow", "an fp16 overflow, named right", late=True, limit_s=600),
    Line("graphed", "same:graphed", "torch.cuda.make_graphed_callables"),
    Line("reduce-overhead", "same:reduce_overhead", 'torch.compile(mode="reduce-overhead")', late=True, limit_s=600),
    Line("bits", "same:bits", "the same bits with and without", late=True),
    Line("bits-compiled", "same:bits_compiled", "the same bits, compiled", limit_s=600),
    Line("one-gpu", "trouble:one_gpu", "FSDP2 on one GPU, and two ranks on one GPU", late=True),
    Line("no-memory", "trouble:no_memory", "out of memory while watched"),
    Line("assert", "trouble:device_assert", "an assertion that fails on the device"),
    Line("health", "trouble:health", "what NVML says, beside nvidia-smi"),
    Line("preflight", "jobs:preflight", "seconds of the preflight", late=True),
    Line("ddp", "jobs:ddp", "DistributedDataParallel", late=True),
    Line("fsdp2", "jobs:fsdp2", "FSDP2", late=True),
    Line("hang", "jobs:hang", "a hang over NCCL, named", limit_s=900),
    Line("example", "jobs:example", "the example of the README", late=True, limit_s=1500),
)
