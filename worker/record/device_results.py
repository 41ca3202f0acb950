"""What comes back from a device, later: looked at without waiting, a batch behind at most."""

from __future__ import annotations

from ...core.alarm import anomaly_of_page
from ...core.frames import Page
from ...core.pages import Names, decode_page
from ...core.recorder.reader import RecorderReader
from ...core.records import Fault
from ..stats.device_buffer import DeviceStatsBuffer
from .policy import Policy, near_by_encoding
from .progress import Progress
from .rows import Rows


class DeviceResults:
    """Reads our own recorder, as the node agent does: this happens once or twice in the life of a run."""

    def __init__(self, progress: Progress, rows: Rows, policy: Policy) -> None:
        self._progress = progress
        self._rows = rows
        self._policy = policy
        self._noted = ""
        rows.on_device_buffer = self._begin

    def _begin(self, pages: DeviceStatsBuffer) -> None:
        pages.near_bits = near_by_encoding(self._progress.settings.near_overflow)
        pages.underflow_share = self._progress.settings.underflow_share

    def look(self) -> bool:
        """Check the pages whose numbers have come back. True when nothing more is on its way. Does not wait."""
        pages = self._rows.device_buffer
        if pages is None:
            return True
        if pages.note != self._noted:
            self._noted = pages.note
            self._progress.recorder.append(Fault(self._progress.where(), "device page", pages.note))
        for number in pages.collect():
            page = self._read(number)
            if page is None:
                continue
            anomaly = anomaly_of_page(page, aborts=self._policy.aborts)
            if anomaly is not None:
                self._policy.record_late(anomaly)
            self._policy.notice_late(page)
        return not pages.pages_pending()

    def _read(self, number: int) -> Page | None:
        reader = RecorderReader(self._progress.recorder.path)
        try:
            names = Names()
            names.add(reader.new_entries()[0])
            message = reader.page(number)
        finally:
            reader.close()
        return decode_page(message, names) if message is not None else None
