"""What watching costs the host: per module call, per row, per gradient and per optimizer step, beside the model itself.

    python benchmarks/host_cost.py [--models gpt2,t5] [--rounds N] [--steps N] [--json FILE]

Twelve layers of GPT-2 and of T5 with width 32, eager, on the CPU with one thread. The tensors are so small that
reading them is nothing, and what is left is the time that a GPU job spends on its host. A step is a whole training
step, and its forward, backward and optimizer are timed apart.

The variants train one model on one batch. They take turns in one process, in a new random order in every round, and
each is compared with the floor of its own round: global hooks, and hooks on the same tensors, that do nothing. Shown
are the median over the rounds and a 95 % interval of that median. All times are CPU time of the thread that trains, as
the system counts it: another process takes none of it, but slows it down through the caches and cores that they share.
`plain again` is the noise of all this: it should be 0.

`device buffer` goes the whole way of a device's numbers on the host, with kernels that do nothing: rows, launches,
tables of what one launch reads, packing, copies, and what has arrived.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import collectives
import torch
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.settings import WorkerSettings
from gpuwatch.tests.fakes.late_device import LateDevice
from gpuwatch.worker.device.device_buffer import DeviceStatsBuffer
from gpuwatch.worker.device.kernel_launcher import LAUNCHED_KERNEL, KernelLauncher
from gpuwatch.worker.device.triton_reader import TritonReader
from gpuwatch.worker.hooks import native_writer
from gpuwatch.worker.module_hooks import ModuleHooks
from overhead import PEER, Peer, Plain, Task, machine, one_of, parameters
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration
from turns import in_turns, interval, recorded, recorder_folder

MODELS = ("gpt2", "t5")
LAYERS, WIDTH, VOCABULARY, TOKENS = 12, 32, 64, 8
PARTS = ("forward", "backward", "optimizer")
NO_GRADS, GRADS = ("forward", "weights"), ("forward", "weights", "grads")
WATCH = {"": NO_GRADS, " +grads": GRADS}
PLAIN, AGAIN, FLOOR, NATIVE, PYTHON = "plain", "plain again", "floor", "host, native", "host, Python"
BUFFER = "device buffer"

PER_FRAME_US, PER_TENSOR_US = 10.0, 8.0
"""At most: above the floor, on the host path per frame, on the device path per measured tensor."""


# -- the training ---------------------------------------------------------------------------------------------------


def task(name: str) -> Task:
    """The model, its batch and its optimizer."""
    torch.manual_seed(0)
    model = (_gpt2() if name == "gpt2" else _t5()).train()
    ids = torch.randint(2, VOCABULARY, (1, TOKENS))
    return Task(model, {"input_ids": ids, "labels": ids}, torch.optim.AdamW(model.parameters(), lr=1e-5))


def _gpt2() -> nn.Module:
    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 2, "n_positions": TOKENS, "vocab_size": VOCABULARY}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))
    model.loss_type = "ForCausalLM"
    return model


def _t5() -> nn.Module:
    sizes = {"d_model": WIDTH, "d_kv": 16, "d_ff": 64, "num_heads": 2, "num_layers": LAYERS, "vocab_size": VOCABULARY}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, use_cache=False))


# -- who looks on ---------------------------------------------------------------------------------------------------


class Floor:
    """Hooks that do nothing, in all the places where ours are: the least that any watcher in Python costs."""

    def __init__(self, grads: bool) -> None:
        self._grads = grads
        self._handles: list[Any] = []
        self._watched: set[int] = set()

    def attach(self) -> None:
        """Register the global hooks."""
        self._watched = set()
        self._handles = [
            torch_module.register_module_forward_pre_hook(self._before),
            torch_module.register_module_forward_hook(self._after, with_kwargs=True, always_call=True),
            torch_optimizer.register_optimizer_step_pre_hook(self._step),
            torch_optimizer.register_optimizer_step_post_hook(self._step),
        ]

    def detach(self) -> None:
        """Take all of them out again."""
        for handle in self._handles:
            handle.remove()
            torch_module._global_forward_hooks_with_kwargs.pop(getattr(handle, "id", -1), None)
        self._handles = []

    def _before(self, module: nn.Module, args: Any) -> None:
        pass

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._grads:
            return
        if isinstance(output, torch.Tensor) and output._backward_hooks is None and output.grad_fn is not None:
            output.register_hook(_nothing)
        if id(module) not in self._watched:  # in the first step after attaching, which is not measured
            self._watched.add(id(module))
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._handles.append(parameter.register_post_accumulate_grad_hook(_nothing))

    def _step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        pass


def _nothing(tensor: torch.Tensor) -> None:
    pass


@dataclass(frozen=True)
class Counts:
    """What one step records."""

    frames: int
    rows: int
    tensors: int
    gradients: int
    steps: int
    """Frames of the optimizer: one for each module that has weights"""
    left: int
    """Frames of the forward that the native writer has left to Python"""
    launches: int = 0
    """Kernels that a device would run"""


class Gpuwatch:
    """The worker's own hooks, with a recorder such as a launch gives to a rank."""

    def __init__(self, folder: Path, name: str, watch: tuple[str, ...]) -> None:
        self._path = folder / f"{name}{len(watch)}.recorder"
        recorder = RecorderWriter(self._path, rank=0, local_rank=0, world_size=1, attempt=0)
        real = native_writer.NativeFrameWriter
        if name == PYTHON:
            native_writer.NativeFrameWriter = None
        try:
            self._hooks = ModuleHooks(recorder, WorkerSettings("", watch=watch), 0)
        finally:
            native_writer.NativeFrameWriter = real
        self.kernels = Kernels()
        if name == BUFFER:
            _use_buffer(self._hooks, recorder, self.kernels)
        if name != PYTHON and self._hooks._gradients.writer is None:
            raise SystemExit("the native part is not there: install a C compiler, then gpuwatch again")
        self.attach, self.detach = self._hooks.attach, self._hooks.detach
        self.left = 0
        self._count_what_is_left()

    def _count_what_is_left(self) -> None:
        take = self._hooks._call_frames.record

        def counted(*call: Any) -> None:
            self.left += 1
            take(*call)

        self._hooks._call_frames.record = counted  # type: ignore[method-assign]

    def seen(self) -> Counts:
        """Checks the last page: a watcher that sees nothing would be the cheapest of all. Raises on a fault."""
        pages, page, faults = recorded(self._path)
        if faults or page is None:
            raise SystemExit(f"{self._path.name}: {faults[:1] or 'no page'}")
        forward = [frame for frame in page.frames if frame.phase == "forward"]
        return Counts(
            frames=len(forward),
            rows=sum(len(frame.rows) for frame in forward),
            tensors=len({row.value for frame in forward for row in frame.rows if row.value >= 0}),
            gradients=sum(frame.phase == "backward" for frame in page.frames),
            steps=sum(frame.phase == "optimizer" for frame in page.frames),
            left=round(self.left / pages),
            launches=round(self.kernels.launches / pages),
        )


class Kernels:
    """Triton's kernels, as worker/device/kernel.py has them. They count their launches, and all numbers are 0."""

    INTERPRETED = False

    def __init__(self) -> None:
        self.ordinary = 0
        self.launched = ctypes.create_string_buffer(64)
        """A semaphore (sem_t), whose value is 0."""
        self.read = self.read_two = self.read_many = self.pack = self

    @property
    def launches(self) -> int:
        """All of them."""
        value = ctypes.c_int()
        ctypes.CDLL(None).sem_getvalue(self.launched, ctypes.byref(value))
        return self.ordinary + value.value

    def __getitem__(self, grid: tuple[int, ...]) -> Kernels:
        return self

    def __call__(self, *arguments: Any, **options: bool) -> Kernels:
        self.ordinary += 1
        return self

    @staticmethod
    def element(dtype: torch.dtype) -> torch.dtype:
        """As kernel.py."""
        return dtype


class AtOnceLauncher(KernelLauncher):
    """Launches at once, from C. libc's `sem_post` stands for the driver's cuLaunchKernel, and a semaphore that counts
    the launches for each kernel's handle.
    """

    def __init__(self, kernels: Kernels) -> None:
        libc = ctypes.CDLL(None)
        super().__init__(library=SimpleNamespace(cuLaunchKernel=libc.sem_post, cuFuncGetParamInfo=None))
        self._kernel = ctypes.addressof(kernels.launched)

    @staticmethod
    def stream(device: int) -> int:
        """See `KernelLauncher`."""
        return 0

    def tried(self, key: Any, compiled: Any, sizes: bytes, begin: Any) -> bytes:
        """See `KernelLauncher`."""
        return LAUNCHED_KERNEL.pack(self._kernel, 128, 0, len(sizes), sizes)


class AtOnce(LateDevice):
    """A device that costs nothing itself: one stream, and copies that have arrived."""

    def __init__(self) -> None:
        super().__init__()
        # what the native writer asks for each frame are functions in C, as torch's own are
        self.raw_stream = (0).__mul__  # type: ignore[method-assign]
        self.current_device = int  # type: ignore[method-assign, assignment]
        self.is_capturing = bool  # type: ignore[method-assign, assignment]

    def stream_key(self, device: torch.device) -> tuple[int, int]:
        """See `Device`."""
        return 0, 0

    def use(self, key: Any, stream: Any) -> Any:
        """See `Device`."""
        return _NOTHING

    def rows(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Device`."""
        return rows

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """See `Device`."""
        target.zero_()

    def record(self, stream: Any) -> Any:
        """See `Device`."""

    def query(self, event: Any) -> bool:
        """See `Device`."""
        return True


_NOTHING = contextlib.nullcontext()


def _use_buffer(hooks: ModuleHooks, recorder: RecorderWriter, kernels: Kernels) -> None:
    """Take every tensor for one on a device whose kernels do nothing, and a native writer that reads none."""
    hooks.rows.device_buffer = DeviceStatsBuffer(
        recorder,
        torch.device("cpu"),
        driver=AtOnce(),
        reader=TritonReader(kernels, AtOnceLauncher(kernels)),
        notable=hooks.rows.notable,
    )
    real = native_writer.late_device
    native_writer.late_device = lambda: LateDevice(0)
    try:
        writer = native_writer.native_writer_of(hooks.progress, hooks.rows, hooks._gradients)
    finally:
        native_writer.late_device = real
    hooks._gradients.writer = writer


# -- how long it takes ----------------------------------------------------------------------------------------------


@dataclass
class Variant:
    """One way to train, and the microseconds that each part of a step took in each round."""

    name: str
    watcher: Plain | Floor | Gpuwatch | Peer
    us: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})


def variants(job: Task, folder: Path) -> list[Variant]:
    """All of them, with the task that they share."""
    found = [Variant(PLAIN, Plain()), Variant(AGAIN, Plain())]
    found += [Variant(FLOOR + suffix, Floor("grads" in watch)) for suffix, watch in WATCH.items()]
    for name in (NATIVE, PYTHON, BUFFER):
        found += [Variant(name + suffix, Gpuwatch(folder, name, watch)) for suffix, watch in WATCH.items()]
    return [*found, Variant(PEER, Peer(job.model))]


def floor_of(name: str) -> str:
    """Whose time is taken off a variant's: that of hooks in the same places."""
    return (
        PLAIN if name in (AGAIN, FLOOR, FLOOR + " +grads") else FLOOR + (" +grads" if name.endswith("+grads") else "")
    )


def _block(variant: Variant, job: Task, steps: int) -> dict[str, float]:
    """Microseconds of CPU time per step, by part; the first step after attaching puts hooks in and is not measured."""
    clock = time.thread_time_ns
    spent = dict.fromkeys(PARTS, 0)
    variant.watcher.attach()
    try:
        for number in range(steps + 1):
            job.optimizer.zero_grad()
            start = clock()
            loss = job.model(**job.batch).loss
            forward = clock()
            loss.backward()
            backward = clock()
            job.optimizer.step()
            end = clock()
            del loss
            if number:
                for part, ns in zip(PARTS, (forward - start, backward - forward, end - backward), strict=True):
                    spent[part] += ns
    finally:
        variant.watcher.detach()
    return {part: ns / 1e3 / steps for part, ns in spent.items()}


def measure(model: str, rounds: int, steps: int) -> tuple[list[Variant], dict[str, Counts]]:
    """All variants of a model, in turns."""
    with recorder_folder() as folder:
        job = task(model)
        found = variants(job, Path(folder))
        for one in found:
            _block(one, job, 2)

        def run(one: Variant) -> None:
            for part, us in _block(one, job, steps).items():
                one.us[part].append(us)

        in_turns(found, rounds, run)
        counts = {one.name: one.watcher.seen() for one in found if isinstance(one.watcher, Gpuwatch)}
    return found, counts


# -- the output ----------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """A time in microseconds: the median over the rounds, and a 95 % interval of that median."""

    model: str
    variant: str
    what: str
    us: float
    interval: tuple[float, float]
    target: float | None = None

    @property
    def verdict(self) -> str:
        """Whether the target was met; `within noise` where the interval holds it."""
        if self.target is None:
            return ""
        low, high = self.interval
        clear = "" if high <= self.target or low > self.target else ", within noise"
        return ("pass" if self.us <= self.target else "FAIL") + clear


def _row(model: str, variant: str, what: str, us: list[float], target: float | None = None) -> Row:
    return Row(model, variant, what, statistics.median(us), interval(us), target)


def rows_of(model: str, found: list[Variant], counts: dict[str, Counts]) -> tuple[list[Row], list[Row]]:
    """(whole steps and their parts, what one thing costs above the floor)."""
    by_name = {one.name: one for one in found}
    steps: list[Row] = []
    costs: list[Row] = []
    for one in found:
        total = [sum(parts) for parts in zip(*one.us.values(), strict=True)]
        steps += [_row(model, one.name, part, us) for part, us in [*one.us.items(), ("step", total)]]
        if one.name == PLAIN:
            continue
        floor = by_name[floor_of(one.name)]
        above = {part: [a - b for a, b in zip(one.us[part], floor.us[part], strict=True)] for part in PARTS}
        count = counts.get(one.name, counts[NATIVE + " +grads"])
        costs += costs_of(model, one.name, above, count)
    return steps, costs


def costs_of(model: str, name: str, above: dict[str, list[float]], count: Counts) -> list[Row]:
    """What one frame, row, measured tensor, gradient and optimizer step cost above the floor."""
    is_host, is_device = name.startswith(NATIVE), name.removesuffix(" +grads") == BUFFER
    grads = name.endswith("+grads")
    divided: list[tuple[str, str, int, float | None]] = [
        ("module call (frame)", "forward", count.frames, PER_FRAME_US if is_host else None),
        ("row", "forward", count.rows, None),
        ("measured tensor", "forward", count.tensors, PER_TENSOR_US if is_device else None),
    ]
    if grads:
        target = PER_FRAME_US if is_host else PER_TENSOR_US if is_device else None
        divided.append(("gradient", "backward", count.gradients, target))
    divided.append(("optimizer step", "optimizer", 1, None))
    if name not in (AGAIN, PEER) and not name.startswith(FLOOR):
        target = PER_FRAME_US if is_host else None
        divided.append(("optimizer step, per module", "optimizer", count.steps, target))
    return [
        _row(model, name, what, [us / number for us in above[part]], target) for what, part, number, target in divided
    ]


def cost_of_a_collective(rounds: int) -> list[Row]:
    """What it costs to show one and its wait: in elapsed time, as the thread of the process group has a part in it."""
    spent = collectives.measure(rounds)
    found = []
    for name, target in ((collectives.NATIVE, collectives.AT_MOST_US), (collectives.PYTHON, None)):
        added = [watched - plain for plain, watched in zip(spent[collectives.PLAIN], spent[name], strict=True)]
        found.append(_row("all_reduce", f"host, {name}", "collective and its wait", added, target))
    return found


def table_of_steps(rows: list[Row]) -> Table:
    """A line for each variant."""
    shown = Table(title="CPU time of a step, in us (median)", title_justify="left")
    for head in ("model", "variant"):
        shown.add_column(head, no_wrap=True)
    for head in (*PARTS, "step", "95 % of the median", "of plain"):
        shown.add_column(head, justify="right", no_wrap=True)
    cells: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row.model, row.variant), {})[row.what] = row
    last = ""
    for (model, variant), found in cells.items():
        if last and model != last:
            shown.add_section()
        last = model
        whole, plain = found["step"], cells[model, PLAIN]["step"]
        shown.add_row(
            model,
            variant,
            *(f"{found[part].us:,.0f}" for part in (*PARTS, "step")),
            "{:,.0f} - {:,.0f}".format(*whole.interval),
            f"{whole.us / plain.us:.2f}",
        )
    return shown


def table_of_costs(rows: list[Row]) -> Table:
    """A line for each variant and thing."""
    title = "CPU time above hooks that do nothing (of those themselves: above plain), in us"
    shown = Table(title=title, title_justify="left")
    for head in ("model", "variant", "one"):
        shown.add_column(head, no_wrap=True)
    for head in ("median", "95 % of the median", "at most"):
        shown.add_column(head, justify="right", no_wrap=True)
    shown.add_column("", no_wrap=True)
    last = rows[0].model, rows[0].variant
    for row in rows:
        if (row.model, row.variant) != last:
            shown.add_section()
        last = row.model, row.variant
        at_most = f"{row.target:.0f}" if row.target is not None else ""
        spread = "{:.2f} - {:.2f}".format(*row.interval)
        shown.add_row(row.model, row.variant, row.what, f"{row.us:.2f}", spread, at_most, row.verdict)
    return shown


def main() -> None:
    """Measure, print, and save."""
    parser = argparse.ArgumentParser(description="What watching costs the host, per frame, row, gradient and step.")
    parser.add_argument("--models", type=one_of(MODELS), default=list(MODELS), help="of gpt2,t5; default: both")
    parser.add_argument("--rounds", type=int, default=40, metavar="N", help="turns of each variant; default: 40")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="measured steps in a turn; default: 3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single figure, too")
    options = parser.parse_args()
    if options.rounds < 1 or options.steps < 1:
        parser.error("--rounds and --steps must be at least 1")
    torch.set_num_threads(1)

    steps: list[Row] = []
    costs: list[Row] = []
    samples: dict[str, Any] = {}
    for model in options.models:
        total, _ = parameters(task(model).model)
        found, counts = measure(model, options.rounds, options.steps)
        count = counts[NATIVE + " +grads"]
        print(
            f"{model}: {total / 1e3:.0f}k parameters; a step records {count.frames} frames of the forward with "
            f"{count.rows} rows about {count.tensors} tensors, {count.gradients} gradients, and the weights of "
            f"{count.steps} modules; the native writer leaves {count.left} frames to Python, on the device path "
            f"{counts[BUFFER + ' +grads'].left}; on a device it is read by {counts[BUFFER].launches} launches, with "
            f"gradients {counts[BUFFER + ' +grads'].launches}",
            file=sys.stderr,
        )
        of_steps, of_costs = rows_of(model, found, counts)
        steps += of_steps
        costs += of_costs
        samples[model] = {
            "counts": {name: asdict(one) for name, one in counts.items()},
            "us": {one.name: one.us for one in found},
        }

    costs += cost_of_a_collective(max(100, options.rounds))

    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(machine("cpu"))
    console.print(table_of_steps(steps))
    console.print(table_of_costs(costs))
    if options.json:
        rows = [{**asdict(row), "verdict": row.verdict} for row in steps + costs]
        document = {"machine": machine("cpu"), "rounds": options.rounds, "steps": options.steps, "rows": rows}
        options.json.write_text(json.dumps({**document, "samples": samples}, indent=1))


if __name__ == "__main__":
    main()
