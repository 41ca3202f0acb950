"""What watching costs the host, in instructions: the same in each run, on a busy machine, too.

    python benchmarks/host_instructions.py [--model gpt2] [--steps N] [--json FILE]

The models and the variants are those of host_cost.py: a whole training step, with gradients, on tensors of no size.
Each variant trains in a process of its own under valgrind (`callgrind`), which counts what the processor is told to do.
Shown are the instructions of a step, and what they are above a plain step as a share of what transformers'
`DebugUnderflowOverflow` adds. An instruction is no time: host_cost.py measures that, on a quiet machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import host_cost
from overhead import Peer, Plain, Task
from rich.console import Console
from rich.table import Table

WARM = 4
"""Steps before the count begins: the hooks' tables are filled, and torch has made what it keeps."""
FLOOR, NATIVE, BUFFER = (f"{name} +grads" for name in (host_cost.FLOOR, host_cost.NATIVE, host_cost.BUFFER))
VARIANTS = (host_cost.PLAIN, FLOOR, NATIVE, BUFFER, host_cost.PEER)


def train(model: str, variant: str, steps: int) -> None:
    """Train in this process, which valgrind runs, and have it count `steps` of the steps."""
    job = host_cost.task(model)
    with tempfile.TemporaryDirectory() as folder:
        watcher(variant, job, Path(folder)).attach()
        for _ in range(WARM):
            job.step()
        gc.collect()
        gc.freeze()
        counting("on")
        for _ in range(steps):
            job.step()
        counting("off")
    os._exit(0)  # the interpreter's end would take minutes here


def watcher(variant: str, job: Task, folder: Path) -> Plain | Peer | host_cost.Floor | host_cost.Gpuwatch:
    """Who looks on."""
    if variant == host_cost.PLAIN:
        return Plain()
    if variant == FLOOR:
        return host_cost.Floor(grads=True)
    if variant == host_cost.PEER:
        return Peer(job.model)
    return host_cost.Gpuwatch(folder, variant.removesuffix(" +grads"), host_cost.GRADS)


def counting(switch: str) -> None:
    """Have valgrind count from here on, or no longer."""
    subprocess.run(["callgrind_control", "-i", switch, str(os.getpid())], check=True, stdout=subprocess.DEVNULL)


def instructions(model: str, variant: str, steps: int) -> float:
    """Those of one step."""
    with tempfile.TemporaryDirectory() as folder:
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out"]
        own = [sys.executable, __file__, "--model", model, "--steps", str(steps), "--in-valgrind", variant]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*valgrind, *own], env=environment, capture_output=True, text=True)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or found is None:
        raise SystemExit(f"{variant}: valgrind ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return int(found[1]) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=host_cost.MODELS, default="gpt2")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--in-valgrind", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_valgrind:
        train(options.model, options.in_valgrind, options.steps)
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind is not installed: apt-get install valgrind")
    console = Console()
    found: dict[str, float] = {}
    for variant in VARIANTS:
        with console.status(f"{variant}: about a minute"):
            found[variant] = instructions(options.model, variant, options.steps)
    plain, peer = found[host_cost.PLAIN], found[host_cost.PEER]
    table = Table("variant", "million instructions a step", "of plain", f"of what {host_cost.PEER} adds")
    for variant, count in found.items():
        table.add_row(variant, f"{count / 1e6:.1f}", f"{count / plain:.3f}", f"{(count - plain) / (peer - plain):.3f}")
    console.print(f"{options.model}, {options.steps} steps", table)
    if options.json:
        options.json.write_text(json.dumps({"model": options.model, "instructions": found}))


if __name__ == "__main__":
    main()
