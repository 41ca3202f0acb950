"""Bad values in the recorder of a rank that does not move, which it could not judge itself. Changes nothing there.

A device's numbers lie in the recorder as soon as the device has copied them. The rank judges them in its next hook, and
a rank that waits for others reaches none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from ...core.frames import Frame, RowKind
from ...core.judge import first_alarm
from ...core.recorder.page_tables import PageTables
from ...core.recorder.pages import NameTable
from ...core.recorder.reader import RecorderReader
from ...core.wire.messages import PageMessage

MOST_PAGES = 2
"""How many bad batches are looked for: the first of them is the one that counts."""


def unjudged_pages(path: Path) -> list[PageMessage]:
    """The first pages with an alarm. Raises OSError, or another error, for a file that is no recorder."""
    with closing(RecorderReader(path)) as reader:
        names = NameTable()
        names.add(reader.new_entries()[0])
        found: list[PageMessage] = []
        for page in _pages(reader):
            if len(found) < MOST_PAGES and _has_alarm(page, names):
                found.append(page)
        return found


def _pages(reader: RecorderReader) -> Iterator[PageMessage]:
    for held in reader.held():
        page = reader.page(held.number)
        if page is not None:
            yield page


def _has_alarm(page: PageMessage, names: NameTable) -> bool:
    """Whether it holds one whose earlier numbers are all there: one of those may still turn out bad."""
    tables = PageTables(page)
    if not tables.suspicious(names):
        return False
    found = first_alarm(_in_order(tables.decode_suspicious(names)))
    if found is None:
        return False
    frames = _in_order(tables.decode(names))
    found = first_alarm(frames)  # a frame between them may have taken the value away
    if found is None:
        return False
    last = found[0].index
    before = (row for frame in frames if frame.index <= last for row in frame.rows)
    return all(row.kind != RowKind.PENDING for row in before)


def _in_order(frames: list[Frame]) -> list[Frame]:
    return sorted(frames, key=lambda frame: frame.index)
