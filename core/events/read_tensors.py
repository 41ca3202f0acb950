"""What is told of one tensor that was read again: its numbers, its first bad element, the script's line for it."""

from __future__ import annotations

import math

import msgspec


class OperandNumbers(msgspec.Struct, frozen=True):
    """A tensor that went into an operation or came out of it, or a number."""

    dtype: str
    """`float32`; `number` of Python's own."""
    shape: list[int] | None
    """None for a number."""
    abs_max: float | None
    """None where it is not finite, or was not read."""
    value: str
    """`finite`, `nan`, `+inf`, `-inf`; "" if it was not read."""

    @property
    def is_bad(self) -> bool:
        """It was read, and is not finite."""
        return self.value not in ("finite", "")


class ReducedElement(msgspec.Struct, frozen=True):
    """The first element of a sum over the ranks that is not finite."""

    index: list[int]
    own: float | None = None
    """What this rank had there before the sum; None: not known (`--explain N` keeps large numbers)."""


class ScriptTensor(msgspec.Struct, frozen=True):
    """A tensor in a local variable of the script, and the line that assigned it last, as far as its source tells."""

    name: str
    """`loss`; `grads[1]` in a list."""
    function: str
    """`Trainer.step`; `<module>` outside of functions."""
    file: str
    line: int
    """0: unknown."""
    code: str
    uses: list[str]
    """Names on the right side of that line."""
    ops: list[str]
    """Functions, methods and operators there: `std`, `div`."""
    numbers: OperandNumbers
    nodes: list[str] = []
    """Operations in its graph that were handed numbers outside of their domain: `DivBackward0`."""
    counts: bool = False
    """It is what a backward began from; or the line depends on it that began the backward, or that ended the script, or
    a condition around that."""

    @property
    def is_bad(self) -> bool:
        """It was read, and is not finite. A mask is -inf, too: that is bad in a single number that counts alone."""
        if self.numbers.value == "-inf":
            return self.counts and math.prod(self.numbers.shape or ()) == 1
        return self.numbers.is_bad
