"""The pages of one rank, found by their number, their optimizer step or their batch, however many there are."""

from __future__ import annotations

from collections.abc import Sequence

from .kept_pages import KeptPage


class RankPages(dict[int, KeptPage]):
    """Number -> page. `of_step` and `of_batch` give the pages in the order in which they came."""

    def __init__(self) -> None:
        super().__init__()
        self.suspicious: dict[int, KeptPage] = {}
        """Those that may hold an alarm, by number: few, if any."""
        self.any_backward = False
        """A backward of the rank was seen."""
        self._of_step: dict[int, list[KeptPage]] = {}
        self._of_batch: dict[int, list[KeptPage]] = {}

    def __setitem__(self, number: int, page: KeptPage) -> None:
        """Keep a page in place of the copy that is there."""
        known = self.pop(number, None)
        if known is not None:
            for pages in (self._of_step[known.step], self._of_batch[known.batch]):
                pages[:] = [found for found in pages if found is not known]
            self.suspicious.pop(number, None)
        super().__setitem__(number, page)
        self._of_step.setdefault(page.step, []).append(page)
        self._of_batch.setdefault(page.batch, []).append(page)
        self.any_backward |= page.has_backward
        if page.may_hold_alarm:
            self.suspicious[number] = page

    def of_step(self, step: int) -> Sequence[KeptPage]:
        """The pages of this optimizer step."""
        return self._of_step.get(step, ())

    def of_batch(self, batch: int) -> Sequence[KeptPage]:
        """The pages of this batch."""
        return self._of_batch.get(batch, ())
