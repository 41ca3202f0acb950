"""The rank's GPU. Reading it initialises CUDA and may hang on a faulty GPU: use a child process with a deadline."""

from __future__ import annotations

import ctypes
import uuid
import warnings

import msgspec
import torch

from ....core.preflight import InventoryFacts
from .inventory import soft


class DeviceFacts(msgspec.Struct, frozen=True):
    """The facts about the GPU in `InventoryFacts`. "" and None mean unknown."""

    device: str = ""
    """`cuda:3`, or `cpu` for a rank without its own GPU."""
    device_name: str = ""
    uuid: str = ""
    pci_bus: str = ""
    driver: str = ""
    nccl: str = ""
    memory_free: int | None = None
    memory_total: int | None = None
    gpus_visible: int | None = None
    error: str = ""


def gather_device(local_rank: int) -> DeviceFacts:
    """Read the facts of a local rank's GPU, among those in CUDA_VISIBLE_DEVICES.

    Raises torch's error for a GPU that exists but cannot be read.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reason is read below and becomes a finding
        error = _why_no_gpu()
        if error:
            return DeviceFacts(device="cpu", gpus_visible=0, error=error)
        visible = torch.cuda.device_count()
        driver, nccl = soft(_driver, ""), soft(_nccl, "")
        if local_rank >= visible:
            return DeviceFacts(device="cpu", gpus_visible=visible, driver=driver, nccl=nccl)
        properties = torch.cuda.get_device_properties(local_rank)
        memory = soft(lambda: _memory(local_rank), None)
        return DeviceFacts(
            device=f"cuda:{local_rank}",
            device_name=properties.name,
            uuid=soft(lambda: device_uuid(local_rank), ""),
            pci_bus=soft(lambda: _pci_bus(properties), ""),
            driver=driver,
            nccl=nccl,
            memory_free=memory[0] if memory else None,
            memory_total=memory[1] if memory else None,
            gpus_visible=visible,
        )


def _memory(ordinal: int) -> tuple[int, int]:
    """(free, total) bytes. The device is made current first, so that no other device gets a context."""
    torch.cuda.set_device(ordinal)
    return torch.cuda.mem_get_info(ordinal)


def _why_no_gpu() -> str:
    """Why CUDA cannot be used: the first line of its error. "" if it can be used."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch.cuda.init has no annotations
    except (
        Exception
    ) as error:  # AssertionError, RuntimeError or DeferredCudaCallError: it depends on the cause and the version
        lines = str(error).strip().splitlines()
        return lines[0] if lines else type(error).__name__
    return "" if torch.cuda.device_count() else "no GPU is visible"


def device_uuid(ordinal: int) -> str:
    """`GPU-...` as NVML writes it; `MIG-...` for an instance, of which torch's property may give the whole GPU's."""
    properties = torch.cuda.get_device_properties(ordinal)
    if " MIG " in properties.name:
        return f"MIG-{_driver_uuid(ordinal)}"
    return f"GPU-{properties.uuid}"


def _driver_uuid(ordinal: int) -> str:
    """The UUID from the driver: cuDeviceGetUuid_v2 (CUDA 11.4) is documented to return that of a MIG instance."""
    driver = ctypes.CDLL("libcuda.so.1")
    found = (ctypes.c_ubyte * 16)()
    status = driver.cuDeviceGetUuid_v2(ctypes.byref(found), ctypes.c_int(ordinal))
    if status:
        raise OSError(f"cuDeviceGetUuid_v2 returned {status}")
    return str(uuid.UUID(bytes=bytes(found)))


def _pci_bus(properties: torch._C._CudaDeviceProperties) -> str:
    """`0000:3b:00.0`, as the kernel and lspci write it. torch has it from 2.7 on."""
    domain, bus, device = (getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device"))
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _driver() -> str:
    """NVML's answer, for a system where /sys/module is not readable."""
    import pynvml

    pynvml.nvmlInit()
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _nccl() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # torch.cuda.nccl has no annotations


def with_device(facts: InventoryFacts, found: DeviceFacts) -> InventoryFacts:
    """The inventory with the facts about its GPU."""
    versions = {**facts.versions, **({"nccl": found.nccl} if found.nccl else {})}
    return msgspec.structs.replace(
        facts,
        device=found.device,
        device_name=found.device_name,
        uuid=found.uuid,
        pci_bus=found.pci_bus,
        driver=facts.driver or found.driver,
        versions=versions,
        device_memory_free=found.memory_free,
        device_memory_total=found.memory_total,
        gpus_visible=found.gpus_visible,
        device_error=found.error,
    )
