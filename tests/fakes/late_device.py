"""A fake device on CPU memory, for tests. Like a real device it works asynchronously.

Tensors are read at once, since no stream of the user can be delayed here. Copies to the host are late: each is carried
out a random number of calls after its start, in order within a stream, out of order between streams. A copy reads its
source when it is carried out: a source that was freed by then gives POISON. The host cannot read rows on the device:
`.item()`, `.tolist()` and `bool()` raise, since on a real device they would wait for it.

The worker imports this module as gpuwatch.tests.fakes.late_device, so tests must, too.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gpuwatch.worker.device.device import StreamKey
from torch.utils._pytree import tree_map

POISON = 0x6B6B_6B6B_6B6B_6B6B
"""The content of freed device memory."""


class HostRead(RuntimeError):
    """The host has read a number on the device. On a real device it would wait."""


class DeviceMemory(torch.Tensor):
    """A tensor on the device. Results computed from it are on the device, too."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch types its own stand-in
        """Compute as usual. Raises HostRead for an operation that passes a number to the host."""
        if func in _HOST_READS:
            raise HostRead(f"{func} reads a number of the device on the host")
        guard = torch._C._DisableTorchDispatch()
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            del guard
        return tree_map(lambda value: _on_device(value) if type(value) is torch.Tensor else value, result)


_HOST_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
}


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    return torch.Tensor._make_subclass(DeviceMemory, tensor)


def _poison(memory: torch.Tensor) -> None:
    ctypes.memset(memory.data_ptr(), POISON & 0xFF, memory.nbytes)


class _FreedTensor:
    """Whether the memory of a tensor was freed. Does not keep it alive.

    Its weak reference is given back by `forget`. torch's StorageWeakRef does that in a `__del__`: what a signal's
    handler raises there is lost.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._held: int = tensor.untyped_storage()._weak_ref()

    def __bool__(self) -> bool:
        return bool(torch.UntypedStorage._expired(self._held))

    def forget(self) -> None:
        """Not asked again."""
        torch.UntypedStorage._free_weak_ref(self._held)


class LateEvent:
    """Done when its stream has done everything that was queued before it."""

    def __init__(self) -> None:
        self.done = False


class _LateCopy:
    """One copy to the host. Like a real copy it does not keep its source alive."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if not source.is_contiguous() or not target.is_contiguous() or source.shape != target.shape:
            raise ValueError("expected contiguous tensors of one shape")
        self._freed = _FreedTensor(source)
        self._address = source.data_ptr()
        self.target = target

    def carry_out(self) -> None:
        if self._freed:
            _poison(self.target)
        else:
            ctypes.memmove(self.target.data_ptr(), self._address, self.target.nbytes)
        self._freed.forget()


class LateDevice:
    """A `StatsDevice`. With `seed` None nothing is late: a copy is carried out when it is started.

    A test sets `current`, the current stream, and `capturing`, whether a graph is being captured.
    """

    type = "cpu"

    def __init__(self, seed: int | None = None, *, longest: int = 12, refuses: str = "") -> None:
        self._random = random.Random(seed)
        self._longest = 0 if seed is None else longest
        self._queues: dict[int, deque[tuple[int, _LateCopy | LateEvent]]] = {}
        """stream -> (number of the call at which it is due, copy or event), oldest first"""
        self._now = 0
        self._refuses = refuses
        self._direct: tuple[int, int] | None = None
        """First and last address of the registered host memory."""
        self._pinned: list[tuple[_FreedTensor, int, int]] = []
        self.current = 0
        self.capturing = False
        self.captured: set[int] = set()
        """Streams on which a graph is being captured. `capturing` stands for all streams."""
        self.held: set[int] = set()
        """Streams that a test keeps busy: nothing is carried out on them."""
        self.copies = 0
        """Copies started so far."""

    # -- for tests ----------------------------------------------------------------------------------------------

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Make a stream current."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def deliver(self) -> None:
        """Carry out all that is queued, as a device does while its host is elsewhere: no call advances the time."""
        for stream, queue in self._queues.items():
            while queue and stream not in self.held:
                self._carry_out(queue)

    def die(self) -> None:
        """Drop all copies and events that are not carried out yet."""
        self._queues.clear()

    # -- StatsDevice --------------------------------------------------------------------------------------------

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cpu

    def raw_stream(self, index: int) -> int:
        """Each call advances the time by one. It is called once for each tensor."""
        self._tick()
        return self.current

    def current_device(self) -> int:
        return 0

    def stream_key(self, device: torch.device) -> StreamKey:
        return 0, self.raw_stream(0)

    def stream(self, device: torch.device) -> int:
        return self.current

    def is_capturing(self) -> bool:
        return self.capturing or self.current in self.captured

    def keep(self, tensors: Iterable[torch.Tensor | None], key: StreamKey, stream: Any) -> None:
        pass

    @contextmanager
    def use(self, key: StreamKey, stream: Any) -> Iterator[None]:
        with self.on(stream):
            yield

    def rows(self, rows: torch.Tensor) -> torch.Tensor:
        return _on_device(rows)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Raises RuntimeError if the target is neither registered nor pinned: a real copy would wait."""
        self._not_in_a_capture()
        if not isinstance(source, DeviceMemory):
            raise TypeError("expected a tensor of the device as the source")
        begin, end = target.data_ptr(), target.data_ptr() + target.nbytes
        gone = [entry for entry in self._pinned if entry[0]]
        self._pinned = [entry for entry in self._pinned if entry not in gone]
        for freed, *_ in gone:
            freed.forget()
        within = [(first, last) for _, first, last in self._pinned] + ([self._direct] if self._direct else [])
        if not any(first <= begin and end <= last for first, last in within):
            raise RuntimeError("a copy into memory that is not registered would wait for the device")
        self.copies += 1
        self._put(_LateCopy(source, target))

    def record(self, stream: Any) -> LateEvent:
        self._not_in_a_capture()
        event = LateEvent()
        self._put(event, stream)
        return event

    def query(self, event: Any) -> bool:
        """Each call advances the time by one."""
        self._not_in_a_capture()
        self._tick()
        return bool(event.done)

    def wait(self, event: Any, timeout_s: float | None) -> bool:
        """An event of a held stream is not done however long the timeout is."""
        self._not_in_a_capture()
        for stream, queue in self._queues.items():
            if stream not in self.held and any(what is event for _, what in queue):
                while not event.done:
                    self._carry_out(queue)
        return bool(event.done)

    def synchronize(self, stream: Any) -> None:
        self._not_in_a_capture()
        queue = self._queues.get(stream)
        while queue:
            self._carry_out(queue)

    def register(self, address: int, size: int, device: torch.device) -> str:
        self._not_in_a_capture()
        if not self._refuses:
            self._direct = address, address + size
        return self._refuses

    def unregister(self, address: int, device: torch.device) -> None:
        if self._direct and self._direct[0] == address:  # not that of the watch after a dropped one
            self._direct = None

    def staging(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        memory = torch.empty(shape, dtype=dtype, device="cpu")
        _poison(memory)
        begin = memory.data_ptr()
        self._pinned.append((_FreedTensor(memory), begin, begin + memory.nbytes))
        return memory

    # -- time ---------------------------------------------------------------------------------------------------

    def _put(self, what: _LateCopy | LateEvent, stream: int | None = None) -> None:
        queue = self._queues.setdefault(self.current if stream is None else stream, deque())
        due = self._now + (self._random.randint(0, self._longest) if self._longest else 0)
        queue.append((max(due, queue[-1][0]) if queue else due, what))
        self._advance()

    def _tick(self) -> None:
        self._now += 1
        self._advance()

    def _advance(self) -> None:
        for stream, queue in self._queues.items():
            while queue and queue[0][0] <= self._now and stream not in self.held:
                self._carry_out(queue)

    def _carry_out(self, queue: deque[tuple[int, _LateCopy | LateEvent]]) -> None:
        _, what = queue.popleft()
        if isinstance(what, LateEvent):
            what.done = True
        else:
            what.carry_out()

    def _not_in_a_capture(self) -> None:
        if self.is_capturing():
            raise RuntimeError("operation not permitted when stream is capturing")
