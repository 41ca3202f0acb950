"""Which of the ranks' diagnoses came first, by the collectives that they share and the messages that they send."""

from __future__ import annotations

from functools import partial

import pytest
from gpuwatch.collector.decide.diagnosis_order import DiagnosisOrder, reason
from gpuwatch.collector.facts.diagnosis import LocalDiagnosis, from_event
from gpuwatch.collector.facts.diagnosis_parts import BadRow
from gpuwatch.core.events.alarms import IssuedMoment
from hypothesis import given
from hypothesis import strategies as st

DIAGNOSIS = partial(
    LocalDiagnosis,
    attempt=0,
    step=0,
    root="Net",
    module="fc",
    cls="Linear",
    phase="forward",
    source="made",
    role="output",
    row=BadRow("fc", "Linear", "output", "forward", 0, "nan", "float32", None),
)


def before(left, right):
    return DiagnosisOrder([left, right]).before(left, right)


def at(make, rank=0, **place):
    """A diagnosis at a place."""
    batch = make.Batch(rank, **place)
    batch.call("fc", "Linear", given=[batch.tensor()], returned=[batch.tensor(make.INF)])
    return from_event(batch.anomaly)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ({"0": 4}, {"0": 5}, "before"),
        ({"0": 5}, {"0": 5}, "neither"),
        ({"0": 4, "dp": 9}, {"0": 5, "tp": 1}, "before"),
        ({"0": 4, "dp": 9}, {"0": 4, "dp": 10}, "before"),
        ({"0": 4, "dp": 9}, {"0": 5, "dp": 8}, "neither"),
        ({"dp": 9}, {"tp": 1}, "neither"),
    ],
    ids=str,
)
def test_by_the_groups_that_both_are_in(make, left, right, expected):
    a, b = at(make, 0, clock=left, seq=99), at(make, 1, clock=right, seq=99)
    assert (before(a, b), before(b, a)) == (expected == "before", False)


def test_clocks_are_believed_more_than_the_sum_over_groups(make):
    a, b = at(make, 0, clock={"0": 4, "dp": 90}, seq=94), at(make, 1, clock={"0": 5}, seq=5)
    assert before(a, b)
    assert not before(b, a)


def test_the_frame_breaks_a_tie_where_there_is_one_group(make):
    """The value was made two collectives before it was seen."""
    a, b = at(make, 0, clock={"0": 5}, seq=3), at(make, 1, clock={"0": 5}, seq=5)
    assert before(a, b)
    a, b = at(make, 0, clock={"0": 5, "dp": 1}, seq=3), at(make, 1, clock={"0": 5, "dp": 1}, seq=5)
    assert not before(a, b)


def test_sums_over_groups_that_nobody_shares_say_nothing(make):
    assert not before(at(make, 0, clock={"dp": 1}, seq=1), at(make, 1, clock={"tp": 5}, seq=5))


def test_without_clocks_the_count_and_without_a_group_the_batch(make):
    assert before(at(make, 0, seq=3), at(make, 1, seq=4, clock={"0": 4}))
    assert before(at(make, 0, seq=-1, batch=3), at(make, 1, seq=-1, batch=4))
    assert not before(at(make, 0, seq=3, batch=3), at(make, 1, seq=3, batch=4))


def test_the_earliest_are_those_that_nothing_came_before(make):
    a, b, c = (at(make, rank, clock={"0": clock}) for rank, clock in enumerate((4, 4, 5)))
    assert DiagnosisOrder([c, b, a]).earliest() == [b, a]


def test_a_ring_has_no_first(make):
    clocks = ({"x": 1, "z": 2}, {"x": 2, "y": 1}, {"y": 2, "z": 1})
    ring = [at(make, rank, clock=clock) for rank, clock in enumerate(clocks)]
    assert DiagnosisOrder(ring).earliest() == ring


def test_messages_count_in_no_sum(make):
    """Rank 0 has one neighbour and has issued 51 operations, rank 1 has two and 99. Rank 1 made it and sent it back."""
    first = at(make, 1, clock={"0": 3}, seq=99, sent={"0": {0: 20, 2: 20}}, received={"0": {0: 20, 2: 20}})
    later = at(make, 0, clock={"0": 3}, seq=51, sent={"0": {1: 20}}, received={"0": {1: 21}})
    assert DiagnosisOrder([later, first]).earliest() == [first]
    assert before(first, later)
    assert "message 21 of rank 1" in reason(first, later)


def test_a_message_that_was_received_is_believed_more_than_a_collective_that_is_issued_later(make):
    """Rank 1 does not wait for its all_reduce, and sends. Rank 0 receives, and issues the same one afterwards."""
    sender = at(make, 1, clock={"0": 1}, sent={"0": {0: 4}})
    receiver = at(make, 0, clock={"0": 0}, received={"0": {1: 5}})
    assert before(sender, receiver)


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        ({"clock": {"0": 0}, "sent": {"0": {1: 2}}}, {"clock": {"0": 0}, "received": {"0": {0: 2}}}),
        ({"clock": {"0": 0}, "sent": {"0": {-1: 1}}}, {"clock": {"0": 0}, "received": {"0": {0: 2}}}),
        ({"clock": {"0": -1}, "sent": {}}, {"clock": {"0": 0}, "received": {"0": {0: 2}}}),
        ({"clock": {}, "sent": {}}, {"clock": {"0": 0}, "received": {"0": {0: 2}}}),
    ],
    ids=["all were sent before", "a peer that is not known", "a group that counts nothing", "a group of one only"],
)
def test_without_a_message_that_was_surely_sent_later_there_is_no_edge(make, sender, receiver):
    a, b = at(make, 0, seq=-1, **sender), at(make, 1, seq=-1, **receiver)
    assert not before(a, b)
    assert not before(b, a)


def test_a_third_rank_puts_two_in_order(make):
    last = at(make, 2, clock={"0": 0}, sent={"0": {1: 5}})
    middle = at(make, 1, clock={"0": 0}, sent={"0": {0: 5}}, received={"0": {2: 6}})
    first = at(make, 0, clock={"0": 0}, received={"0": {1: 6}})
    assert not before(last, first), "these two have nothing in common"
    assert DiagnosisOrder([first, middle, last]).before(last, first)
    assert DiagnosisOrder([first, middle, last]).earliest() == [last]


def test_a_group_that_counts_nothing_is_left_out_and_named(make):
    a = at(make, 1, clock={"0": 4, "fake": -1}, seq=4, batch=9)
    b = at(make, 0, clock={"0": 5, "fake": -1}, seq=5, batch=2)
    order = DiagnosisOrder([b, a])
    assert order.earliest() == [a]
    assert order.silent_groups() == ["fake"]


COUNTS = st.dictionaries(st.sampled_from("xyz"), st.integers(-1, 3), max_size=3)
MESSAGES = st.dictionaries(st.sampled_from("xyz"), st.dictionaries(st.integers(-1, 4), st.integers(0, 3)), max_size=2)


@given(st.lists(st.tuples(COUNTS, MESSAGES, MESSAGES, st.integers(-1, 4), st.integers(0, 2)), min_size=1, max_size=5))
def test_whatever_ranks_say_it_is_a_strict_partial_order(given_places):
    ranks = [
        DIAGNOSIS(rank=rank, issued=IssuedMoment(seq, clock, sent, received), batch=batch)
        for rank, (clock, sent, received, seq, batch) in enumerate(given_places)
    ]
    order = DiagnosisOrder(ranks)
    for a in ranks:
        assert not order.before(a, a)
        for b in ranks:
            assert not (order.before(a, b) and order.before(b, a))
            for c in ranks:
                assert order.before(a, c) or not (order.before(a, b) and order.before(b, c))
    assert order.earliest()


@given(st.data())
def test_no_rank_is_put_before_one_that_it_cannot_have_told_anything(data):
    """Random programs of collectives, sends and receives, with messages that overtake each other."""
    size = data.draw(st.integers(2, 4))
    run = Run(size, {"0": list(range(size)), "x": [0, size - 1]})
    for step in data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 9)), max_size=25)):
        run.go(*step)
    ranks = [data.draw(st.sampled_from(points)) for points in run.points]
    order = DiagnosisOrder([diagnosis for diagnosis, _ in ranks])
    for mine, past in ranks:
        for other, _ in ranks:
            if order.before(other, mine):
                assert past[other.rank] >= run.numbers[id(other)]


class Run:
    """Some ranks that communicate, with the vector clock of each."""

    def __init__(self, size, groups):
        self.size, self.groups = size, groups
        self.past = [[0] * size for _ in range(size)]
        self.clock = [{name: 0 for name, members in groups.items() if rank in members} for rank in range(size)]
        self.sent, self.received = ([{"0": {}} for _ in range(size)] for _ in range(2))
        self.on_the_way = []
        self.points, self.numbers = [[] for _ in range(size)], {}
        for rank in range(size):
            self.note(rank)

    def go(self, what, rank, choice):
        rank %= self.size
        if what == 0:
            name = "x" if choice % 2 and "x" in self.clock[rank] else "0"
            members = self.groups[name]
            past = [max(column) for column in zip(*(self.past[member] for member in members), strict=True)]
            for member in members:
                self.clock[member][name] += 1
                self.past[member] = list(past)
        elif what == 1:
            peer = (rank + 1 + choice % (self.size - 1)) % self.size
            counts = self.sent[rank]["0"]
            counts[peer] = counts.get(peer, 0) + 1
            self.on_the_way.append((rank, peer, list(self.past[rank])))
        elif what == 2 and self.on_the_way:
            source, peer, past = self.on_the_way.pop(choice % len(self.on_the_way))
            counts = self.received[peer]["0"]
            counts[source] = counts.get(source, 0) + 1
            self.past[peer] = [max(column) for column in zip(past, self.past[peer], strict=True)]
        for member in range(self.size):
            self.note(member)

    def note(self, rank):
        """A point at which it may see something bad."""
        self.past[rank][rank] += 1
        counts = ({"0": dict(of[rank]["0"])} for of in (self.sent, self.received))
        found = DIAGNOSIS(rank=rank, batch=0, issued=IssuedMoment(0, dict(self.clock[rank]), *counts))
        self.points[rank].append((found, list(self.past[rank])))
        self.numbers[id(found)] = self.past[rank][rank]
