"""A difference as a terminal shows it: both sides, the first difference, then a table of what differs."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from ...core.frames import FramePhase, Row, RowContent, format_number, module_text
from ...core.text import shown_name
from ..report.sentence_parts import TextConsole
from .batch_diff import BatchDifference, DiffSide, RowDifference

MOST_ROWS = 40
_SAID = {
    "shape": "its shape is {a} in A and {b} in B",
    "dtype": "its dtype is {a} in A and {b} in B",
    "only in A": "it was measured in A alone",
    "only in B": "it was measured in B alone",
}


def render_difference(
    sides: tuple[DiffSide, DiffSide],
    found: BatchDifference,
    *,
    factor: float,
    width: int = 110,
    color: bool = False,
    every_row: bool = False,
) -> str:
    """The whole text, `width` characters wide. `factor`: what counts as a large difference between two abs max."""
    console = TextConsole(width, color=color)
    for name, side in zip("AB", sides, strict=True):
        console.print(Text(f"{name}  {_side_text(side)}"))
    console.print(Text(""))
    first, large = found.first(), found.first(factor)
    if first is None:
        alike = f"SAME  All {found.compared} tensors are the same by abs max, abs min and zeros."
        console.print(Text(alike, "bold green"))
        return console.text()
    console.print(Text(f"DIFFERENT  The first difference is {_sentence(first)}.", "bold yellow"))
    console.print(Text(f"  {_before(found)}"))
    if large is None:
        console.print(Text(f"  No abs max differs by more than a factor of {factor:g}."))
    elif large is not first:
        console.print(Text(f"  The first one by more than a factor of {factor:g} is {_sentence(large)}."))
    rows = found.rows if every_row else found.rows[:MOST_ROWS]
    console.print(Text(""))
    console.print(_table(rows))
    if len(rows) < len(found.rows):
        console.print(Text(f"and {len(found.rows) - len(rows)} more: --all"))
    return console.text()


def _side_text(side: DiffSide) -> str:
    attempt = f", attempt {side.attempt}" if side.attempt else ""
    part = "" if side.complete else " (a part of it)"
    return (
        f"run {shown_name(side.run)}, rank {side.rank}{attempt}, {shown_name(side.root)}, batch {side.batch}, "
        f"step {side.step}{part}"
    )


def _before(found: BatchDifference) -> str:
    if found.before < 2:
        return "The tensor before it is the same." if found.before else "It is the first tensor of all."
    return f"The {found.before} tensors before it are the same."


def _sentence(row: RowDifference) -> str:
    call = f", call {row.call + 1}" if row.call else ""
    where = f"{shown_name(row.role)} of {module_text(row.module, row.cls)}, {row.phase}{call}"
    if row.what in _SAID:
        return f"{where}: {_SAID[row.what].format(a=_of(row.a, row.what), b=_of(row.b, row.what))}"
    if row.factor == 1:
        return f"{where}: abs max is {_number(row.a)} on both, and abs min or the zeros are not the same"
    a, b = _number(row.a), _number(row.b)
    if a == b and row.a is not None and row.b is not None:
        a, b = f"{row.a.abs_max:.9g}", f"{row.b.abs_max:.9g}"
    return f"{where}: abs max is {a} in A and {b} in B"


def _of(row: Row | None, what: str) -> str:
    if row is None:
        return "-"
    return str(row.dtype if what == "dtype" else tuple(row.shape) if row.shape is not None else "unknown")


def _number(row: Row | None) -> str:
    if row is None or row.kind != RowContent.MEASURED:
        return "-"
    if row.nan:
        return "nan"
    if row.flags:
        return "inf"
    return format_number(row.abs_max).strip()


def _table(rows: list[RowDifference]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("module")
    table.add_column("tensor", no_wrap=True)
    for name in ("A abs max", "B abs max", "factor"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        name = f"{shown_name(row.module) or '(root)'} {shown_name(row.cls)}"
        phase = "" if row.phase == FramePhase.FORWARD else f" ({row.phase})"
        factor = row.what if row.what not in ("numbers", "non-finite") else _factor(row)
        cells = [f"{name}{phase}", shown_name(row.role), _number(row.a), _number(row.b), factor]
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _factor(row: RowDifference) -> str:
    if row.factor is None:
        return row.what if row.what == "non-finite" else "inf"
    return (
        "same abs max"
        if row.factor == 1
        else f"{row.factor:.3g}"
        if row.factor >= 1.01
        else f"1 + {row.factor - 1:.1e}"
    )
