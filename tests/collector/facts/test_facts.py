from __future__ import annotations

import pytest
from gpuwatch.collector.facts.fold import FactFold, fold
from gpuwatch.collector.facts.kept_pages import KeptPage
from gpuwatch.collector.facts.rank_origin import diagnose
from gpuwatch.core.events.node_events import NodeSignal
from gpuwatch.core.events.own_limits import OwnFault
from gpuwatch.core.events.preflight_events import PreflightResult, PreflightStage, RankOutcome
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.wire.messages import EventMessage, NameDefinitions, PageMessage, PageSegment


def facts_of(*bodies, agent="a0", lost=()):
    return fold(((agent, n, body) for n, body in enumerate(bodies, 1)), lost)


@pytest.fixture
def batch(make):
    batch = make.Batch(rank=1)
    batch.call("fc", "Linear", given=[batch.tensor()], returned=[batch.tensor(make.INF)])
    batch.call("", "Net", returned=[batch.tensor()])
    return batch


def test_nothing_is_known_of_no_messages():
    facts = facts_of()
    assert (facts.nodes, facts.ranks, facts.last_attempt) == ({}, {}, 0)


def test_everything_finds_its_place(make, batch):
    facts = facts_of(
        make.hello(host="alpha"),
        *batch.messages(),
        EventMessage(PreflightStage(make.where(1), "store", 0.5)),
        make.preflight(1, "ok", stops=False),
        EventMessage(make.RankInventoryEvent(make.where(1), "cpu", {"torch": "2"})),
        make.raised(1),
        EventMessage(OwnFault(make.where(1), "hook", "x")),
        *make.finished(1, batch=4),
        make.NodeBeat([make.state(1, batch=2)], {1: 3}),
        EventMessage(NodeSignal(15)),
        make.NodeBye("ok"),
    )
    (rank,) = facts.of_attempt(0)
    assert (rank.rank, rank.pages_dropped, rank.state.batch, rank.preflight.outcome) == (1, 3, 4, "ok")
    assert (len(rank.anomalies), len(rank.errors), len(rank.faults), len(rank.stages)) == (1, 1, 1, 1)
    assert (rank.inventory.device, rank.script_exit.code, rank.exit.code) == ("cpu", 0, 0)
    assert [frame.module for frame in rank.pages[0].frames] == ["fc", ""]
    assert facts.host(rank) == "alpha"
    node = facts.nodes["a0"]
    assert (node.bye.outcome, node.signal.signal, node.lost) == ("ok", 15, False)


def test_names_that_come_after_their_page_are_used_all_the_same(batch):
    definitions, anomaly, page = batch.messages()
    (rank,) = facts_of(page, anomaly, definitions).of_attempt(0)
    assert [frame.module for frame in rank.pages[0].frames] == ["fc", ""]


def test_the_same_event_twice_counts_once(batch, make):
    messages = [*batch.messages(), make.raised(1)]
    assert facts_of(*messages, *messages).ranks == facts_of(*messages).ranks


def test_no_page_is_read_whole_to_see_whether_a_rank_must_be_diagnosed_again(make, monkeypatch):
    """With 50 ranks that had met something, that kept a verdict waiting for 16 s."""
    numbers = [make.Batch(rank=1, batch=number, page=number) for number in range(3)]
    for each in numbers:
        each.call("fc", "Linear", given=[each.tensor()], returned=[each.tensor(make.INF if each.batch == 2 else 1.0)])
    first, second, last = numbers
    monkeypatch.setattr(KeptPage, "whole", lambda page: pytest.fail("a page was read whole"))
    diagnosed = []
    monkeypatch.setattr("gpuwatch.collector.facts.fold.diagnose", lambda anomalies, pages: diagnosed.append(set(pages)))
    folded = FactFold()
    for n, body in enumerate([*last.messages(), first.page_message()], 1):
        folded.add("a0", n, body)
    for _ in range(2):
        folded.facts()
    folded.add("a0", 9, second.page_message())
    for _ in range(2):
        folded.facts()
    assert diagnosed == [{0, 2}, {0, 1, 2}]


def test_some_ranks_at_a_time_are_diagnosed_from_their_pages_the_first_of_them_first(make, monkeypatch):
    """A verdict over the next anomaly does not wait until a thousand ranks are diagnosed."""
    made_of = []

    def noted(anomalies, pages):
        made_of.append((anomalies[0].where.rank, len(pages)))
        return diagnose(anomalies, pages)

    monkeypatch.setattr("gpuwatch.collector.facts.fold.diagnose", noted)
    folded, whole, n = FactFold(), FactFold(), 0
    for rank in range(5):
        batch = make.Batch(rank, seq=100 - rank)
        batch.call("fc", "Linear", given=[batch.tensor()], returned=[batch.tensor(make.INF)])
        for body in batch.messages():
            n += 1
            folded.add("a0", n, body)
            whole.add("a0", n, body)
    rounds = []
    for _ in range(4):
        folded.facts(most_diagnosed=2)
        rounds.append((made_of.copy(), folded.is_behind))
        made_of.clear()
    assert rounds == [
        ([(4, 1), (3, 1), (2, 0), (1, 0), (0, 0)], True),
        ([(2, 1), (1, 1)], True),
        ([(0, 1)], False),
        ([], False),
    ]
    assert folded.facts() == whole.facts()


def test_attempts_are_kept_apart(make):
    facts = facts_of(*make.finished(0), *make.finished(0, attempt=1))
    assert facts.last_attempt == 1
    assert [rank.attempt for rank in facts.of_attempt(1)] == [1]


def test_of_two_copies_of_a_page_the_fuller_one_stays(batch):
    partial, whole = batch.page_message(complete=False), batch.page_message()
    short = PageMessage(1, 0, 0, 0, 0, 0, False, [PageSegment(0, 0, 0, b"", b"", b"")])
    for order in ([partial, whole], [whole, partial], [short, partial, whole], [whole, short]):
        (rank,) = facts_of(batch.definitions(), *order).of_attempt(0)
        assert rank.pages[0].complete
        assert len(rank.pages[0].frames) == 2


def test_which_copy_of_a_page_stays_does_not_depend_on_the_order(batch):
    """One is complete but has lost its start, one is whole but was still open."""
    cut, still_open = batch.page_message(first_frame=1), batch.page_message(complete=False)
    left, right = (facts_of(batch.definitions(), *order) for order in ([cut, still_open], [still_open, cut]))
    assert left.ranks == right.ranks


def test_an_older_beat_does_not_take_a_rank_back(make):
    facts = facts_of(
        make.NodeBeat([make.state(0, step=5, batch=9)], {}), make.NodeBeat([make.state(0, step=4, batch=8)], {})
    )
    assert facts.ranks[0, 0].state.batch == 9


def test_a_page_of_hostile_bytes_is_counted_and_the_rest_stays(batch):
    bad = [
        [PageSegment(0, 0, 0, b"odd", b"", b"")],
        [PageSegment(0, 0, 0, b"\xff" * 32, b"", b"")],
        [PageSegment(0, 0, 0, b"", b"\xff" * 15, b"")],
        [PageSegment(0, 0, 0, b"", b"", b"x")],
    ]
    pages = [PageMessage(1, 0, 50 + n, 0, 0, 0, True, segments) for n, segments in enumerate(bad)]
    facts = facts_of(*batch.messages(), *pages)
    assert facts.undecodable_pages >= 3
    assert 0 in facts.ranks[0, 1].pages


def test_pages_that_were_dropped_are_counted_whichever_beat_comes_first(make):
    beats = [make.NodeBeat([make.state(0)], {}), make.NodeBeat([], {0: 2, 1: 1}), make.NodeBeat([], {0: 5})]
    for order in (beats, beats[::-1]):
        assert facts_of(*order).ranks[0, 0].pages_dropped == 5


def test_facts_that_were_asked_for_on_the_way_are_the_same_in_the_end(batch, make):
    """What is told by peers, and what is seen in pages alone, gives way to what comes later."""
    other = make.Batch(rank=0)
    other.call("fc", "Linear", given=[other.tensor()], returned=[other.tensor(make.INF)])
    peer = RankOutcome(1, "failed", "store", "told by rank 0")
    bodies = [
        make.hello(),
        other.page_message(),
        EventMessage(PreflightResult(make.where(0), "victim", peers=[peer])),
        other.definitions(),
        *batch.messages(),
        EventMessage(other.anomaly),
        EventMessage(PreflightResult(make.where(1), "failed", "bandwidth", "its own words")),
        *make.finished(0),
    ]
    live = FactFold()
    for n, body in enumerate(bodies, 1):
        live.add("a0", n, body)
        live.facts()
    live.facts(["a0"])
    wanted = facts_of(*bodies)
    for key, rank in wanted.ranks.items():
        assert vars(live.facts().ranks[key]) == vars(rank)
    assert vars(live.facts().nodes["a0"]) == vars(wanted.nodes["a0"])
    assert facts_of(*bodies).ranks[0, 1].preflight.detail == "its own words"


def test_an_agent_that_went_silent_is_lost(make):
    facts = facts_of(make.hello(), lost=["a0", "never heard of"])
    assert facts.nodes["a0"].lost
    assert set(facts.nodes) == {"a0"}


def test_definitions_of_another_rank_are_not_mixed_in(batch, make):
    other = make.Batch(rank=0)
    other.call("other", "Other", returned=[other.tensor()])
    definitions = NameDefinitions(0, 0, other.definitions().entries)
    (_, rank) = facts_of(*batch.messages(), definitions, other.page_message()).of_attempt(0)
    assert [frame.module for frame in rank.pages[0].frames] == ["fc", ""]


def test_the_first_alarm_is_the_one_that_the_rank_met_first_and_not_the_one_that_was_told_first(make):
    """A device's numbers come late, and those of two pages in any order."""
    told_first, met_first = (make.Batch(page=page, seq=seq, time_ns=ns) for page, seq, ns in ((6, 8, 1), (8, 7, 2)))
    for each in (told_first, met_first):
        each.call("", "Net", given=[each.tensor()], returned=[each.tensor(make.NAN)])
    (rank,) = facts_of(*told_first.messages(), *met_first.messages()).of_attempt(0)
    assert [anomaly.where.page for anomaly in rank.anomalies] == [8, 6]


def test_a_command_that_an_earlier_release_has_stored_is_masked(make):
    facts = fold([("a0", 1, make.hello(command=["gpuwatch", "launch", "train.py", "--token", "hunter2"]))])

    assert facts.hellos[0].command == ["gpuwatch", "launch", "train.py", "--token", "***"]


def test_events_without_an_order_of_their_own_are_in_that_of_the_run(make):
    told = [OwnFault(RunPosition(1, batch=n, page=n, time_ns=9 - n), "hook", f"{n}") for n in range(4)]
    (rank,) = facts_of(make.hello(), *map(EventMessage, [told[2], told[0], told[3], told[1]])).of_attempt(0)
    assert rank.faults == told
