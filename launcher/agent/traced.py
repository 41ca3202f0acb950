"""Which of the batches of `--trace-batches` are sent: all, while the job's store has room for so many bytes of them.

Beyond half of its share a node sends one batch of 2, beyond three quarters one of 4, and so on, until all is used:
whole batches, by their numbers, so that all ranks send the same ones. What is not sent stays in the recorder for a
while. A page that is asked for then, or is the last of its rank, is sent all the same. No file, no clock.
"""

from __future__ import annotations

from ...core.wire.messages import PageMessage

STORE_BYTES = 1 << 30
"""Of traced batches, of all nodes together."""
_MOST_BATCHES = 4096
"""Batches of which is remembered whether they are sent; the oldest are forgotten."""
_MOST_APART = 1 << 20


class TracedBatches:
    """Of one of `nodes` nodes.

    >>> traced = TracedBatches(nodes=1, store_bytes=1000)
    >>> traced.spent(600)
    >>> [batch for batch in range(6) if traced.takes(batch)]
    [0, 2, 4]
    """

    def __init__(self, nodes: int = 1, store_bytes: int = STORE_BYTES) -> None:
        self._share = self._left = store_bytes / max(1, nodes)
        self._decided: dict[int, bool] = {}

    def takes(self, batch: int) -> bool:
        """Whether this batch is sent: the same answer for all ranks of the node."""
        decided = self._decided.get(batch)
        if decided is None:
            decided = self._decided[batch] = self._left > 0 and batch % self._every == 0
            if len(self._decided) > _MOST_BATCHES:
                del self._decided[next(iter(self._decided))]
        return decided

    def sent(self, page: PageMessage) -> None:
        """A page of a traced batch is sent."""
        self.spent(sum(len(part.frames) + len(part.rows) + len(part.values) for part in page.segments))

    def spent(self, num_bytes: int) -> None:
        """So much of the share is used."""
        self._left -= num_bytes

    @property
    def _every(self) -> int:
        every = 1
        while every < _MOST_APART and self._left * 2 * every <= self._share:
            every *= 2
        return every
