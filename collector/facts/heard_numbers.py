"""Which messages of an agent are missing."""

from __future__ import annotations

from ...core.wire.messages import node_of


class HeardNumbers:
    """Which of the numbered messages were never heard. An agent counts them from 1, without a gap.

    They come in any order, with duplicates.
    """

    def __init__(self) -> None:
        self._whole: dict[str, int] = {}
        """By agent: everything up to this number was heard."""
        self._beyond: dict[str, set[int]] = {}
        """Numbers behind a gap."""

    def add(self, agent: str, n: int) -> None:
        """A message of an agent was heard; 0 is not numbered."""
        whole = self._whole.get(agent, 0)
        if n != whole + 1:
            if n > whole:
                self._beyond.setdefault(agent, set()).add(n)
            return
        beyond = self._beyond.get(agent)
        whole = n
        while beyond and whole + 1 in beyond:
            whole += 1
            beyond.discard(whole)
        self._whole[agent] = whole

    def lost(self) -> dict[str, int]:
        """node -> messages that were sent before others that were heard, and are not there."""
        found: dict[str, int] = {}
        for agent, beyond in self._beyond.items():
            if beyond:
                gap = max(beyond) - self._whole.get(agent, 0) - len(beyond)
                found[node_of(agent)] = found.get(node_of(agent), 0) + gap
        return found
