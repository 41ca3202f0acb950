"""The numbers of one tensor: gpuwatch's `measure` against the four reductions of transformers' debug_utils.

    python benchmarks/reductions.py [--threads N] [--seconds S]

Both find the same: abs min, abs max, and whether there is a nan or an inf; the peer also makes the line that it prints.
They take turns on the same tensors, on the CPU. `hot` is a tensor that is in the cache if it fits, `cold` one that is
not, as a weight is when its turn comes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from gpuwatch.worker.record.tensor_stats import measure
from rich.console import Console
from rich.table import Table
from transformers.debug_utils import detect_overflow, get_abs_min_max

SIZES = {
    "a bias, 1k": (1024,),
    "a small weight, 16k": (128, 128),
    "an activation, 256k": (8, 128, 256),
    "an activation, 1M": (8, 128, 1024),
    "logits, 10M": (8, 128, 9766),
    "not contiguous, 1M": (1024, 8, 128),
}
DTYPES = (torch.float32, torch.bfloat16)
CACHE = 64 << 20
"""Bytes that are written before a cold look."""


def peer(tensor: torch.Tensor) -> None:
    """What the 21-frame class does for each tensor of a frame."""
    get_abs_min_max(tensor, "output")
    detect_overflow(tensor, "output")


def _us(look: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> float:
    start = time.perf_counter_ns()
    look(tensor)
    return (time.perf_counter_ns() - start) / 1e3


def turns(tensor: torch.Tensor, seconds: float, cold: bool) -> tuple[list[float], list[float]]:
    """Microseconds of ours and of the peer's, in turns."""
    trash = torch.zeros(CACHE // 4)
    times: tuple[list[float], list[float]] = ([], [])
    for look in (measure, peer):
        look(tensor)
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times[0]) < 5:
        for look, found in zip((measure, peer), times, strict=True):
            if cold:
                trash.add_(1)
            found.append(_us(look, tensor))
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="One tensor's numbers: gpuwatch against transformers' debug_utils.")
    parser.add_argument("--threads", type=int, help="default: torch's own")
    parser.add_argument("--seconds", type=float, default=1.0, help="per line; default: 1")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    torch._C._set_grad_enabled(False)
    shown = Table(title=f"torch {torch.__version__}, {torch.get_num_threads()} threads", title_justify="left")
    for head in ("tensor", "dtype", ""):
        shown.add_column(head, no_wrap=True)
    for head in ("gpuwatch", "GB/s", "transformers", "ratio", "quartiles"):
        shown.add_column(head, justify="right", no_wrap=True)
    for dtype in DTYPES:
        for name, shape in SIZES.items():
            tensor = torch.randn(shape).to(dtype)
            if name.startswith("not contiguous"):
                tensor = tensor.transpose(0, 1)
            for cold in (False, True):
                ours, theirs = turns(tensor, options.seconds, cold)
                ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
                us = statistics.median(ours)
                shown.add_row(
                    name,
                    str(dtype).removeprefix("torch."),
                    "cold" if cold else "hot",
                    f"{us:.1f} us",
                    f"{tensor.nbytes / us / 1e3:.1f}",
                    f"{statistics.median(theirs):.1f} us",
                    f"{middle:.1f}x",
                    f"{low:.1f} - {high:.1f}",
                )
        shown.add_section()
    Console(width=None if sys.stdout.isatty() else 140).print(shown)


if __name__ == "__main__":
    main()
