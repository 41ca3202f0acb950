"""The seam to NVML: the only file that imports nvidia-ml-py, and only in a child process.

A question that the driver or nvidia-ml-py cannot answer becomes a `NotKnown` with the reason.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any

import pynvml


class NotKnown(Exception):
    """NVML has no answer. `code` is its return value; None if this nvidia-ml-py lacks the question."""

    def __init__(self, why: str, code: int | None = None) -> None:
        super().__init__(why)
        self.code = code

    @property
    def gpu_is_lost(self) -> bool:
        """The driver has lost the GPU, or refuses to use it before a reset."""
        return self.code in (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)

    @property
    def is_for_good(self) -> bool:
        """It need not be asked again: this GPU, driver or nvidia-ml-py does not have it, or not for us."""
        return self.code in (
            None,
            pynvml.NVML_ERROR_INVALID_ARGUMENT,
            pynvml.NVML_ERROR_NOT_SUPPORTED,
            pynvml.NVML_ERROR_NO_PERMISSION,
            pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        )


def ask(function: str, *arguments: Any) -> Any:
    """Call a function of nvidia-ml-py by its name. Raises NotKnown."""
    call = getattr(pynvml, function, None)
    if call is None:
        raise NotKnown(f"this nvidia-ml-py has no {function}")
    try:
        return call(*arguments)
    except pynvml.NVMLError as error:
        is_old = error.value == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
        raise NotKnown(f"this driver has no {function}" if is_old else str(error), error.value) from error
    except pynvml.NVMLLibraryMismatchError as error:
        raise NotKnown(f"this driver has no {function}") from error


def constant(name: str) -> int:
    """A constant of nvidia-ml-py. Raises NotKnown if it is too old to have it."""
    value = getattr(pynvml, name, None)
    if value is None:
        raise NotKnown(f"this nvidia-ml-py has no {name}")
    return int(value)


def field_value(handle: Any, name: str, scope: int | None = None) -> int:
    """A field value (NVML_FI_...), of a link or of the whole device. Raises NotKnown."""
    number = constant(name)
    found = ask("nvmlDeviceGetFieldValues", handle, [number if scope is None else (number, scope)])[0]
    if found.nvmlReturn != pynvml.NVML_SUCCESS:
        raise NotKnown(str(pynvml.NVMLError(found.nvmlReturn)), found.nvmlReturn)
    kinds = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    return int(getattr(found.value, kinds[found.valueType]))


def handle_of(uuid: str) -> Any:
    """The device with this UUID. Raises NotKnown. CUDA gives UUIDs without the prefix that NVML wants."""
    candidates = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
    for candidate in candidates[:-1]:
        try:
            return ask("nvmlDeviceGetHandleByUUID", candidate)
        except NotKnown as error:
            if error.gpu_is_lost:
                raise
    return ask("nvmlDeviceGetHandleByUUID", candidates[-1])


def handles() -> tuple[list[Any], dict[str, str]]:
    """Every whole GPU that NVML shows here. For a GPU that it refuses: the reason, by NVML's own index."""
    found, refused = [], {}
    for index in range(ask("nvmlDeviceGetCount")):
        try:
            found.append(ask("nvmlDeviceGetHandleByIndex", index))
        except NotKnown as error:
            refused[f"NVML's GPU {index}"] = str(error)
    return found, refused


def whole_gpu(handle: Any) -> Any:
    """The GPU that a MIG device is a part of; a whole GPU is itself."""
    with suppress(NotKnown):
        is_mig = ask("nvmlDeviceIsMigDeviceHandle", handle)
        if getattr(is_mig, "value", is_mig):  # nvidia-ml-py hands out the c_uint
            return ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
    return handle


def mig_devices(handle: Any) -> list[str]:
    """UUIDs of the MIG devices on a GPU."""
    found: list[str] = []
    with suppress(NotKnown):
        for index in range(ask("nvmlDeviceGetMaxMigDeviceCount", handle)):
            with suppress(NotKnown):
                found.append(uuid_of(ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)))
    return found


def uuid_of(handle: Any) -> str:
    """Raises NotKnown."""
    return str(ask("nvmlDeviceGetUUID", handle))


def text(function: str, *arguments: Any) -> str:
    """An answer that is only shown; "" if there is none."""
    with suppress(NotKnown):
        return str(ask(function, *arguments))
    return ""


def address_of(handle: Any) -> int:
    """Identifies a handle in an event: the driver gives the same pointer for the same device."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
