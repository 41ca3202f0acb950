"""What a diagnosis knows beside its place, by what the value was first seen in: a weight, a gradient, or a mask."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightEvidence:
    """Of the weights of the module that a diagnosis names."""

    was_read: bool = True
    """False: they were last read after an optimizer step, and not again when the value was seen."""
    changed_since: bool = False
    """The bad weight was finite when it was last read, and no step can have changed it since."""
    others_changed: bool = False
    """Weights have changed since they were last read, by no step that was seen."""
    computed: bool = False
    """The script has computed the bad weight from other tensors."""
    history: str = ""
    """The earlier readings of the bad weight: a clause (step_origin.py)."""


@dataclass(frozen=True)
class PossibleMakers:
    """Who can have made a gradient, where several can have: the module of the diagnosis holds all of them."""

    suspects: tuple[str, ...] = ()
    """Calls."""
    own_code: tuple[str, ...] = ()
    """Modules whose own code can have made it, or a value that went on by another way than frames show."""
    excluded: tuple[str, ...] = ()
    """Operations that also used the tensor, and cannot have made it: `AddBackward0 of `block``."""


@dataclass(frozen=True)
class MaskEvidence:
    """Of an -inf, which masks are made of, and from which a nan was made."""

    text: str = ""
    """What held it: `a row of input[1] is -inf throughout`. "" if that is not known."""
    turned: tuple[str, str] | None = None
    """(module, class) in which an expected -inf turned into nan."""
