"""CUDA as a `Device` (device_interface.py)."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from .device_interface import StreamKey

_PORTABLE = 1  # cudaHostRegisterPortable: valid in the contexts of all devices
_LONGEST_SLEEP_S = 1e-3
_NOTHING = nullcontext()


class CudaDevice:
    """See `Device`."""

    type = "cuda"

    def holds(self, tensor: torch.Tensor) -> bool:
        """See `Device`."""
        return tensor.is_cuda

    def stream_key(self, device: torch.device) -> StreamKey:
        """See `Device`."""
        return device.index, torch._C._cuda_getCurrentRawStream(device.index)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """See `Device`."""
        return torch.cuda.current_stream(device)

    def is_capturing(self) -> bool:
        """See `Device`."""
        return torch.cuda.is_current_stream_capturing()

    def use(self, key: StreamKey, stream: Any) -> AbstractContextManager[Any]:
        """See `Device`.

        The device is made current first. torch.cuda.stream() alone would call cudaSetDevice(0) when it exits. That
        creates a context on device 0, even in a process that uses only another device.
        """
        index, raw = key
        here = torch.cuda.current_device() == index
        current = torch._C._cuda_getCurrentRawStream(index) == raw
        if here and current:
            return _NOTHING
        stack = ExitStack()
        if not here:
            stack.enter_context(torch.cuda.device(index))
        if not current:
            stack.enter_context(torch.cuda.stream(stream))
        return stack

    def rows(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Device`."""
        return rows

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """See `Device`."""
        target.copy_(source, non_blocking=True)

    def record(self, stream: Any) -> torch.cuda.Event:
        """See `Device`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no annotation there
        event.record(stream)
        return event

    def query(self, event: Any) -> bool:
        """See `Device`."""
        return bool(event.query())

    def wait(self, event: Any, timeout_s: float | None) -> bool:
        """See `Device`. Sleeps between queries, so that other threads and ranks can use this core."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        sleep_s = 1e-5
        while not event.query():
            if until is not None and time.monotonic() >= until:
                return False
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
        return True

    def synchronize(self, stream: Any) -> None:
        """See `Device`."""
        stream.synchronize()

    def register(self, address: int, size: int, device: torch.device) -> str:
        """See `Device`."""
        with torch.cuda.device(device):  # else the call creates a context on device 0
            result = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE))  # type: ignore[no-untyped-call]  # likewise
            if result == 0:
                return ""
            _clear_last_error(device)
        return f"cudaHostRegister returned {result}"

    def unregister(self, address: int, device: torch.device) -> None:
        """See `Device`."""
        with torch.cuda.device(device):
            if int(torch.cuda.cudart().cudaHostUnregister(address)):  # type: ignore[no-untyped-call]  # likewise
                _clear_last_error(device)

    def staging(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Device`. torch caches pinned memory, so only the first calls reach the driver."""
        return torch.empty(
            shape, dtype=dtype, device="cpu", pin_memory=True
        )  # the script may have another default device


def _clear_last_error(device: torch.device) -> None:
    """Clear the error that a failed call of ours left in the CUDA runtime. The user's next launch would raise it.

    torch 2.13 does not expose cudaGetLastError. But after each kernel launch it takes and raises the last error.
    So a launch of our own clears it.
    """
    clear = getattr(torch.cuda.cudart(), "cudaGetLastError", None)  # type: ignore[no-untyped-call]  # likewise
    if clear is not None:
        clear()
        return
    try:
        torch.ones(1, device=device).add_(1)
    except RuntimeError:
        pass
