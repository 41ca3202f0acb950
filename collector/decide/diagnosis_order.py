"""Which of the ranks' diagnoses came first. Clocks of hosts are not compared. Pure.

A value crosses from one rank to another in a collective or in a message only. Collectives order the members of a
group: the rank that had issued fewer of them was earlier, because a collective that it had not yet issued cannot have
brought it the value. A message is an edge between two ranks: if one had received more than the other had sent by its
own diagnosis, one of the messages was sent after it. Messages are counted for each pair of ranks and never summed.

Without a process group, steps and batches put ranks in order; where the groups of one of two are not known, the sum of
what they have issued. What none of these puts in order is concurrent.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy

from ...core.identity import is_rank
from ..facts.diagnosis import LocalDiagnosis
from ..report.sentence_parts import ranks_text

_UNKNOWN_PEER = -1


class DiagnosisOrder:
    """The strict partial order of some diagnoses, one of each rank. It is transitive: over a third rank as well."""

    def __init__(self, diagnoses: list[LocalDiagnosis]) -> None:
        self.diagnoses = diagnoses
        self._place = {_key(one): place for place, one in enumerate(diagnoses)}
        leads = _message_edges(diagnoses, self._place)
        cuts = _cuts(diagnoses)
        leads |= cuts & ~cuts.T & ~leads.T  # a message that came is more than a collective that others issue later
        self._reached = _closure(leads)

    def before(self, left: LocalDiagnosis, right: LocalDiagnosis) -> bool:
        """Whether `left` was certainly earlier than `right`. Both are of a rank with a diagnosis in this order."""
        return self._is_before(self._place[_key(left)], self._place[_key(right)])

    def earliest(self) -> list[LocalDiagnosis]:
        """The diagnoses that none came before. If they form a ring, all of them."""
        places = range(len(self.diagnoses))
        return [self.diagnoses[n] for n in places if not any(self._is_before(other, n) for other in places)]

    def silent_groups(self) -> list[str]:
        """Names of the process groups that count nothing, and so put no ranks in order. Several ranks are in each."""
        ranks = Counter(group for one in self.diagnoses for group, count in one.issued.clock.items() if count < 0)
        return sorted(group for group, number in ranks.items() if number > 1)

    def _is_before(self, mine: int, theirs: int) -> bool:
        return bool(self._reached[mine] >> theirs & 1) and not self._reached[theirs] >> mine & 1


def reason(first: LocalDiagnosis, later: LocalDiagnosis) -> str:
    """What shows that `later` came after `first`, with a comma before it; "" if a third rank puts them in order."""
    mine, theirs = _clock(first), _clock(later)
    for group in sorted(mine.keys() & theirs.keys()):
        if 0 <= mine[group] < theirs[group]:
            return f", after {theirs[group]} collectives against {mine[group]}"
    for group, received, sent in _messages(first, later):
        if received > sent:
            return f", after it had received message {sent + 1} of {ranks_text([first.rank])} (process group {group})"
    if not mine and not theirs and first.issued.seq >= 0:
        return f", after {later.issued.seq} collectives against {first.issued.seq}"
    return ""


def _key(one: LocalDiagnosis) -> tuple[int, int]:
    return one.attempt, one.rank


def _clock(one: LocalDiagnosis) -> dict[str, int]:
    return {group: count for group, count in one.issued.clock.items() if count >= 0}


def _messages(sender: LocalDiagnosis, receiver: LocalDiagnosis) -> Iterator[tuple[str, int, int]]:
    """(group, how many messages of `sender` had been received, how many `sender` had sent) where both are known."""
    for group, peers in receiver.issued.received.items():
        sent = sender.issued.sent.get(group, {})
        if sender.issued.clock.get(group, -1) >= 0 and _UNKNOWN_PEER not in sent:
            yield group, peers.get(sender.rank, 0), sent.get(receiver.rank, 0)


def _message_edges(diagnoses: list[LocalDiagnosis], place: dict[tuple[int, int], int]) -> numpy.ndarray:
    found = numpy.zeros((len(diagnoses), len(diagnoses)), bool)
    for mine, receiver in enumerate(diagnoses):
        for peer in {peer for peers in receiver.issued.received.values() for peer in peers}:
            theirs = place.get((receiver.attempt, peer))
            if theirs is not None and theirs != mine:
                messages = _messages(diagnoses[theirs], receiver)
                found[theirs, mine] = any(received > sent for _, received, sent in messages)
    return found


def _cuts(diagnoses: list[LocalDiagnosis]) -> numpy.ndarray:
    found = numpy.zeros((len(diagnoses), len(diagnoses)), bool)
    members: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for place, one in enumerate(diagnoses):
        # the value may have been made earlier than it was seen: the count of one group can be compared, a sum cannot
        alone = len(one.issued.clock) == 1 and not one.issued.sent and not one.issued.received
        for group, count in _clock(one).items():
            members[group].append((place, count, one.issued.seq if alone else -1))
        if not one.issued.clock:
            for other_place, other in enumerate(diagnoses):
                found[place, other_place] = _is_earlier_by_sum(one, other)
                found[other_place, place] = _is_earlier_by_sum(other, one)
    for entries in members.values():
        places, counts, ties = (column[:, None] for column in numpy.array(entries).T)
        fewer = (ties >= 0) & (ties < ties.T) & (counts == counts.T) | (counts < counts.T)
        found[places, places.T] |= fewer
    return found


def _is_earlier_by_sum(left: LocalDiagnosis, right: LocalDiagnosis) -> bool:
    """Where the groups of one of them are not known. A process that is no rank shares none with anybody."""
    if not is_rank(left.rank) or not is_rank(right.rank):
        return False
    if left.issued.seq < 0 and right.issued.seq < 0:  # no process group: only steps and batches put ranks in order
        return (left.step, left.batch) < (right.step, right.batch)
    known = left if left.issued.clock else right
    if len(known.issued.clock) > 1 or known.issued.sent or known.issued.received:
        return False
    return left.issued.seq < right.issued.seq


def _closure(leads: numpy.ndarray) -> list[int]:
    """For each row the columns that it reaches, as bits."""
    reached = [int.from_bytes(row.tobytes(), "little") for row in numpy.packbits(leads, axis=1, bitorder="little")]
    for via, further in enumerate(reached):
        if further:
            for row, bits in enumerate(reached):
                if bits >> via & 1:
                    reached[row] = bits | reached[via]
    return reached
