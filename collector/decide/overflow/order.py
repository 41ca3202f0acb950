"""Which of two ranks' diagnoses came first. Clocks of hosts are not compared.

Ranks share their collectives. The rank that had issued fewer of them on a common group was earlier: the value cannot
have come to it through a collective that it had not yet issued. Between two matching collectives nothing puts two ranks
in order.
"""

from __future__ import annotations

from ....core.recorder.lone_process import is_rank
from ...diagnose.local_diagnosis import LocalDiagnosis


def before(left: LocalDiagnosis, right: LocalDiagnosis) -> bool:
    """Whether `left` was certainly earlier than `right`."""
    if not is_rank(left.rank) or not is_rank(right.rank):
        return False  # a process that is no rank counts its own steps, and shares no collective
    common = left.clock.keys() & right.clock.keys()
    if common:
        fewer = any(left.clock[group] < right.clock[group] for group in common)
        more = any(left.clock[group] > right.clock[group] for group in common)
        if fewer or more:
            return fewer and not more
        # The value may have been made earlier than it was seen. The count of one group can be compared, a sum cannot.
        return len(left.clock) == len(right.clock) == 1 and 0 <= left.seq < right.seq
    if left.clock and right.clock:
        return False
    if left.seq < 0 and right.seq < 0:  # no process group: only steps and batches put ranks in order
        return (left.step, left.batch) < (right.step, right.batch)
    return left.seq < right.seq


def earliest(diagnoses: list[LocalDiagnosis]) -> list[LocalDiagnosis]:
    """The diagnoses that none came before. If they form a ring, all of them."""
    first = [one for one in diagnoses if not any(before(other, one) for other in diagnoses)]
    return first or diagnoses
