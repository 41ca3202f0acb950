"""What may be wrong in a kernel that reads tensors, or in its launch: faults of host_kernels.py."""

from __future__ import annotations

import torch
from gpuwatch.core.values import NonFinite

from .host_kernels import KernelFault, at


class WrongStride(KernelFault):
    def before(self, name, given):
        if given.get("stride", 0) > 0:
            given["stride"] -= 1
        return True


class MissingTail(KernelFault):
    def elements(self, numbers):
        return numbers[: len(numbers) // 4096 * 4096 or None]


class MissingFirst(KernelFault):
    def elements(self, numbers):
        return numbers[1:] if len(numbers) > 1 else numbers


class OneTooMany(KernelFault):
    def before(self, name, given):
        for argument in ("elements", "others"):
            if argument in given and not given.get("stride"):
                given[argument] += 1
        return True


class StaleTable(KernelFault):
    """A table of the launch before, as if the copy of this one had not come yet."""

    last = None

    def before(self, name, given):
        if name == "read_many" and not given["KEEP"]:
            now = at(given["table"], 8 * given["number"]).clone()
            table = self.last if self.last is not None and len(self.last) == len(now) else now
            self.last, self.kept = now, table
            given["table"] = table.data_ptr()
        return True


class StalePack(KernelFault):
    """The numbers of the launch before."""

    last = None

    def packed(self, rows, packed):
        last, self.last = self.last, packed.clone()
        return last if last is not None and last.shape == packed.shape else packed


class SwappedRows(KernelFault):
    def before(self, name, given):
        if name == "read_many" and given["number"] > 1:
            table = at(given["table"], 16).view(2, 8)
            table[:, 3] = table[:, 3].flip(0)
        if name == "read_two":
            given["source"], given["other"] = given["other"], given["source"]
            given["elements"], given["others"] = given["others"], given["elements"]
        return True


class NextRow(KernelFault):
    def before(self, name, given):
        if "position" in given:
            given["position"] += 1
        return True


class WrongDtype(KernelFault):
    def elements(self, numbers):
        other = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16, torch.float32: torch.int32}
        return numbers.view(other.get(numbers.dtype, numbers.dtype))


class NoAbs(KernelFault):
    """A negative number is smaller than 0."""

    def elements(self, numbers):
        return torch.where(numbers < 0, torch.zeros_like(numbers), numbers)


class NanUncounted(KernelFault):
    def row(self, row):
        row[2] &= ~int(NonFinite.NAN)
        return row


class SignOfInf(KernelFault):
    def row(self, row):
        if row[2] & int(NonFinite.NEGINF):
            row[2] ^= int(NonFinite.NEGINF) | int(NonFinite.POSINF)
        return row


class Flushed(KernelFault):
    """Subnormals are flushed to zero."""

    def elements(self, numbers):
        small = numbers.abs() < torch.finfo(numbers.dtype).smallest_normal
        return torch.where(small, torch.zeros_like(numbers), numbers)


class KeptTooLong(KernelFault):
    """A weight keeps its earlier numbers whatever is in front of it."""

    def before(self, name, given):
        if name == "read_many" and given["KEEP"]:
            for entry in at(given["table"], 8 * given["number"]).view(-1, 8):
                entry[7] = 0
        return True


class NotReset(KernelFault):
    resets_nothing = True


class Nothing(KernelFault):
    """A launch that does nothing."""

    def before(self, name, given):
        return name == "pack"


FAULTS = [WrongStride, MissingTail, MissingFirst, OneTooMany, StaleTable, StalePack, SwappedRows, NextRow, WrongDtype]
FAULTS += [NoAbs, NanUncounted, SignOfInf, Flushed, KeptTooLong, NotReset, Nothing]
