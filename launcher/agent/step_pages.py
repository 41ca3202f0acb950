"""Which pages of a rank are read for what its optimizer steps show (core/recorder/step_findings.py).

While the rank runs, these are the pages that its history reads. When it has ended, all others that its recorder holds
are read, too: of a short run the history may have seen few.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ...core.events.definitions import Definition
from ...core.recorder.page_tables import PageTables
from ...core.recorder.reader import RecorderReader
from ...core.recorder.step_findings import StepEvent, StepFindings
from ...core.wire.messages import PageMessage

_REMEMBERED = 1024
"""More pages than a recorder holds."""
_MOST_AGAIN = 16


class StepPages:
    """The pages of one rank in one attempt."""

    def __init__(self) -> None:
        self._findings = StepFindings()
        self._done: deque[int] = deque(maxlen=_REMEMBERED)
        """Numbers of pages that were read."""
        self._again: deque[int] = deque(maxlen=_MOST_AGAIN)
        """Those of pages whose outputs had arrived from a device, but not all gradients and weights."""

    def define(self, entries: Iterable[Definition]) -> None:
        """New definitions of the rank."""
        self._findings.define(entries)

    def read(self, page: PageMessage, tables: PageTables, *, late: bool) -> None:
        """A page that is over. `late`: its numbers have had their time to arrive."""
        if not late and tables.lacks_numbers:
            self._again.append(page.number)
            return
        self._findings.add(page, tables)
        self._done.append(page.number)

    def read_again(self, reader: RecorderReader, *, late: bool) -> None:
        """Read the pages that lacked numbers, as far as the recorder still holds them."""
        numbers = list(self._again)
        self._again.clear()
        for page in filter(None, map(reader.page, numbers)):
            self.read(page, PageTables(page), late=late)

    def finish(self, reader: RecorderReader, rank: int, attempt: int) -> list[StepEvent]:
        """The rank has ended: what its steps show."""
        done = set(self._done)
        for number in [held.number for held in reader.held() if held.number not in done]:
            page = reader.page(number)
            if page is not None:
                self.read(page, PageTables(page), late=True)
        return list(self._findings.events(rank, attempt))
