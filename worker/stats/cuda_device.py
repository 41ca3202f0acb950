"""CUDA behind the seam of device.py."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from .device import StreamKey

_PORTABLE = 1  # cudaHostRegisterPortable: for the contexts of all devices
_LONGEST_NAP_S = 1e-3
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

        The device is made current first. torch.cuda.stream() alone would leave with cudaSetDevice(0), which makes a
        context on device 0 in a process that uses only another one.
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
        """See `Device`. Sleeps in between, so that other threads and ranks on this core go on."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        nap = 1e-5
        while not event.query():
            if until is not None and time.monotonic() >= until:
                return False
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_S)
        return True

    def synchronize(self, stream: Any) -> None:
        """See `Device`."""
        stream.synchronize()

    def register(self, address: int, size: int, device: torch.device) -> str:
        """See `Device`."""
        with torch.cuda.device(device):  # else this makes a context on device 0
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
        """See `Device`. torch keeps pinned memory for the next use, so the driver is asked only at first."""
        return torch.empty(
            shape, dtype=dtype, device="cpu", pin_memory=True
        )  # the script may have another default device


def _clear_last_error(device: torch.device) -> None:
    """Take back the error that a failed call of ours has left behind: torch's next launch, the user's, would raise it.

    torch 2.13 has no cudaGetLastError among the calls of the runtime that it shows. But it asks for the last error
    after each launch of a kernel, which takes the error away, and raises it: so a launch of our own does it.
    """
    clear = getattr(torch.cuda.cudart(), "cudaGetLastError", None)  # type: ignore[no-untyped-call]  # likewise
    if clear is not None:
        clear()
        return
    try:
        torch.ones(1, device=device).add_(1)
    except RuntimeError:
        pass
