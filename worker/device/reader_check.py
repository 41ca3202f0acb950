"""Whether a reader's kernels read known numbers as they must: each of them, before its numbers count.

The check of a kernel is launched on the stream on which the kernel is first needed, and compared there by torch's
operations. While the host does not know the result, all rows that are packed on that stream pass through it: if the
kernel is wrong, the device itself replaces them by PENDING. So no wrong number leaves the device, although nobody waits
for it. The host compares the same numbers when they have arrived. Only then does it count what a captured graph reads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from ...core.signal_errors import from_outside
from ...core.values import PENDING
from .device import StatsDevice, StreamKey, without_modes
from .known_numbers import upload

Run = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""Has known numbers read on the current stream. Returns what was found, on the device, and on the host what must be
found: two tensors of int64 of one shape."""


class ReaderCheck:
    """One check, started on the current stream."""

    def __init__(self, driver: StatsDevice, device: torch.device, key: StreamKey, run: Run) -> None:
        self.key = key
        self._driver, self._stream = driver, driver.stream(device)
        self._expected: Any
        with torch.inference_mode(False):
            found, expected = run()
            self._expected = expected.numpy()
            self._found = driver.rows(found)
            self.agrees = (self._found == upload(expected, device)).all()
            """Of bool, on the device"""
            arrived = driver.staging(*found.shape, dtype=found.dtype)
            driver.copy(self._found, arrived)
            self._arrived: Any = arrived.numpy()
            """The same memory: the script's modes do not see NumPy."""
            self._event = driver.record(self._stream)

    def passed(self) -> bool | None:
        """Whether the numbers are right; None while they have not arrived, or the device has failed. Never waits."""
        try:
            with self._driver.use(self.key, self._stream):
                if self._driver.is_capturing() or not self._driver.query(self._event):
                    return None
        except RuntimeError as error:  # the user's next call raises the same
            if from_outside(error):
                raise
            return None
        return bool((self._arrived == self._expected).all())


class ReaderChecks:
    """All checks of a reader in this process."""

    def __init__(self, driver: StatsDevice) -> None:
        self._driver = driver
        self._proven: set[Hashable] = set()
        self._running: dict[Hashable, list[ReaderCheck]] = {}
        """Of ordinary launches: one for each stream that needs the kernel. One that has failed stays."""
        self._direct: dict[Hashable, ReaderCheck] = {}
        """Of launches whose numbers do not count before they are proven."""
        self.wrong: Hashable = None
        """The first kernel that gave other numbers when it was launched as Triton does it."""
        self.wrong_direct: Hashable = None
        """The first one that gave other numbers when it was launched through the driver, or was refused there."""

    def is_proven(self, kernel: Hashable, device: torch.device, run: Run) -> bool:
        """Whether a kernel may be taken for right. If it may not, its check is started on the current stream.

        The caller may launch it nevertheless: until its check has passed, `guarded` holds back what it reads.
        """
        if kernel in self._proven:
            return True
        self.judge()
        if kernel in self._proven:
            return True
        key = self._driver.stream_key(device)
        mine = self._running.get(kernel, [])
        if all(check.key != key for check in mine):
            check = without_modes(ReaderCheck, self._driver, device, key, run)
            self._running[kernel] = [*mine, check]
        return False

    def is_proven_direct(self, kernel: Hashable, device: torch.device, run: Run) -> bool:
        """As `is_proven`, of a launch that is not made before: nothing is held back."""
        if kernel in self._proven:
            return True
        if self.wrong_direct is None and kernel not in self._direct:
            try:
                key = self._driver.stream_key(device)
                self._direct[kernel] = without_modes(ReaderCheck, self._driver, device, key, run)
            except Exception as error:
                if from_outside(error):
                    raise
                self.wrong_direct = kernel
            return False
        self.judge()
        return kernel in self._proven

    def judge(self) -> None:
        """Compare what has arrived. Does not wait, and does nothing while the user captures a graph."""
        if self._driver.is_capturing():  # on this stream: a query about another one would break the capture, too
            return
        for kernel, checks in tuple(self._running.items()):
            found = [check.passed() for check in checks]
            if False in found:
                self.wrong = self.wrong or kernel
            elif found and None not in found:
                self._proven.add(kernel)
                del self._running[kernel]
        for kernel, check in tuple(self._direct.items()):
            passed = check.passed()
            if passed is not None:
                del self._direct[kernel]
            if passed:
                self._proven.add(kernel)
            elif passed is False:
                self.wrong_direct = self.wrong_direct or kernel

    @property
    def are_running(self) -> bool:
        """Whether some numbers are held back."""
        return bool(self._running)

    @property
    def running(self) -> frozenset[Hashable]:
        """The kernels whose numbers are held back."""
        return frozenset(self._running)

    def have_passed(self, kernels: frozenset[Hashable]) -> bool:
        """Whether the checks of all these have passed."""
        if kernels - self._proven:
            self.judge()
        return kernels <= self._proven and self.wrong is None

    def guarded(self, packed: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Packed rows (n, 3) of the current stream: PENDING in place of all, if a check of this stream finds a kernel
        wrong. Each stream that uses a kernel checks it, so none waits for another."""
        key = self._driver.stream_key(device)
        agree = [check.agrees for checks in self._running.values() for check in checks if check.key == key]
        return without_modes(_kept_if, agree, packed) if agree else packed

    def end(self) -> None:
        """The reader is off, and what it has read is gone."""
        self._running.clear()
        self._direct.clear()


def _kept_if(agree: Iterable[Any], packed: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False):
        kept = packed
        for one in agree:
            kept = kept.masked_fill(~one, 0)
            kept[:, 2].masked_fill_(~one, PENDING)
        return kept
