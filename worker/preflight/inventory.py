"""The inventory of this rank, as far as it needs no CUDA context, and the health of its GPU.

A fact that cannot be read is unknown.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import platform
import resource
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
import torch
from msgspec.structs import replace

from ...core.codes import Code
from ...core.gpu.health_grades import STAGE, grade_answer, load_thresholds
from ...core.gpu.limits import LOADED_FACTS
from ...core.gpu.nvml_child import GpuReading, ask_nvml
from ...core.host import boot_id, gpuwatch_version, host_name
from ...core.identity import RankIdentity
from ...core.preflight import InventoryFacts, PreflightFinding
from ...core.secrets import masked_variables
from ..device.accelerator import CudaAccelerator, built_gpu

T = TypeVar("T")

_SETTINGS = ("NCCL_", "TORCH_", "GLOO_")
_OTHER_SETTINGS = ("CUDA_VISIBLE_DEVICES",)
_VALUE_CHARACTERS = 200
_LIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "memlock": resource.RLIMIT_MEMLOCK,
    "nproc": resource.RLIMIT_NPROC,
    "stack": resource.RLIMIT_STACK,
}
_CAP_IPC_LOCK = 14


def gather(identity: RankIdentity, script: str = "", environ: Mapping[str, str] = os.environ) -> InventoryFacts:
    """Everything except the GPU, which `gather_device` reads in a separate process. Never raises.

    Does not use CUDA, so that the process can fork afterwards. With a torch without CUDA the inventory is complete, and
    `device` is set.
    """
    gpu = built_gpu()
    return InventoryFacts(
        host=soft(host_name, ""),
        node=soft(lambda: int(environ["GROUP_RANK"]), 0),
        boot_id=soft(boot_id, ""),
        device="" if gpu is not None else "cpu",
        driver=soft(Path("/sys/module/nvidia/version").read_text, "").strip(),
        versions=_versions(),
        environment=soft(lambda: settings(environ), {}),
        interfaces=soft(_interfaces, {}),
        memory_free=soft(lambda: psutil.virtual_memory().available, None),
        shm_free=soft(lambda: psutil.disk_usage("/dev/shm").free, None),
        limits=_limits(),
        script=script,
        script_digest=soft(lambda: _digest(script), "") if script else "",
        local_rank=identity.local_rank,
        gpus_visible=None if gpu is not None else 0,
        device_error="" if gpu is not None else "this torch is built without CUDA",
        rdma_devices=soft(lambda: sorted(os.listdir("/sys/class/infiniband")), []),  # noqa: PTH208  # names only
    )


def soft(read: Callable[[], T], unknown: T) -> T:
    """The result of `read`, or `unknown` if it raises: an inventory must not fail a job."""
    try:
        return read()
    except Exception:
        return unknown


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings of NCCL, torch and gloo. NCCL also reads its files; the environment takes precedence."""
    found = {name: value for name, value in environ.items() if name.startswith(_SETTINGS) or name in _OTHER_SETTINGS}
    own = environ.get("NCCL_CONF_FILE") or Path(environ.get("HOME", "~")).expanduser() / ".nccl.conf"
    for file in (Path(own), Path("/etc/nccl.conf")):
        found = {**soft(partial(_nccl_file, file), {}), **found}
    return {name: value[:_VALUE_CHARACTERS] for name, value in sorted(masked_variables(found).items())}


def _nccl_file(path: Path) -> dict[str, str]:
    """Parse lines such as `NCCL_DEBUG=WARN`. A line with # is a comment. NCCL uses the first of a repeated name."""
    found: dict[str, str] = {}
    for line in path.read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and name.strip().startswith("NCCL_"):
            found.setdefault(name.strip(), value.strip())
    return found


def _versions() -> dict[str, str]:
    gpu = built_gpu()
    found = {
        **(gpu.toolkit() if gpu is not None else {}),
        "torch": soft(lambda: str(torch.__version__), ""),
        "python": platform.python_version(),
        "gpuwatch": soft(gpuwatch_version, ""),
    }
    return {name: version for name, version in found.items() if version}


def _interfaces() -> dict[str, list[str]]:
    """IPv4 and IPv6 addresses of the interfaces that are up, as `10.0.0.3/24`."""
    stats = psutil.net_if_stats()
    found: dict[str, list[str]] = {}
    for name, addresses in psutil.net_if_addrs().items():
        if name in stats and stats[name].isup:
            written = [soft(partial(_with_prefix, each.address, each.netmask), "") for each in addresses]
            found[name] = [address for address in written if address]
    return found


def _with_prefix(address: str, netmask: str | None) -> str:
    """Raises ValueError for a hardware address."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    prefix = int(ipaddress.ip_address(netmask)).bit_count() if netmask else parsed.max_prefixlen
    return f"{parsed}/{prefix}"


def _limits() -> dict[str, int]:
    found = {name: soft(partial(resource.getrlimit, number), None) for name, number in _LIMITS.items()}
    known = {name: limits[0] for name, limits in found.items() if limits is not None}
    if soft(_may_lock_memory, False):
        known["memlock"] = -1
    return known


def _may_lock_memory() -> bool:
    """Whether the process has CAP_IPC_LOCK, which lifts the limit. root has it outside of containers."""
    lines = Path("/proc/self/status").read_text().splitlines()
    effective = next(line.split()[1] for line in lines if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> _CAP_IPC_LOCK & 1)


def _digest(script: str) -> str:
    path = Path(script)
    if not path.is_file():  # reading a pipe would take its data from Python, and a folder has no digest
        return ""
    return hashlib.sha256(path.read_bytes()).hexdigest()


# The rank's GPU. Reading it initialises CUDA and may hang on a faulty GPU: use a child process with a deadline.


def gather_device(facts: InventoryFacts, local_rank: int) -> InventoryFacts:
    """The inventory with the facts of a local rank's GPU, among those in CUDA_VISIBLE_DEVICES.

    `device` is `cpu` for a rank without its own GPU. Raises torch's error for a GPU that exists but cannot be read.
    """
    gpu = built_gpu() or CudaAccelerator()  # torch says why there is none
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reason is read below and becomes a finding
        error = gpu.why_none()
        if error:
            return replace(facts, device="cpu", gpus_visible=0, device_error=error)
        visible = gpu.count()
        facts = replace(
            facts,
            device="cpu",
            driver=facts.driver or soft(_driver, ""),
            versions={**facts.versions, **soft(gpu.versions, {})},
            gpus_visible=visible,
        )
        if local_rank >= visible:
            return facts
        device = torch.device(gpu.type, local_rank)
        memory = soft(lambda: gpu.memory(device), None)
        return replace(
            facts,
            device=str(device),
            device_name=gpu.name(local_rank),
            uuid=soft(lambda: gpu.uuid(local_rank), ""),
            pci_bus=soft(lambda: gpu.pci_bus(local_rank), ""),
            device_memory_free=memory[0] if memory else None,
            device_memory_total=memory[1] if memory else None,
        )


def _driver() -> str:
    """NVML's answer, for a system where /sys/module is not readable."""
    import pynvml

    pynvml.nvmlInit()
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


# The health stage: compares what NVML reports of the rank's GPU under load with the table of thresholds.
#
# It runs in the rank's child. A separate process reads NVML, so a driver that hangs costs only the stage's deadline.

_SAMPLING_S = 5.0
"""Time that must remain before the deadline to read a GPU under load."""
_STOPS_S = 1.0
"""Time for the load to end. Each call of it takes milliseconds."""


@dataclass(frozen=True)
class HealthResult:
    """The findings, and one line about what was read."""

    findings: list[PreflightFinding]
    detail: str
    load_hangs: bool = False
    """The load did not end, so no other test may use this process."""


GpuLoad = Callable[[], Callable[[], None]]
"""Called once, in a thread: returns a function that keeps a GPU busy for a moment, and that is called repeatedly."""


def check_health(
    uuid: str, rank: int, host: str, thresholds: str, deadline_s: float, load: GpuLoad | None = None
) -> HealthResult:
    """Check one GPU. Without a load, values that need it are unknown. `thresholds` is the file of --health-thresholds.

    Raises UsageError for an invalid file.
    """
    limits = load_thresholds(thresholds)
    if not uuid:
        sentence = f"the health of the GPU of rank {rank} on {host} is unknown: CUDA does not report its UUID"
        return HealthResult(
            [PreflightFinding(STAGE, "unknown", "rank", [rank], [host], sentence, code=Code.HEALTH_UNKNOWN)],
            "not asked",
        )
    end = time.monotonic() + deadline_s
    answer = ask_nvml([uuid], deadline_s)
    reading = answer.readings.get(uuid)
    load_hangs = False
    if load is not None and reading is not None and answer.finished and not answer.trouble:
        load_hangs = not _read_under_load(reading, load, end)
    findings, detail = grade_answer(answer, uuid, limits, [rank], host)
    return HealthResult(findings, detail, load_hangs)


def _read_under_load(reading: GpuReading, load: GpuLoad, end: float) -> bool:
    """Read the GPU's clocks and link under load. Returns whether the load has ended. `end` is monotonic time.

    The load has a thread of its own: CUDA may hang on a faulty GPU, then forever, and NVML must be read nevertheless.
    """
    began, enough, errors = threading.Event(), threading.Event(), []

    def work() -> None:
        try:
            once = load()  # fails here without free memory or with a lost GPU
            while not enough.is_set():
                once()
                began.set()
        except Exception as error:  # a CUDA error, or no free memory, which the allocation stage reports
            errors.append(f"the load failed: {str(error).strip().partition(chr(10))[0]}")
            began.set()

    thread = threading.Thread(target=work, daemon=True, name="gpuwatch-load")
    thread.start()
    seconds = max(0.0, end - time.monotonic() - _SAMPLING_S)
    trouble = "" if began.wait(seconds) else f"the load did not begin within {seconds:.0f} s"
    if not trouble and not errors:
        answer = ask_nvml([reading.device], end - time.monotonic(), loaded=True)
        reading.merge(answer.readings.get(reading.device, GpuReading(reading.device)))
        trouble = answer.trouble
    trouble = next(iter(errors), trouble)
    enough.set()
    thread.join(_STOPS_S)
    if trouble:
        reading.forget(LOADED_FACTS, trouble)
    return not thread.is_alive()
