"""What a rank finds out after its first alarm: the operation, its trials, the capture, and the samples of the batch."""

from __future__ import annotations

from pathlib import PurePath

import msgspec

from ..frames import format_number
from ..marked_line import shown_line
from ..text import joined
from .read_tensors import OperandNumbers
from .run_position import RankEvent

SECOND_RUN_S = 20.0
EVERYTHING = "everything"
"""What `element` says if no element is finite."""
NOTHING, SAMPLES = "nothing", "samples"
"""What a trial of a forward has changed."""


class CauseTrial(msgspec.Struct, frozen=True):
    """An experiment after an alarm: an operation, or a forward, has run once more with one thing changed."""

    of: str
    """`operation`: alone, on its own operands; `forward`: that of the second run."""
    changed: str
    """`nothing`; `float32`, `bfloat16`, `float64`: computed in that dtype; `samples`: those that stand out replaced by
    one that does not."""
    value: str = ""
    """What came out: `finite`, `nan`, `+inf`, `-inf`; "" if it did not run."""
    abs_max: float | None = None
    note: str = ""
    """Why it did not run, as a clause."""


class OddSamples(msgspec.Struct, frozen=True):
    """Indices along dim 0 of one argument of a call that stand out from the others: samples, if dim 0 counts those.

    They are also the only ones along dim 0 of the bad tensor that hold the bad value.
    """

    module: str
    """The module that was handed them."""
    role: str
    """`input[0]`, `kwargs.x`"""
    indices: list[int]
    """Along dim 0."""
    size: int
    """Of dim 0."""
    how: str
    """`large`, `zero`, or `constant`"""
    abs_max: float
    """The largest of theirs."""
    highest: float
    """The largest abs max of the other samples."""
    before: float | None = None
    """The largest abs max of that argument in earlier batches; None if none of them is known."""


class BadOperation(msgspec.Struct, frozen=True):
    """The operation that made a non-finite value in a second run of a forward, or in a batch of --explain N."""

    op: str
    """`aten.mul.Tensor`"""
    module: str
    """Name of the innermost module in whose forward it ran."""
    file: str
    line: int
    """The innermost line of the script's own code, or of a library that is not torch."""
    code: str
    """That line."""
    inputs: list[OperandNumbers]
    output: OperandNumbers
    element: str
    """Which elements are not finite, in words (worker/record/bad_elements.py)."""
    node: str = ""
    """In a backward: `SqrtBackward0`. Then `code` is the line of the forward whose backward it is."""
    handed: list[float] = []
    """What an operation that works element by element was handed for its first bad element, in the order of `inputs`.
    [] for other operations."""
    trials: list[CauseTrial] = []
    """Of the operation alone. [] if none was made."""
    columns: tuple[int, int] | None = None
    """The operation's part of `code`: its first character, and the one behind its last. It ends with the line, if the
    operation goes on in the next one. None: not known. Python 3.10 has none, nor have autograd's notes of a forward."""
    variables: list[str] = []
    """Of a loss: the script's variables that hold its operands, as far as they are known."""

    @property
    def name(self) -> str:
        """`mul_` of `aten.mul_.Tensor`."""
        return self.op.removeprefix("aten.").partition(".")[0]


def operation_text(found: BadOperation, width: int = 0) -> str:
    """One line: the code, in `width` characters if that is given, its place, the operation, and the numbers.

    `scores = q @ k`, model.py:87, aten.mm.default: abs max 3.20e+20 and 3.00e+36 in, inf out (float32 [8]); everything
    """
    sizes = [format_number(each.abs_max).strip() if each.value == "finite" else each.value for each in found.inputs]
    sizes = list(filter(None, sizes))
    given = f"abs max {joined(sizes)} in, " if sizes else ""
    line = shown_line(found.code, found.columns, width) if width else found.code
    code = f"`{line}`, " if line else ""
    place = f"{code}{PurePath(found.file).name}:{found.line}, " if found.file else ""
    place += f"in its backward ({found.node}), " if found.node else ""
    made = found.output
    return f"{place}{found.op}: {given}{made.value} out ({made.dtype} {made.shape}); {found.element}"


class PossibleLine(msgspec.Struct, frozen=True):
    """A line that may have made a bad value: what ran there as the forward ran with other weights or another batch."""

    file: str
    line: int
    code: str
    ops: list[str]
    """`mul`, `exp`"""


class SecondRun(RankEvent, frozen=True, tag="second_run"):
    """The forward in which a rank's first alarm was raised has run a second time, or could not. Or its batch is that of
    --explain N, and has run under the same watch from the start."""

    operation: BadOperation | None = None
    unknown: str = ""
    """Why it is None: a sentence without its full stop."""
    eagerly: bool = False
    """The call had run compiled code."""
    samples: OddSamples | None = None
    trials: list[CauseTrial] = []
    """Of the forward."""
    cls: str = ""
    """Class of the operation's module; "" where that is not known."""
    took_s: float = 0.0
    """Seconds of all that ran after the alarm to find the operation, trials included. 0: a rank of an older version."""
    lines: list[PossibleLine] = []
    """Where `operation` is None: all that can have made the value. [] if that is not known."""


class CaptureFile(msgspec.Struct, frozen=True):
    """The forward of an alarm as a file, with its weights and its inputs, or why there is none."""

    path: str = ""
    bytes: int = 0
    module: str = ""
    """`attn (model.Attention)`: its name in the model, and its class."""
    needs_trust: bool = False
    """To run it again, code must be imported, or objects unpickled."""
    notes: list[str] = []
    refused: str = ""
    """A clause; "" where there is a file."""


class ForwardCaptured(RankEvent, frozen=True, tag="captured"):
    """`--capture`, at a rank's first alarm."""

    file: CaptureFile


class BatchInputs(RankEvent, frozen=True, tag="batch_inputs"):
    """What the model was handed in the batch of a rank's first alarm: role -> digest (worker/record/names.py)."""

    digests: dict[str, str]
    bad: dict[str, str] = {}
    """Role -> which elements are nan or +inf, in words (worker/record/bad_elements.py)."""
    rows: dict[str, list[int]] = {}
    """Role -> the indices along dim 0 that hold nan or +inf, where they are few and not all."""


class BatchSource(RankEvent, frozen=True, tag="batch_source"):
    """Which samples the model was handed in the batch of a rank's first alarm (worker/explain/batch_source.py).

    A batch of a DataLoader that holds the same numbers was found.
    """

    dataset: str = ""
    """Its class: `mine.data.Images`; "" where no batch was found."""
    indices: list[int] = []
    """Of the data set, for each position in dim 0 of what the model was handed; [] if they are not known."""
    keys: dict[str, list[str]] = {}
    """Likewise what the batch carries of its samples: `path`, `id`; `index` where the indices are no integers."""
    epoch: int = -1
    """How often the loader had been iterated before; -1: not known."""
    ordinal: int = -1
    """Number of the batch in that epoch, from 0; -1: not known."""
    worker: int = -1
    """The worker that made it; -1: the process of the rank; -2: not known."""
    unknown: str = ""
    """Why `indices` is empty: a clause."""
    among: list[int] = []
    """All indices of the batch, where it is not known which one is where in dim 0."""
    in_order: bool = False
    """Whether the loader's collate function keeps the order of the samples, as torch's own does."""


EvidenceEvent = SecondRun | ForwardCaptured | BatchInputs | BatchSource
