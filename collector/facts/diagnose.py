"""One rank's diagnosis: where its first non-finite value came from. Pure; called once per rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...core.events import Anomaly
from ...core.frames import Page
from .diagnosis import LocalDiagnosis, from_event
from .forward_origin import origin_in_page


def diagnose(anomalies: Sequence[Anomaly], pages: Mapping[int, Page]) -> LocalDiagnosis | None:
    """The diagnosis of a rank's first anomaly, from its page if that was received; None if the rank had none.

    `anomalies` are in the order in which they happened; `pages` are the rank's pages by number.
    """
    if not anomalies:
        return None
    page = pages.get(anomalies[0].where.page)
    if page is None:
        return from_event(anomalies[0])
    earlier = [found for found in pages.values() if found.root == page.root and found.number < page.number]
    return origin_in_page(page, anomalies[0], sorted(earlier, key=lambda found: -found.number))
