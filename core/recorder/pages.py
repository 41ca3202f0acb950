"""Turns a page's numbers into frames with names: the inverse of what a recorder stores. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from msgspec.structs import replace

from ..events.definitions import Definition, ModuleDef, RootDef, ShapeDef, SlotDef
from ..frames import PHASES, ROW_KINDS, Frame, Page, Row, RowKind
from ..roles import RoleKind, parse_role
from ..text import is_shown, shown_name
from ..values import DTYPE_NAMES, PENDING, NonFinite, Value, headroom
from ..wire.messages import PageMessage
from . import layout

_MOST_SLOTS = 1 << 20
"""More than the log of a recorder can hold."""


class NameTable:
    """The definitions of one rank in one attempt. Their names are safe to show (core/text.py)."""

    def __init__(self) -> None:
        self.roots: dict[int, RootDef] = {}
        self.modules: dict[int, ModuleDef] = {}
        self.slots: dict[int, SlotDef] = {}
        self.shapes: dict[int, ShapeDef] = {}

    def add(self, entries: Iterable[Definition]) -> None:
        """Add definitions. Their order does not matter, and neither do duplicates."""
        for cached in ("weight_slots", "argument_slots"):
            self.__dict__.pop(cached, None)
        for entry in entries:
            if isinstance(entry, RootDef):
                self.roots[entry.id] = entry if is_shown(entry.cls) else replace(entry, cls=shown_name(entry.cls))
            elif isinstance(entry, ModuleDef):
                if not (is_shown(entry.name) and is_shown(entry.cls)):
                    entry = replace(entry, name=shown_name(entry.name), cls=shown_name(entry.cls))
                self.modules[entry.id] = entry
            elif isinstance(entry, SlotDef):
                self.slots[entry.id] = entry if is_shown(entry.role) else replace(entry, role=shown_name(entry.role))
            else:
                self.shapes[entry.id] = entry

    @cached_property
    def weight_slots(self) -> bytes:
        """A byte for each number of a slot: 1 if it is about a weight, or is not known; one for all others behind."""
        return self._slots_of(RoleKind.WEIGHT, unknown=True)

    @cached_property
    def argument_slots(self) -> bytes:
        """A byte for each number of a slot: 1 if it is about what a call was handed; a 0 behind."""
        return self._slots_of(RoleKind.INPUT, RoleKind.BEFORE, unknown=False)

    def _slots_of(self, *kinds: RoleKind, unknown: bool) -> bytes:
        found = bytearray([unknown]) * (min(max(self.slots, default=-1) + 1, _MOST_SLOTS) + 1)
        for number, slot in self.slots.items():
            if 0 <= number < len(found) - 1:
                found[number] = parse_role(slot.role).kind in kinds
        return bytes(found)

    def root_label(self, root_id: int) -> str:
        """The root's class; `Net#2` for the second root of class Net."""
        root = self.roots.get(root_id)
        return root.label if root is not None else f"root {root_id}"


FrameFields = tuple[int, int, int, int, int, int, int, int, int]
"""What `layout.FRAME` unpacks to."""
RowFields = tuple[int, int, int, int, int, int]
"""What `layout.ROW` unpacks to."""


def decode_page(message: PageMessage, names: NameTable) -> Page:
    """Give a page its names. A missing definition or number is shown as lost and never guessed."""
    values: dict[int, Value] = {}
    for segment in message.segments:
        for offset, numbers in enumerate(layout.VALUE.iter_unpack(segment.values)):
            values[segment.value_base + offset] = Value(*numbers)
    frames: list[Frame] = []
    cut = 0
    for segment in message.segments:
        rows = list(layout.ROW.iter_unpack(segment.rows))
        for fields in layout.FRAME.iter_unpack(segment.frames):
            first, count = fields[6], fields[7]
            own = rows[first : first + count]
            cut += len(own) < count
            frames.append(decode_frame(message.batch, fields, own, values.get, names))
    seen = {frame.index for frame in frames}
    return Page(
        rank=message.rank,
        attempt=message.attempt,
        number=message.number,
        root=names.root_label(message.root),
        batch=message.batch,
        step=message.step,
        complete=message.complete,
        frames=frames,
        lost_frames=frames_lost(max(seen, default=-1), len(seen), cut),
    )


def frames_lost(last: int, seen: int, cut: int) -> int:
    """Frames that a page lacks. `last`: the index of its last frame (-1: none); `cut` of `seen` frames lack rows."""
    return last + 1 - seen + cut


def decode_frame(
    batch: int,
    fields: FrameFields,
    rows: Iterable[RowFields],
    value_at: Callable[[int], Value | None],
    names: NameTable,
) -> Frame:
    """One frame. `value_at` gives the numbers at an index of the page, None if they are lost."""
    module_id, parent_id, depth, phase, collectives, seq, _, _, index = fields
    module = names.modules.get(module_id)
    parent = names.modules.get(parent_id) if parent_id != layout.NOTHING else None
    return Frame(
        batch=batch,
        index=index,
        module=module.name if module else f"<module {module_id}>",
        cls=module.cls if module else "?",
        phase=PHASES[phase],
        rows=[decode_row(row, value_at, names) for row in rows],
        depth=depth,
        parent=None if parent_id == layout.NOTHING else parent.name if parent else f"<module {parent_id}>",
        seq=seq,
        collectives=collectives,
    )


_STATISTICS = [
    name for name in Row.__struct_fields__ if isinstance(vars(Value).get(name), property) and name != "flags"
]
"""The numbers of a row: its fields that a value has, too."""


def decode_row(row: RowFields, value_at: Callable[[int], Value | None], names: NameTable) -> Row:
    """One row of a frame."""
    slot_id, value_index, shape_id, dtype, kind, mark = row
    content = ROW_KINDS[kind]
    slot = names.slots.get(slot_id)
    shape = names.shapes.get(shape_id)
    value = value_at(value_index)
    if value is None and content is RowKind.MEASURED:
        content = RowKind.LOST
    if value is not None and value.meta == PENDING:
        content, value = RowKind.PENDING, None
    flags = value.flags if value is not None else NonFinite.NONE
    statistics: dict[str, Any] = {name: getattr(value, name, None) for name in _STATISTICS}  # None has none of them
    name = DTYPE_NAMES[dtype] if dtype < len(DTYPE_NAMES) else "unknown"
    return Row(
        role=slot.role if slot else f"<slot {slot_id}>",
        nan=bool(flags & NonFinite.NAN),
        posinf=bool(flags & (NonFinite.POSINF | NonFinite.INF)),
        neginf=bool(flags & NonFinite.NEGINF),
        dtype=name,
        shape=list(shape.dims) if shape else None,
        kind=content,
        flags=int(flags),
        value=value_index if value_index != layout.NOTHING else -1,
        mark=mark,
        headroom=headroom(statistics["abs_max"], name),
        **statistics,
    )
