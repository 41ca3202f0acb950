"""The stacks of all ranks of a running job, for viewers who ask: what the agents are asked, and the text of the answer.

Pure; time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ...core.events import RankLook
from ...core.stalls import ANSWER_S
from ...core.text import ranks_text
from ...core.wire.messages import NodeBeat, unpack_list
from ...core.wire.view import StacksView
from ..assemble.build import look_stack
from ..decide.hang_finding import position_line
from ..decide.hang_model import position_of
from ..facts.fold import shown_body
from ..report.sentence_parts import counted, grouped
from ..report.side_by_side import RankStack, stacks_text


@dataclass
class StacksRound:
    """One round at a time, in which every agent looks at its ranks."""

    _asked_at: float | None = None
    _looks: dict[int, RankLook] = field(default_factory=dict)

    def begins(self, now: float) -> bool:
        """Somebody wants stacks: whether the agents are to be asked now."""
        if self._asked_at is not None:
            return False
        self._asked_at, self._looks = now, {}
        return True

    def hear(self, beat: NodeBeat) -> None:
        """Take the looks of a beat, at the ranks that it speaks of."""
        own = {(state.rank, state.attempt) for state in beat.ranks}
        for look in unpack_list(beat.looks, RankLook):
            if self._asked_at is not None and (look.where.rank, look.where.attempt) in own:
                self._looks[look.where.rank] = shown_body(look)

    def conclude(self, ranks: set[int], now: float) -> list[RankLook] | None:
        """The looks, once all of these ranks were looked at or the time is over; else None."""
        if self._asked_at is None or (ranks - self._looks.keys() and now - self._asked_at < ANSWER_S):
            return None
        self._asked_at = None
        return [look for _, look in sorted(self._looks.items())]


def view_text(view: StacksView) -> Iterator[str]:
    """Lines: what the ranks do, and their stacks, a stack once for all ranks that have the same one."""
    yield f"run {view.run}: {counted(len(view.hosts), 'running rank')} of {view.world_size}"
    positions = [(look.where.rank, position_of(look)) for look in view.looks]
    for alike in grouped(
        positions, lambda pair: (pair[1].kind, pair[1].doing, pair[1].operation, pair[1].line)
    ).values():
        yield f"  - {position_line([rank for rank, _ in alike], alike[0][1])}"
    unseen = sorted(view.hosts.keys() - {look.where.rank for look in view.looks})
    if unseen:
        yield f"  - {ranks_text(unseen)}: no answer from the node within {ANSWER_S:.0f} s"
    stacks = [RankStack(look.where.rank, look_stack(look), []) for look in view.looks]
    yield from ("", *stacks_text(stacks)) if any(each.stack for each in stacks) else ()
