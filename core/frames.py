"""Frames as people read them: one module call and a row per tensor, and their text form.

abs min  abs max  metadata
                  encoder.block.1.feed_forward.wo Linear
3.82e-08 2.17e+00 weight
1.15e-05 9.31e+03 input[0]
8.11e-02      inf output
"""

from __future__ import annotations

import math
from enum import IntFlag

import msgspec

from .roles import GRADIENTS, Role, RoleKind, parse_role
from .text import shown_name
from .values import NonFinite, RowStatistics
from .word_enum import WordEnum

HEADER = f"{'abs min':8} {'abs max':8} metadata"
NAME_INDENT = " " * 17
_MOST_IN_LINE = 6
"""Rows of a frame in its one line."""


class FramePhase(WordEnum):
    """What was being computed when a frame was taken, by its number in a recorder and its word everywhere else."""

    number: int

    FORWARD = "forward", 0
    BACKWARD = "backward", 1
    WEIGHT = "weight", 2
    """Only in a verdict: a weight was bad before the call. No frame has it."""
    OPTIMIZER = "optimizer", 3
    COLLECTIVE = "collective", 4
    INPUT = "input", 5
    """Only in a verdict: the model was handed a bad value. No frame has it."""
    RECOMPUTE = "recompute", 6
    """A forward that activation checkpointing runs again during the backward."""
    BUFFER = "buffer", 7
    """Before the root's forward: a frame of buffers that were not finite then."""
    LOSS = "loss", 8
    """What a backward begins from: a frame of `LOSS_MODULE` and `LOSS_CLASS`, with a row for each tensor."""


PHASES = tuple(FramePhase)
"""By number."""
LOSS_MODULE, LOSS_CLASS = "(loss)", "backward"
"""The name and class of a frame of `FramePhase.LOSS`. No module has such a name."""


class RowMark(IntFlag):
    """Properties of a row beside its numbers."""

    NONE = 0
    IGNORED = 1
    """A rule of the user's (`--ignore`) waives it."""
    SCALED = 4
    """A gradient that a GradScaler checks. An inf or nan there is expected: the scaler skips the step."""
    SKIPPED = 8
    """The batch is one that `--every` skips: only the root's outputs are inspected."""
    CLOSED = 16
    """An argument that is -inf throughout in one of its rows (along its last dimension): softmax makes nan of that."""
    REHEARSED = 32
    """A gradient of the rehearsal of `make_graphed_callables`: nobody has written it."""


class RowKind(WordEnum):
    """Whether a row has numbers, or why it has none, by its number in a recorder and its word everywhere else."""

    number: int

    MEASURED = "measured", 0
    NONE = "none", 1
    NOT_A_TENSOR = "not_a_tensor", 2
    NOT_MEASURABLE = "not_measurable", 3
    EMPTY = "empty", 4
    LOST = "lost", 5
    PENDING = "pending", 6


ROW_KINDS = tuple(RowKind)
"""By number."""


class Row(RowStatistics, frozen=True):
    """One tensor in a frame.

    `abs_min` and `abs_max` are None where there are no numbers and, in JSON, where they are non-finite.
    """

    role: str
    abs_min: float | None
    abs_max: float | None
    nan: bool
    posinf: bool
    neginf: bool
    dtype: str
    shape: list[int] | None
    kind: RowKind = RowKind.MEASURED
    flags: int = 0
    value: int = -1
    """Index of the measured value in the page. Two rows with the same index are about the same tensor."""
    mark: int = 0
    """`RowMark`"""

    def __repr__(self) -> str:
        """One line: `<output: abs min 8.11e-02, abs max inf, float16 [4, 16]>`."""
        numbers = ", ".join(map(" ".join, zip(("abs min", "abs max"), _sizes(self), strict=False)))
        if self.kind != RowKind.MEASURED:
            numbers = _sizes(self)[-1]
        tensor = f", {self.dtype} {self.shape}" if self.shape is not None else ""
        return f"<{shown_name(self.role)}: {numbers}{tensor}>"

    @property
    def parsed_role(self) -> Role:
        """What the row is about. Each text is parsed once (core.roles)."""
        return parse_role(self.role)

    @property
    def role_kind(self) -> RoleKind:
        """The kind of what the row is about."""
        return parse_role(self.role).kind

    @property
    def finite(self) -> bool:
        """No nan and no inf was seen in it."""
        return not self.flags

    @property
    def only_neginf(self) -> bool:
        """It holds -inf, and neither nan nor +inf, as masks do."""
        return self.flags == NonFinite.NEGINF


class Frame(msgspec.Struct, frozen=True):
    """One module call in a batch. Frames are in the order in which the calls returned: a child before its parent."""

    batch: int
    index: int
    module: str
    cls: str = msgspec.field(name="class")
    phase: FramePhase
    rows: list[Row]
    depth: int = 0
    parent: str | None = None
    seq: int = -1
    collectives: int = 0
    """How many collectives were issued during the call. The count stops at 255."""

    def __repr__(self) -> str:
        """One line: `<batch 3, forward, `wo` (Linear): weight 2.17e+00, input[0] 9.31e+03, output inf>`, by abs max."""
        rows = [f"{shown_name(row.role)} {_sizes(row)[-1]}" for row in self.rows[:_MOST_IN_LINE]]
        more = len(self.rows) - len(rows)
        listed = ", ".join([*rows, *([f"{more} more"] if more else [])]) or "no rows"
        return f"<batch {self.batch}, {self.phase}, {module_text(self.module, self.cls)}: {listed}>"

    @property
    def title(self) -> str:
        """Name and class, as the text form heads a frame with them."""
        return f"{self.module} {self.cls}"

    @property
    def inputs(self) -> list[Row]:
        """Rows of the positional and keyword arguments."""
        return [row for row in self.rows if row.role_kind is RoleKind.INPUT]

    @property
    def outputs(self) -> list[Row]:
        """Rows of what the call returned."""
        return [row for row in self.rows if row.role_kind is RoleKind.OUTPUT]

    @property
    def weights(self) -> list[Row]:
        """Rows of the module's own parameters."""
        return [row for row in self.rows if row.role_kind is RoleKind.WEIGHT]

    @property
    def gradients(self) -> list[Row]:
        """Rows of gradients: `grad output[0]` of what the module returned, `grad weight` of a parameter."""
        return [row for row in self.rows if row.role_kind in GRADIENTS]

    @property
    def states(self) -> list[Row]:
        """Rows of what an optimizer keeps of the module's parameters: `state exp_avg weight`."""
        return [row for row in self.rows if row.role_kind is RoleKind.STATE]


class Page(msgspec.Struct, frozen=True):
    """All frames of one batch of one rank. `lost_frames` of them were overwritten, or lack rows."""

    rank: int
    attempt: int
    number: int
    root: str
    batch: int
    step: int
    complete: bool
    frames: list[Frame]
    lost_frames: int = 0


def is_inside(earlier: Frame, frame: Frame) -> bool:
    """Whether a call that returned earlier was made inside of this one.

    A compiled region counts the depth of its calls from its own start, so for these the parent's name decides.
    """
    if earlier.depth != frame.depth:
        return earlier.depth > frame.depth
    return earlier.parent == frame.module != frame.parent


def module_text(module: str, cls: str | None) -> str:
    """A module by name and class, for a sentence, safe to show (core/text.py). The root has no name.

    >>> module_text("fc1", "Linear"), module_text("", "Net")
    ('`fc1` (Linear)', 'the root module (Net)')
    """
    kind = shown_name(cls or "?")
    return f"`{shown_name(module)}` ({kind})" if module else f"the root module ({kind})"


def format_number(number: float | None) -> str:
    """`%8.2e`, the width and precision of the 21-frame table."""
    return f"{number:8.2e}" if number is not None else f"{'-':>8}"


def format_row(row: Row) -> str:
    """One line: abs min, abs max, role.

    >>> format_row(Row("weight", 0.5, 2.0, False, False, False, "float32", [2]))
    '5.00e-01 2.00e+00 weight'
    >>> format_row(Row("output", 0.5, None, False, True, False, "float16", [2]))
    '5.00e-01      inf output'
    """
    return f"{' '.join(f'{size:>8}' for size in _sizes(row)):>17} {row.role}"


def _sizes(row: Row) -> list[str]:
    """abs min and abs max as text, or the one word that stands for them."""
    if row.kind == RowKind.NONE:
        return ["None"]
    if row.kind != RowKind.MEASURED:
        return [row.kind.replace("_", " ")]
    if row.nan:  # torch's own min and max, which this table grew from, are nan as soon as one element is
        return ["nan", "nan"]
    inf = math.inf if row.posinf or row.neginf else None  # JSON has no inf: there it was None
    low, high = (inf if number is None else number for number in (row.abs_min, row.abs_max))
    return [format_number(low).strip(), format_number(high).strip()]


def format_frame(frame: Frame) -> list[str]:
    """A frame as lines: the name and class, then a line per row."""
    return [f"{NAME_INDENT} {frame.title}", *map(format_row, frame.rows)]


def format_frames(frames: list[Frame]) -> str:
    """The table of several frames under its header."""
    return "\n".join([HEADER, *(line for frame in frames for line in format_frame(frame))])
