"""Which reader reads on a device: gpuwatch's own kernels, or torch's operations where these fail or read wrongly."""

from __future__ import annotations

from typing import Any

from ...core.signal_errors import from_outside
from ...core.text import error_text
from .device import StatsDevice
from .kernel_launcher import KernelLauncher
from .reader_check import ReaderChecks
from .torch_reader import TensorReader, TorchReader
from .triton_reader import TritonReader


class ReaderChoice:
    """The part of a DeviceStatsBuffer that chooses its reader, and tells why it is not the best one."""

    def __init__(self, driver: StatsDevice, reader: TensorReader | None) -> None:
        self.note = ""
        """A defect and its consequence; empty if all is well. It may grow."""
        self._driver = driver
        self.checks = ReaderChecks(driver)
        """Of the kernels of its own reader."""
        self.faults: list[str] = []
        """What gave wrong numbers on known ones, and what reads instead. The caller takes them out."""
        self._reader = reader or self._best_reader()
        self.reads = self._reader.reads if isinstance(self._reader, TritonReader) else None
        """The kernels that the native writer may launch itself."""

    def _best_reader(self) -> TensorReader:
        if self._driver.type != "cuda":
            return TorchReader()
        try:
            reader = TritonReader(launcher=KernelLauncher(self._add_note, add_fault=self.faults.append))
            reader.checks = self.checks
            if not reader.interpreted:
                return reader
            self._add_note(_no_kernel("Triton runs in its interpreter"))
        except Exception as error:  # an incompatible Triton may raise anything
            if from_outside(error):
                raise
            self._add_note(_no_kernel(error_text(error)))
        return TorchReader()

    def _add_note(self, what: str) -> None:
        if what not in self.note:
            self.note = f"{self.note}; {what}" if self.note else what

    def _do(self, method: str, *arguments: Any) -> Any:
        """Have a method of the reader do something. If it fails, have torch's operations do it, from now on as well.

        Triton may lack a compiler, a cache folder or support for the device. Where torch's operations fail too, it was
        the device.
        """
        try:
            done = getattr(self._reader, method)(*arguments)
        except Exception as error:
            if from_outside(error):
                raise
            if isinstance(self._reader, TorchReader):
                raise
            reader = TorchReader()
            done = getattr(reader, method)(*arguments)
            self._reader, self.reads = reader, None
            self._add_note(_no_kernel(error_text(error)))
        if method == "pack" and self.checks.are_running:
            done = self.checks.guarded(done, arguments[0].device)
        return done


def _no_kernel(why: str) -> str:
    return (
        f"gpuwatch's own kernel is not available ({why}): torch's operations read each tensor instead, with about 30 "
        "launches and several passes for each. Triton needs a C compiler and Python.h on the machine that trains"
    )
