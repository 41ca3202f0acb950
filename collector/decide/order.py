"""Which of two diagnoses of different ranks came first. Clocks of hosts are not compared.

What ranks share is their collectives: a rank that has issued fewer of them on a group that both are in was earlier,
because the value cannot have come to it through one that it had not yet issued. Between two matching collectives
nothing puts two ranks in order.
"""

from __future__ import annotations

from ..diagnose.local_diagnosis import LocalDiagnosis


def before(left: LocalDiagnosis, right: LocalDiagnosis) -> bool:
    """Whether `left` was certainly earlier than `right`."""
    common = left.clock.keys() & right.clock.keys()
    if common:
        fewer = any(left.clock[group] < right.clock[group] for group in common)
        more = any(left.clock[group] > right.clock[group] for group in common)
        if fewer or more:
            return fewer and not more
        # The value may have been made earlier than it was seen. One count is comparable, a sum over groups is not.
        return len(left.clock) == len(right.clock) == 1 and 0 <= left.seq < right.seq
    if left.clock and right.clock:
        return False
    if left.seq < 0 and right.seq < 0:  # no process group: only steps and batches put ranks in order
        return (left.step, left.batch) < (right.step, right.batch)
    return left.seq < right.seq


def earliest(diagnoses: list[LocalDiagnosis]) -> list[LocalDiagnosis]:
    """Those that nothing came before; all of them, should each come before another in a ring."""
    first = [one for one in diagnoses if not any(before(other, one) for other in diagnoses)]
    return first or diagnoses
