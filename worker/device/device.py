"""The devices that hold tensors of this process: CUDA, or the late device on the CPU that tests switch on.

It has what reads the numbers of tensors there. What the preflight and a second run ask of a device is accelerator.py's.
"""
# ruff: noqa: D102  # `StatsDevice` says what the methods of a device do

from __future__ import annotations

import functools
import importlib
import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import psutil
import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...core.signal_errors import from_outside, suppress_own
from ...core.torch_names import name_in_torch
from .accelerator import built_gpu

_modes = name_in_torch("torch._C._len_torch_dispatch_stack", lambda: 0)
has_function_modes = name_in_torch("torch._C._len_torch_function_stack", lambda: 1)
# Whether a transform of torch.func is on. `peek_interpreter_stack` would tell, too, and leave a record in the thread,
# which autograd copies from then on for each node that it runs (at::ThreadLocalState): 0.6 % of a step of GPT-2.
has_transforms = name_in_torch("torch._C._are_functorch_transforms_active", lambda: False)
_no_transforms = name_in_torch("torch._C._DisableFuncTorch", nullcontext)
P = ParamSpec("P")
T = TypeVar("T")


def without_modes(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call with gradients off and with every mode of the script disabled (a tracer, a counter, a default device).

    gpuwatch's own tensor operations run so: the script's modes, the transforms of torch.func and autograd do not see
    them.
    """
    with torch._C.DisableTorchFunction():  # first: else a mode would see that gradients are turned off
        grad = torch.is_grad_enabled()
        try:  # a signal's handler may raise right after any call
            if grad:
                torch._C._set_grad_enabled(False)
            if _modes() or has_transforms():
                with _disable_current_modes(), _no_transforms():
                    return call(*args, **kwargs)
            return call(*args, **kwargs)
        finally:
            if grad:
                torch._C._set_grad_enabled(True)


def has_modes() -> bool:
    """Whether a mode of the script or a transform of torch.func would see an operation."""
    return bool(_modes() or has_function_modes() or has_transforms())


StreamKey = tuple[int, int]
"""(index of the device, number of the stream on it)"""


class StatsDevice(Protocol):
    """The operations of a kind of device for DeviceStatsBuffer. Only `wait` waits for the device.

    CudaDevice is the real one. LateDevice is a fake on CPU memory for tests.
    """

    type: str
    """The `type` of the torch.device of its tensors."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on a device of this kind."""

    def raw_stream(self, index: int) -> int:
        """The number of the current stream of the device with this index."""

    def current_device(self) -> int:
        """The index of the current device."""

    def stream_key(self, device: torch.device) -> StreamKey:
        """The current stream of a device."""

    def stream(self, device: torch.device) -> Any:
        """The current stream of a device as an object that keeps the stream alive."""

    def is_capturing(self) -> bool:
        """Whether the user captures a graph on the current stream. Nothing may be launched or queried then."""

    def use(self, key: StreamKey, stream: Any) -> AbstractContextManager[Any]:
        """Make the stream and its device current, to launch, allocate or record on it."""

    def keep(self, tensors: Iterable[torch.Tensor | None], key: StreamKey, stream: Any) -> None:
        """The stream has been told to read these tensors: their memory is not given to others before it has."""

    def rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The tensor to use in place of these new rows on the device."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Start a copy to the host on the current stream. The caller keeps both alive until an event after it."""

    def record(self, stream: Any) -> Any:
        """An event that is done when everything started on the stream so far is done."""

    def query(self, event: Any) -> bool:
        """Whether an event is done. Raises RuntimeError if the device has failed. Not to be called during a capture."""

    def wait(self, event: Any, timeout_s: float | None) -> bool:
        """Wait until an event is done; False after `timeout_s` seconds (None: no limit)."""

    def register(self, address: int, size: int, device: torch.device) -> str:
        """Allow copies directly into a range of host memory. Returns the reason if this is refused, else ""."""

    def unregister(self, address: int, device: torch.device) -> None:
        """Undo `register`."""

    def staging(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that can be copied into without waiting, whether `register` succeeded or not."""


_PORTABLE = 1  # cudaHostRegisterPortable: valid in the contexts of all devices
_LONGEST_SLEEP_S = 1e-3
CLOSE_S = 10.0
_NOTHING = nullcontext()


class CudaDevice:
    """CUDA as a `StatsDevice`."""

    type = "cuda"

    def __init__(self) -> None:
        # torch's own functions: the native writer asks for each frame
        self.raw_stream = name_in_torch("torch._C._cuda_getCurrentRawStream")
        self.current_device = name_in_torch("torch._C._cuda_getDevice")
        self.is_capturing = name_in_torch(
            "torch._C._cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
        )

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def stream_key(self, device: torch.device) -> StreamKey:
        return device.index, self.raw_stream(device.index)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def use(self, key: StreamKey, stream: Any) -> AbstractContextManager[Any]:
        index, raw = key
        here = self.current_device() == index
        current = self.raw_stream(index) == raw
        if here and current:
            return _NOTHING
        stack = ExitStack()
        # The device is made current first. torch.cuda.stream() alone would call cudaSetDevice(0) when it exits. That
        # creates a context on device 0, even in a process that uses only another device.
        if not here:
            stack.enter_context(torch.cuda.device(index))
        if not current:
            stack.enter_context(torch.cuda.stream(stream))
        return stack

    def keep(self, tensors: Iterable[torch.Tensor | None], key: StreamKey, stream: Any) -> None:
        if key[1]:  # the default stream's memory is reused in its own order
            without_modes(_record_stream, tensors, stream)

    def rows(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def record(self, stream: Any) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no annotation there
        event.record(stream)
        return event

    def query(self, event: Any) -> bool:
        return bool(event.query())

    def wait(self, event: Any, timeout_s: float | None) -> bool:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        sleep_s = 1e-5
        while not event.query():
            if until is not None and time.monotonic() >= until:
                return False
            time.sleep(sleep_s)  # other threads and ranks can use this core
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
        return True

    def register(self, address: int, size: int, device: torch.device) -> str:
        with torch.cuda.device(device):  # else the call creates a context on device 0
            result = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE))  # type: ignore[no-untyped-call]  # likewise
            if result == 0:
                return ""
            _clear_last_error(device)
        return f"cudaHostRegister returned {result}"

    def unregister(self, address: int, device: torch.device) -> None:
        with torch.cuda.device(device):
            if int(torch.cuda.cudart().cudaHostUnregister(address)):  # type: ignore[no-untyped-call]  # likewise
                _clear_last_error(device)

    def staging(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        # torch caches pinned memory: only the first calls reach the driver. The script may have another default device.
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


_KINDS: dict[str, Callable[[], StatsDevice]] = {CudaDevice.type: CudaDevice}
DLPACK_TYPES = {"cpu": 1, CudaDevice.type: 10 if torch.version.hip else 2}
"""DLDeviceType of dlpack.h"""


def has_ended(driver: StatsDevice, key: StreamKey, stream: Any) -> bool:
    """Whether everything that was started on a stream has ended. Waits for it, `CLOSE_S` seconds at most.

    Raises what the driver raises if the device has failed or a graph is being captured.
    """
    with driver.use(key, stream):
        return driver.wait(driver.record(stream), CLOSE_S)


def _record_stream(tensors: Iterable[torch.Tensor | None], stream: torch.cuda.Stream) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(stream)


def _clear_last_error(device: torch.device) -> None:
    """Clear the error that a failed call of ours left in the CUDA runtime. The user's next launch would raise it.

    torch 2.13 does not expose cudaGetLastError. But after each kernel launch it takes and raises the last error.
    So a launch of our own clears it.
    """
    clear = getattr(torch.cuda.cudart(), "cudaGetLastError", None)  # type: ignore[no-untyped-call]  # likewise
    if clear is not None:
        clear()
        return
    with suppress_own(RuntimeError):
        torch.ones(1, device=device).add_(1)


LATE_DEVICE = "GPUWATCH_LATE_DEVICE"
"""For tests: every CPU tensor is treated as a tensor of a LateDevice with this seed."""


@functools.cache
def late_device() -> StatsDevice | None:
    """The LateDevice that replaces the CPU in this process; None outside of tests. Raises ValueError.

    It is in tests/fakes, which a checkout has and a wheel has not.
    """
    seed = os.environ.get(LATE_DEVICE, "")
    if not seed:
        return None
    if not seed.isdecimal():
        raise ValueError(f"expected a whole number as the seed in {LATE_DEVICE}, found {seed!r}")
    try:
        fake: Any = importlib.import_module("...tests.fakes.late_device", __package__)
    except ModuleNotFoundError:
        raise ValueError(f"expected a checkout of gpuwatch for {LATE_DEVICE}, found an installed wheel") from None
    late: StatsDevice = fake.LateDevice(int(seed))
    return late


def is_at_rest(device: torch.device) -> bool:
    """Whether nothing is queued on a device's current stream, so that reading from it waits for nothing.

    A stream that waits for a collective of ranks that are gone would be waited for without end.
    """
    if device.type == "cpu":
        return True
    return bool(torch.get_device_module(device).current_stream(device).query())


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether the numbers of a tensor arrive later, from a device."""
    return not tensor.is_cpu or late_device() is not None


def has_reader(device: torch.device) -> bool:
    """Whether tensors on `device` can be read without waiting."""
    return device.type in _KINDS or (device.type == "cpu" and late_device() is not None)


def may_have_devices() -> bool:
    """Whether this torch can have tensors that `has_reader` holds for. Asks no driver."""
    return built_gpu() is not None or late_device() is not None


def device_for(device: torch.device) -> StatsDevice:
    """The `StatsDevice` for tensors on `device`. Raises TypeError for an unknown kind."""
    late = late_device() if device.type == "cpu" else None
    if late is None and device.type not in _KINDS:
        raise TypeError(f"expected a tensor on {' or '.join(_KINDS)}, found {device.type}")
    return late or _KINDS[device.type]()


class ToHost:
    """An asynchronous copy of a tensor's numbers to the host. See `to_host`."""

    def __init__(self, tensor: torch.Tensor, driver: StatsDevice | None) -> None:
        self._driver = driver
        self._source = tensor
        """Kept until the copy has arrived."""
        self._numbers = tensor
        self._event: Any = None
        if driver is not None:
            self._key, self._stream = driver.stream_key(tensor.device), driver.stream(tensor.device)
            with driver.use(self._key, self._stream):
                self._numbers = driver.staging(*tensor.shape, dtype=tensor.dtype)
                driver.copy(tensor, self._numbers)
                self._event = driver.record(self._stream)

    def arrived(self) -> bool:
        """Whether the numbers have arrived. Never waits. False while the user captures a graph."""
        if self._driver is None or self._event is None:
            return True
        if self._driver.is_capturing():
            return False
        with self._driver.use(self._key, self._stream):
            arrived = self._driver.query(self._event)
        if arrived:
            self._event = None
            self._source = self._numbers
        return arrived

    @property
    def numbers(self) -> list[float]:
        """The elements of the tensor. Call it only after `arrived` has returned True."""
        assert self._event is None
        return [float(number) for number in self._numbers.reshape(-1).tolist()]


def to_host(*scalars: torch.Tensor) -> ToHost | None:
    """Start to copy the numbers of these one-element tensors, all on one device. None while a graph is captured.

    Numbers in host memory have arrived at once.
    """
    return without_modes(_to_host, scalars)


def _to_host(scalars: tuple[torch.Tensor, ...]) -> ToHost | None:
    if not any(is_on_device(scalar) for scalar in scalars):
        return ToHost(torch.stack([scalar.reshape(()).double() for scalar in scalars]), None)
    driver = device_for(scalars[0].device)
    if driver.is_capturing():
        return None
    with torch.inference_mode(False):
        numbers = torch.stack([scalar.detach().reshape(()).float() for scalar in scalars])
    return ToHost(driver.rows(numbers), driver)


def file_system_of(path: Path) -> str:
    """The type as `mount -t` names it; "an unknown file system" if it cannot be found.

    A GPU driver can register tmpfs memory, but not every disk file.
    """
    try:
        path = path.resolve()
        mounts = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
        return str(max(reversed(mounts), key=lambda mount: len(mount.mountpoint)).fstype)  # the last one is on top
    except (OSError, ValueError) as error:
        if from_outside(error):
            raise
        return "an unknown file system"
