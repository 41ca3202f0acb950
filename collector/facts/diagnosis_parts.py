"""What a diagnosis knows beside its place: the row that shows the value, and evidence by what the value was seen in."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.events.across_ranks import PassedTensor
from ...core.frames import FramePhase, module_text


@dataclass(frozen=True)
class BadRow:
    """The row in which a rank's first non-finite value was seen. Another module may have made that value."""

    module: str
    cls: str
    role: str
    phase: FramePhase
    frame: int
    """Index of its frame in the page."""
    value: str
    dtype: str
    shape: tuple[int, ...] | None
    """None: unknown."""

    @property
    def place(self) -> str:
        """Its module, for a sentence."""
        return module_text(self.module, self.cls)


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


@dataclass(frozen=True)
class PassageEvidence:
    """Of whether the value came from another rank or another model, or went on to one."""

    proved: bool = False
    """An operation of this rank has made the value of finite operands."""
    passed: bool = False
    """The model's input may come from another rank or another model."""
    puts: tuple[PassedTensor, ...] = ()
    """Bad values that this rank has put into collectives itself, before others can have got them."""
