"""What watching costs: step times plain, with gpuwatch and with transformers' DebugUnderflowOverflow, in one run.

    python benchmarks/overhead.py [--models gpt2,t5] [--modes eager,compiled] [--device cpu|cuda] [--steps N]

A step is a whole training step: forward, loss, backward, AdamW. All variants train the same model on the same batch.
They take turns in one process, in a new random order in every round, and each is divided by the plain step of its own
round: what slows down the machine for a while slows down both. Shown are the median of these ratios, their
interquartile range, and a 95 % interval of the median. `plain again` is the noise of all this: it should be 1.

Peak memory is that of a process of its own for each variant, from its start to its end.

Not in these figures: the node agent, which reads the recorder in another process; attaching, which each variant does
anew in every round, and the step after it; the first steps, in which names are interned and graphs compiled; the
garbage collector, which runs between the rounds only.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

# Before transformers is imported: nothing is downloaded here, and nobody should be asked.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.settings import WorkerSettings
from gpuwatch.worker.module_hooks import ModuleHooks
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration
from transformers.debug_utils import DebugUnderflowOverflow
from turns import in_turns, interval, recorded, recorder_folder

MODELS = ("gpt2", "t5")
MODES = ("eager", "compiled")
WATCH: dict[str, tuple[str, ...]] = {
    "forward+weights": ("forward", "weights"),
    "forward+weights+grads": ("forward", "weights", "grads"),
}
PLAIN, AGAIN, PEER = "plain", "plain again", "DebugUnderflowOverflow"

TARGETS = {
    ("cpu", "eager", "forward+weights"): 1.03,
    ("cpu", "eager", "forward+weights+grads"): 1.05,
    ("cpu", "compiled", "forward+weights"): 1.03,
    ("cpu", "compiled", "forward+weights+grads"): 1.03,
    ("cuda", "eager", "forward+weights"): 1.05,
    ("cuda", "eager", "forward+weights+grads"): 1.05,
    ("cuda", "compiled", "forward+weights"): 1.02,
    ("cuda", "compiled", "forward+weights+grads"): 1.02,
}
"""Largest step time as a multiple of plain."""
SHARE_OF_PEER = 1 / 8
"""Largest share of the time that the peer adds, with forward and weights watched, as by the peer."""
MEMORY = 1.02

STEPS = {"cpu": 40, "cuda": 200}
BLOCK = {"cpu": 1, "cuda": 10}
"""Steps in a row of one variant. On CUDA the host runs ahead within a block; it waits for the device at its ends."""
WARM_UP = {"cpu": 3, "cuda": 5}
MEMORY_STEPS = 6


# -- the training ---------------------------------------------------------------------------------------------------


@dataclass
class Task:
    """A model with its batch and optimizer."""

    model: nn.Module
    batch: dict[str, torch.Tensor]
    optimizer: torch.optim.Optimizer

    def step(self) -> None:
        """One training step."""
        self.optimizer.zero_grad()
        self.model(**self.batch).loss.backward()
        self.optimizer.step()


def task(name: str, device: str) -> Task:
    """The model and its batch, the same in every process. On the CPU fp32 and 1k tokens, on CUDA bf16 and 16k."""
    torch.manual_seed(0)
    model = _gpt2(device) if name == "gpt2" else _t5(device)
    if name == "gpt2":
        model.loss_type = "ForCausalLM"  # else it logs a warning in its forward, which fullgraph=True does not allow
    vocabulary = model.config.vocab_size
    sequences, length = (8, 128) if device == "cpu" else (16, 1024) if name == "gpt2" else (32, 512)
    ids = torch.randint(2, vocabulary, (2, sequences, length)).to(device)
    model = model.to(device, torch.float32 if device == "cpu" else torch.bfloat16).train()
    batch = {"input_ids": ids[0], "labels": ids[0] if name == "gpt2" else ids[1]}
    return Task(model, batch, torch.optim.AdamW(model.parameters(), lr=1e-5))


def _gpt2(device: str) -> GPT2LMHeadModel:
    if device == "cuda":
        return GPT2LMHeadModel(GPT2Config(use_cache=False))
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=4096,
            n_positions=128,
            n_embd=384,
            n_layer=6,
            n_head=6,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )


def _t5(device: str) -> T5ForConditionalGeneration:
    if device == "cuda":  # as large as t5-small
        return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, use_cache=False))
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=4096,
            d_model=256,
            d_kv=32,
            d_ff=1024,
            num_layers=6,
            num_heads=8,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )


def parameters(model: nn.Module) -> tuple[int, int]:
    """How many in all, and how many outside of the embeddings."""
    embeddings = {
        id(weight) for part in model.modules() if isinstance(part, nn.Embedding) for weight in part.parameters()
    }
    return (
        sum(weight.numel() for weight in model.parameters()),
        sum(weight.numel() for weight in model.parameters() if id(weight) not in embeddings),
    )


# -- who looks on ---------------------------------------------------------------------------------------------------


class Plain:
    """Nobody."""

    def attach(self) -> None:
        """Nothing to do."""

    def detach(self) -> None:
        """Nothing to undo."""


class Gpuwatch:
    """The worker's own hooks, with a recorder such as a launch gives to a rank."""

    def __init__(self, folder: Path, watch: tuple[str, ...]) -> None:
        path = folder / f"{'-'.join(watch)}.recorder"
        recorder = RecorderWriter(path, rank=0, local_rank=0, world_size=1, attempt=0)
        self._hooks = ModuleHooks(recorder, WorkerSettings("", watch=watch), 0)

        self._path = path

    def attach(self) -> None:
        """Put the hooks in."""
        self._hooks.attach()

    def detach(self) -> None:
        """Take every one of them out again."""
        self._hooks.detach()

    def seen(self) -> str:
        """Checks the recorder: a watcher that sees nothing would be the cheapest of all."""
        pages, last, faults = recorded(self._path)
        frames = last.frames if last is not None else []
        rows = sum(len(frame.rows) for frame in frames)
        phases = ", ".join(sorted({str(frame.phase) for frame in frames}))
        seen = f"{pages} pages, the last one with {len(frames)} frames and {rows} rows ({phases})"
        return seen + (f"; {len(faults)} FAULTS, first: {faults[0]}" if faults else "")


class CompiledGpuwatch(Gpuwatch):
    """The same for a compiled model that nobody else trains.

    Torch guards on the keys of the tables of global hooks, and hooks that are attached anew have new keys. So these
    are attached once, and only their entries in the tables come and go.
    """

    def __init__(self, folder: Path, watch: tuple[str, ...]) -> None:
        super().__init__(folder, watch)
        before = [set(table) for table in _global_tables()]
        super().attach()
        tables = zip(_global_tables(), before, strict=True)
        self._entries = [{key: table[key] for key in table if key not in known} for table, known in tables]
        self.detach()

    def attach(self) -> None:
        """Put the entries back."""
        for table, entries in zip(_global_tables(), self._entries, strict=True):
            table.update(entries)
        self._hooks._graphs.attach()  # only watchers attached at tracing see inside a graph

    def detach(self) -> None:
        """Take the entries out. Hooks on the model's own tensors stay: nobody else has them."""
        for table, entries in zip(_global_tables(), self._entries, strict=True):
            for key in entries:
                del table[key]
        self._hooks._graphs.detach()


def _global_tables() -> list[dict[int, Any]]:
    holders = (torch_module, torch_optimizer)
    return [
        table
        for holder in holders
        for name, table in sorted(vars(holder).items())
        if name.startswith("_global_") and isinstance(table, dict)
    ]


class Peer:
    """transformers' class.

    It has no way to be taken off again. Its hooks are the modules' only ones, so the tables that hold them are
    changed for empty ones and back, which costs the step nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        before = {module: module._forward_hooks for module in model.modules()}
        for module in before:
            module._forward_hooks = type(before[module])()
        self._debug = DebugUnderflowOverflow(model)
        self._tables = [(module, before[module], module._forward_hooks) for module in before]
        self.detach()

    def attach(self) -> None:
        """Put its tables of hooks in."""
        for module, _, table in self._tables:
            module._forward_hooks = table

    def detach(self) -> None:
        """Put the modules' own tables back."""
        for module, table, _ in self._tables:
            module._forward_hooks = table


@dataclass
class Variant:
    """One way to run a step, and the time that each of its blocks took."""

    name: str
    job: Task
    watcher: Plain | Gpuwatch | Peer
    ms: list[float] = field(default_factory=list)


def names_of_variants(mode: str) -> list[str]:
    """The peer cannot be compiled with fullgraph=True (it formats numbers in its hooks), so it is measured in eager."""
    return [PLAIN, AGAIN, *WATCH, *([PEER] if mode == "eager" else [])]


def eager(name: str, job: Task, folder: Path) -> Variant:
    """A variant that is ready to be attached. Several may share a task: what they look at is then the same memory."""
    if name == PEER:
        return Variant(name, job, Peer(job.model))
    return Variant(name, job, Gpuwatch(folder, WATCH[name]) if name in WATCH else Plain())


def compiled(name: str, job: Task, folder: Path) -> Variant:
    """A variant with a task and a graph of its own: hooks are traced into it."""
    watcher = CompiledGpuwatch(folder, WATCH[name]) if name in WATCH else Plain()
    return Variant(name, replace(job, model=torch.compile(job.model, fullgraph=True, **_own_graph())), watcher)


def _own_graph() -> dict[str, Any]:
    """Without this, one copy may run the graph of another, and all of them count against one limit of graphs."""
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        raise SystemExit(f"torch {torch.__version__} keeps no graphs apart (isolate_recompiles); use --modes eager")
    return {"isolate_recompiles": True}


# -- step times -----------------------------------------------------------------------------------------------------


def _block(variant: Variant, steps: int, synchronize: Callable[[], None]) -> float:
    """Milliseconds per step. The first one after attaching is not measured: it puts hooks on parameters."""
    variant.watcher.attach()
    try:
        variant.job.step()
        synchronize()
        start = time.perf_counter_ns()
        for _ in range(steps):
            variant.job.step()
        synchronize()
        return (time.perf_counter_ns() - start) / 1e6 / steps
    finally:
        variant.watcher.detach()


def step_times(model: str, mode: str, device: str, steps: int) -> dict[str, list[float]]:
    """Milliseconds of all steps of all variants of a model, measured in turns."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    with recorder_folder() as folder:
        names = names_of_variants(mode)
        if mode == "eager":
            job = task(model, device)
            variants = [eager(name, job, Path(folder)) for name in names]
        else:
            variants = [compiled(name, task(model, device), Path(folder)) for name in names]
        for one in variants:
            _block(one, WARM_UP[device], synchronize)
        graphs = _graphs()

        def run(one: Variant) -> None:
            one.ms.append(_block(one, BLOCK[device], synchronize))

        in_turns(variants, max(1, steps // BLOCK[device]), run)
        if _graphs() != graphs:
            print(f"{model}, {mode}: {_graphs() - graphs} graphs were compiled anew while it ran", file=sys.stderr)
        for one in variants:
            if isinstance(one.watcher, Gpuwatch):
                print(f"{model}, {mode}, {one.name}: {one.watcher.seen()}", file=sys.stderr)
    torch.compiler.reset()
    return {one.name: one.ms for one in variants}


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


# -- peak memory ----------------------------------------------------------------------------------------------------


def peak_bytes(model: str, name: str, device: str) -> int:
    """Run in a fresh process: the most memory that it ever held, the recorder's pages included."""
    job = task(model, device)
    with recorder_folder() as folder:
        eager(name, job, Path(folder)).watcher.attach()
        for _ in range(MEMORY_STEPS):
            job.step()
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    # Not getrusage: its figure outlives an exec, so that a child begins with its parent's peak
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))) * 1024


def peaks(model: str, device: str, runs: int) -> dict[str, list[int]]:
    """Peak memory per variant; in eager only, as a compiler's own peak is larger than the step's."""
    # Every tensor has its own mapping, and gives it back: else what malloc keeps differs by 3 % from run to run
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(64 << 10)
    names = [name for name in names_of_variants("eager") if name != AGAIN]
    found: dict[str, list[int]] = {name: [] for name in names}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        for _ in range(runs):
            for name in names:
                found[name].append(pool.submit(peak_bytes, model, name, device).result())
    return found


# -- the output ----------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One line of the report. `ratio` is to plain, or to what the peer adds."""

    model: str
    mode: str
    variant: str
    median: float
    unit: str
    ratio: float | None = None
    quartiles: tuple[float, float] | None = None
    interval: tuple[float, float] | None = None
    target: float | None = None

    @property
    def verdict(self) -> str:
        """Whether the target was met; `unclear` where the noise does not allow to say so."""
        if self.target is None or self.ratio is None:
            return ""
        low, high = self.interval or (self.ratio, self.ratio)
        clear = "" if high <= self.target or low > self.target else ", within noise"
        return ("ok" if self.ratio <= self.target else "over") + clear


def _compared(values: list[float]) -> dict[str, Any]:
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {
        "ratio": statistics.median(values),
        "quartiles": (quartiles[0], quartiles[2]),
        "interval": interval(values),
    }


def rows_of_times(model: str, mode: str, device: str, times: dict[str, list[float]]) -> list[Row]:
    """Each variant against plain, round by round, and gpuwatch's share of what the peer adds."""
    rows = []
    for name, ms in times.items():
        row = Row(model, mode, name, statistics.median(ms), "ms", target=TARGETS.get((device, mode, name)))
        if name != PLAIN:
            for key, value in _compared([a / b for a, b in zip(ms, times[PLAIN], strict=True)]).items():
                setattr(row, key, value)
        rows.append(row)
    if PEER in times:
        added = {
            name: [a - b for a, b in zip(times[name], times[PLAIN], strict=True)] for name in ("forward+weights", PEER)
        }
        ours, theirs = (statistics.median(values) for values in added.values())
        low, high = interval(added["forward+weights"])
        share = Row(model, mode, "added, of the peer's", ours, "ms", ours / theirs, target=SHARE_OF_PEER)
        share.interval = (low / theirs, high / theirs)
        rows.append(share)
    return rows


def rows_of_memory(model: str, found: dict[str, list[int]]) -> list[Row]:
    """The median of the runs against the median of plain."""
    plain = statistics.median(found[PLAIN])
    rows = []
    for name, peak in found.items():
        ratios = [value / plain for value in peak]
        row = Row(model, "eager", name, statistics.median(peak) / 2**20, "MiB")
        row.quartiles = (min(ratios), max(ratios))
        if name != PLAIN:
            row.ratio = statistics.median(ratios)
            row.target = MEMORY if name in WATCH else None
        rows.append(row)
    return rows


def table(title: str, rows: list[Row], spread: str) -> Table:
    """A table for people."""
    shown = Table(title=title, title_justify="left")
    for head in ("model", "mode", "variant"):
        shown.add_column(head, no_wrap=True)
    for head in ("median", "ratio", spread, "95 % of the median", "at most"):
        shown.add_column(head, justify="right", no_wrap=True)
    shown.add_column("", no_wrap=True)
    last = rows[0].model, rows[0].mode
    for row in rows:
        if (row.model, row.mode) != last:
            shown.add_section()
        last = row.model, row.mode
        shown.add_row(
            row.model,
            row.mode,
            row.variant,
            f"{row.median:.1f} {row.unit}",
            f"{row.ratio:.3f}" if row.ratio is not None else "",
            "{:.3f} - {:.3f}".format(*row.quartiles) if row.quartiles else "",
            "{:.3f} - {:.3f}".format(*row.interval) if row.interval else "",
            f"{row.target:.3f}" if row.target is not None else "",
            row.verdict,
        )
    return shown


def machine(device: str) -> str:
    """What these figures were taken on."""
    name = torch.cuda.get_device_name() if device == "cuda" else _processor()
    return f"torch {torch.__version__}, {name}, {torch.get_num_threads()} threads, {os.cpu_count()} cores"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def one_of(choices: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        chosen = [part.strip() for part in text.split(",")]
        if wrong := [part for part in chosen if part not in choices]:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(choices)}")
        return chosen

    return parse


def main() -> None:
    """Measure, print, and save."""
    parser = argparse.ArgumentParser(description="What watching costs, next to transformers' DebugUnderflowOverflow.")
    parser.add_argument("--models", type=one_of(MODELS), default=list(MODELS), help="of gpt2,t5; default: both")
    parser.add_argument("--modes", type=one_of(MODES), default=list(MODES), help="of eager,compiled; default: both")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--steps", type=int, help="measured steps of each variant; default: 40, on CUDA 200")
    parser.add_argument("--memory-runs", type=int, default=3, help="processes per variant; 0: no peak memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single figure, too")
    options = parser.parse_args()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    steps = options.steps or STEPS[device]

    times: list[Row] = []
    memory: list[Row] = []
    samples: dict[str, dict[str, list[float]]] = {}
    for model in options.models:
        total, outside = parameters(task(model, device).model)
        print(f"{model}: {total / 1e6:.1f}M parameters, {outside / 1e6:.1f}M without embeddings", file=sys.stderr)
        if options.memory_runs:
            found = peaks(model, device, options.memory_runs)
            memory += rows_of_memory(model, found)
            samples[f"{model} memory"] = {name: [float(value) for value in values] for name, values in found.items()}
        for mode in options.modes:
            samples[f"{model} {mode}"] = step_times(model, mode, device, steps)
            times += rows_of_times(model, mode, device, samples[f"{model} {mode}"])

    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table(f"step time on {machine(device)}", times, "quartiles"))
    if memory:
        console.print(table("peak memory", memory, "smallest - largest"))
    console.print("The peer is not measured compiled: it formats numbers in its hooks, which breaks the one graph.")
    if options.json:
        rows = [{**asdict(row), "verdict": row.verdict} for row in times + memory]
        document = {"machine": machine(device), "device": device, "steps": steps, "rows": rows, "samples": samples}
        options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
