"""What gpuwatch does to the driver: registered memory, contexts, host syncs, launches, and the device's bandwidth."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .jobs import launch, torchrun
from .lines import Row, at_most, first_line, is_rehearsed, passed
from .model import ALL, BAD_MODULE, FORWARD, PLAIN, Task, overflow, synchronize, watched

_STEPS = 10
_SHARED_MEMORY = Path("/dev/shm")
_SHARE_OF_COPY = 0.5
"""The reader's minimum share of the device's own bandwidth, which a copy within the device shows."""
_LARGEST = 1 << 30
_US_PER_LAUNCH = 20.0


# -- registration of the recorder -----------------------------------------------------------------------------------


def registration(device: torch.device) -> Iterator[Row]:
    """The recorder's file in shared memory and on a disk: does the driver take it, and does the watch hold if not?"""
    places = {"tmpfs": _SHARED_MEMORY, "a disk": _disk()}
    for name, place in places.items():
        if place is None or not place.is_dir():
            yield Row(f"recorder on {name}", "skipped", note="no such place here")
            continue
        folder = Path(tempfile.mkdtemp(prefix="gpuwatch-acceptance-", dir=place))
        try:
            if device.type == "cuda":
                yield _register(name, folder, must=name == "tmpfs")
            yield _holds(name, folder, device)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _disk() -> Path | None:
    """A folder that is on no tmpfs."""
    kinds: dict[Path, str] = {}
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split(" ")
        kinds[Path(mount)] = kind
    for candidate in (Path(tempfile.gettempdir()), Path.cwd(), Path("/var/tmp")):
        found = candidate.resolve()
        while found not in kinds and found != found.parent:
            found = found.parent
        if kinds.get(found) not in ("tmpfs", "ramfs"):
            return candidate
    return None


def _register(name: str, folder: Path, *, must: bool) -> Row:
    """The driver's own call, and whether the next launch raises what it has left behind."""
    from gpuwatch.core.recorder.writer import RecorderWriter

    torch.zeros(1, device="cuda")  # the context
    recorder = RecorderWriter(folder / "registered", rank=0, local_rank=0, world_size=1, attempt=0)
    anchor = ctypes.c_char.from_buffer(recorder.memory)
    size = len(recorder.memory)
    began = time.perf_counter()
    code = int(torch.cuda.cudart().cudaHostRegister(ctypes.addressof(anchor), size, 0))
    took_ms = (time.perf_counter() - began) * 1e3
    if code == 0:
        torch.cuda.cudart().cudaHostUnregister(ctypes.addressof(anchor))
        return Row(f"cudaHostRegister on {name}", "pass", f"{size >> 20} MiB in {took_ms:.1f} ms")
    try:
        torch.ones(4, device="cuda").sum().item()
        left = "the next launch is fine"
    except RuntimeError as error:
        left = f"the next launch raises: {first_line(error)}"
    return Row(f"cudaHostRegister on {name}", "fail" if must else "told", f"refused: error {code}", note=left)


def _holds(name: str, folder: Path, device: torch.device) -> Row:
    """gpuwatch with its recorder there: an overflow is found, and no launch of the user's raises."""
    import gpuwatch.worker.watch as module

    if not hasattr(module, "make_scratch"):
        raise AttributeError("gpuwatch.worker.watch has no make_scratch any more: mend this line")
    before = module.make_scratch
    module.make_scratch = lambda recorders: Path(tempfile.mkdtemp(dir=folder))
    try:
        task = Task("tiny", device, "fp16")
        with watched(FORWARD, task.net) as handle:
            for batch in range(3):
                if batch == 1:
                    overflow(task.net)
                task.step()
            synchronize(device)
        found = [anomaly.module for anomaly in handle.anomalies]
    finally:
        module.make_scratch = before
    good = found[:1] == [BAD_MODULE]
    return Row(f"watch() with its recorder on {name}", passed(good), found[0] if found else "nothing", BAD_MODULE)


# -- contexts -------------------------------------------------------------------------------------------------------


def contexts(device: torch.device) -> Iterator[Row]:
    """No context on a device that the script does not use, and no other process on its GPU."""
    last = torch.device("cuda", torch.cuda.device_count() - 1)  # the script never calls set_device
    task = Task("tiny", last, "fp16")
    task.step()
    plain = _with_context()
    with watched(ALL, task.net):
        for _ in range(3):
            task.step()
        torch.cuda.synchronize(last)
        found = _with_context()
    what = "devices with a context of the process"
    yield Row(what, passed(found == plain), _text(found), f"{_text(plain)}, as without")
    arguments = ("--batches", "3", "--processes")
    without = _processes(torchrun(*arguments))
    job = launch("--preflight", "quick", arguments=arguments)
    with_ = _processes(job.stdout)
    note = job.story if job.code else "after the preflight, whose process has ended"
    what = "processes on the rank's GPU while it trains"
    yield Row(what, passed(with_ == without), with_ or "unknown", f"{without}, as without", note)


def _with_context() -> list[int]:
    return [index for index in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(index)]


def _text(devices: list[int]) -> str:
    return "cuda:" + ",".join(map(str, devices)) if devices else "none"


def _processes(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith("processes on the GPU: ")]
    return lines[0].rpartition(" ")[2] if lines else ""


# -- host syncs -----------------------------------------------------------------------------------------------------


def syncs(device: torch.device) -> Iterator[Row]:
    """As torch counts them. A step in bf16 waits for nothing by itself."""
    task = Task("tiny", device, "bf16")
    found = {how: _syncs_per_step(task, how) for how in (PLAIN, FORWARD, ALL)}
    for how in (FORWARD, ALL):
        own = f"beside {found[PLAIN]:g} of its own"
        yield at_most(f"host syncs per step, {how}", found[how] - found[PLAIN], 0.0, note=own)
    with watched(ALL, task.net):
        task.step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            task.step()
            error = ""
        except RuntimeError as raised:
            error = first_line(raised)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    yield Row('a step with set_sync_debug_mode("error")', passed(not error), error or "nothing raised", "no sync")


def _syncs_per_step(task: Task, how: str) -> float:
    with watched(how, task.net):
        for _ in range(3):
            task.step()
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                for _ in range(_STEPS):
                    task.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    return sum("synchronizing CUDA operation" in str(one.message) for one in caught) / _STEPS


# -- launches -------------------------------------------------------------------------------------------------------


def launches(device: torch.device) -> Iterator[Row]:
    """What a step launches beside its own, and what that costs. The tensors are small: the host is the limit."""
    task = Task("tiny" if is_rehearsed() else "small", device, "bf16")
    plain = _kernels(lambda: _steps(task), PLAIN, task.net)
    if not plain:
        yield nothing_profiled("launches")
        return
    plain_ms = _step_ms(task, PLAIN)
    for how in (FORWARD, ALL):
        ms = _step_ms(task, how)
        kernels = _kernels(lambda: _steps(task), how, task.net)
        added = (len(kernels) - len(plain)) / _STEPS
        device_us = (sum(us for _, us in kernels) - sum(us for _, us in plain)) / _STEPS
        host_us = (ms - plain_ms) * 1e3 / added if added > 0 else 0.0
        note = f"{added:.0f} launches a step beside {len(plain) / _STEPS:.0f}; {device_us:.0f} us a step on the device"
        if added <= 0:
            yield Row(f"launches, {how}", "fail", f"{added:.1f} a step", "some: else nothing is read")
        else:
            yield at_most(f"step time per launch, {how}", host_us, _US_PER_LAUNCH, " us", note)
        yield _by_kernel(how, [name for name, _ in kernels], len(list(task.net.parameters())))


def _by_kernel(how: str, names: list[str], parameters: int) -> Row:
    """Are weights read together? The table of one launch holds as many as a segment of the recorder."""
    found = {kernel: sum(name.startswith(kernel) for name in names) / _STEPS for kernel in ("read_many", "pack")}
    single = sum(name.startswith("read") for name in names) / _STEPS - found["read_many"]
    most = max(4.0, parameters / 8)
    note = f"{parameters} parameters; {single:g} launches for one tensor each, {found['pack']:g} pack rows"
    what = f"launches for many tensors a step, {how}"
    good = 0 < found["read_many"] <= most
    return Row(what, passed(good), f"{found['read_many']:g}", f"some, at most {most:g}", note)


def _steps(task: Task) -> None:
    for _ in range(_STEPS):
        task.step()


def _step_ms(task: Task, how: str) -> float:
    """The best of five blocks: this measures the host."""
    best = float("inf")
    with watched(how, task.net):
        _steps(task)
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            _steps(task)
            torch.cuda.synchronize()
            best = min(best, (time.perf_counter() - began) * 1e3 / _STEPS)
    return best


def _kernels(call: Callable[[], Any], how: str, net: nn.Module) -> list[tuple[str, float]]:
    """(name, microseconds) of each kernel that ran in `call`, copies left out."""
    with watched(how, net):
        call()
        torch.cuda.synchronize()
        found = on_device(call)
    return [(name, us) for name, us in found if is_kernel(name)]


def on_device(call: Callable[[], Any]) -> list[tuple[str, float]]:
    """(name, microseconds) of each kernel and copy that ran in `call`."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return [
        (event.name, event.time_range.elapsed_us())
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
        and not event.name.startswith(("Optimizer.", "ProfilerStep"))
        and not getattr(event, "is_user_annotation", False)
    ]


def nothing_profiled(what: str) -> Row:
    """For a plain step without a kernel: the profiler sees nothing here, and so nothing of ours."""
    return Row(what, "skipped", "0 kernels in a plain step", "some", "torch's profiler sees no kernel here")


def is_kernel(name: str) -> bool:
    """Whether what `on_device` names is no copy."""
    return not name.startswith(("Memcpy", "Memset"))


# -- bandwidth ------------------------------------------------------------------------------------------------------


class _Same(nn.Module):
    """Returns its input, which is so read once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def bandwidth(device: torch.device) -> Iterator[Row]:
    """GB/s at which one large tensor of each dtype is read, beside a copy and a reduction of torch's own."""
    free, _ = torch.cuda.mem_get_info(device)
    size = min(_LARGEST, free // 8) // 4096 * 4096
    raw = torch.randint(8, 0x38, (size,), dtype=torch.uint8, device=device)  # finite, normal numbers in every dtype
    copy = 2 * size / _copy_s(raw) / 1e9
    yield Row("copy within the device", "told", f"{copy:.0f} GB/s", note=f"{size >> 20} MiB, read and written")
    names = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "int64")
    for name in names:
        dtype = getattr(torch, name, None)
        if dtype is None:
            yield Row(f"reader, {name}", "skipped", note="this torch does not have it")
            continue
        try:
            yield _reader(name, raw.view(dtype), size, copy)
        except Exception as error:  # of one dtype; the others are measured all the same
            yield Row(f"reader, {name}", "fail", note=first_line(error))


def _reader(name: str, x: torch.Tensor, size: int, copy: float) -> Row:
    net = _Same()
    calls = 5

    def call() -> None:
        for _ in range(calls):
            net(x)
            x.view(torch.uint8)[:1].add_(0)  # another version: it has to be read again

    kernels = _kernels(call, FORWARD, net)
    longest = sorted(kernels)[-calls:]  # one for each call where one kernel reads a tensor
    reads = sum(kernels) if len(kernels) > 20 * calls else sum(longest)
    gbs = calls * size / (reads / 1e6) / 1e9 if reads else 0.0
    own = ""
    if x.dtype.is_floating_point and x.dtype.itemsize > 1:
        own = f"torch's amax {size / _seconds(x.amax) / 1e9:.0f} GB/s"
    good = gbs >= _SHARE_OF_COPY * copy
    return Row(f"reader, {name}", passed(good), f"{gbs:.0f} GB/s", f"at least {_SHARE_OF_COPY:.0%} of the copy's", own)


def _copy_s(raw: torch.Tensor) -> float:
    other = torch.empty_like(raw)
    return _seconds(lambda: other.copy_(raw))


def _seconds(call: Callable[[], Any]) -> float:
    """Time of one call on the device's clock: the best of five."""
    call()
    best = float("inf")
    for _ in range(5):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        call()
        ended.record()
        ended.synchronize()
        best = min(best, began.elapsed_time(ended) / 1e3)
    return best
