"""The outbox against the collector's own receiving side (RunProtocol), over a link that loses what it likes."""

from __future__ import annotations

from gpuwatch.collector.protocol import RunProtocol
from gpuwatch.collector.run_actions import SendMessage, StoreMessage
from gpuwatch.core.events.definitions import RootDef
from gpuwatch.core.events.node_events import NodeSignal
from gpuwatch.core.wire.messages import (
    AgentHello,
    EventMessage,
    MessageAck,
    NameDefinitions,
    NodeBye,
    PageMessage,
    PageSegment,
    decode_agent,
)
from gpuwatch.launcher.agent.outbox import MessageOutbox
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

HELLO = AgentHello("a", "host", 3, 1, 1, [], {}, "job")


def event(number: int) -> EventMessage:
    return EventMessage(NodeSignal(number))


def page(number: int, rank: int = 0, size: int = 1000) -> PageMessage:
    return PageMessage(rank, 0, number, 0, number, 0, True, [PageSegment(0, 0, 0, b"x" * size, b"", b"")])


class Link:
    """An outbox and a run_protocol; each message may be lost in either direction."""

    def __init__(self, page_bytes: int) -> None:
        self.outbox = MessageOutbox(page_bytes)
        self.run_protocol = RunProtocol("run", "job")
        self.stored: list = []
        self.acks: list[MessageAck] = []
        self.now = 0.0

    def send(self, losses: list[bool]) -> None:
        for position, (number, data) in enumerate(self.outbox.due()):
            self.outbox.sent(number)
            if position < len(losses) and losses[position]:
                continue
            message = decode_agent(data)
            for action in self.run_protocol.on_message("a", message, self.now):
                if isinstance(action, StoreMessage):
                    self.stored.append(message)
                elif isinstance(action, SendMessage) and isinstance(action.message, MessageAck):
                    self.acks.append(action.message)
        self.acks += [
            send.message
            for send in self.run_protocol.committed(self.run_protocol.received)
            if isinstance(send.message, MessageAck)
        ]

    def on_message(self, losses: list[bool]) -> None:
        for position, ack in enumerate(self.acks):
            if position < len(losses) and losses[position]:
                continue
            self.outbox.acknowledged(ack.n, ack.credit)
            if ack.resend:
                self.outbox.send_again()
        self.acks.clear()


LOSSES = st.lists(st.booleans(), max_size=8)
STEP = st.one_of(
    st.tuples(st.just("event")),
    st.tuples(st.just("page"), st.integers(0, 2)),
    st.tuples(st.just("send"), LOSSES),
    st.tuples(st.just("on_message"), LOSSES),
    st.tuples(st.just("resend")),
)


@given(st.lists(STEP, max_size=40), st.sampled_from([500, 3500, 1 << 20]))
def test_whatever_is_lost_every_event_arrives_once_and_in_order(steps, page_bytes):
    link = Link(page_bytes)
    link.outbox.put(HELLO)
    events = pages = 0
    for name, *arguments in steps:
        if name == "event":
            events += 1
            link.outbox.put(event(events))
        elif name == "page":
            pages += 1
            link.outbox.put(page(pages, *arguments))
        elif name == "resend":
            link.outbox.send_again()
        else:
            getattr(link, name)(*arguments)
    for _ in range(3):  # the link works again
        link.outbox.send_again()
        link.send([])
        link.on_message([])
    assert link.outbox.empty
    assert link.outbox.unacknowledged() == []
    bodies = [message.body for message in link.stored]
    assert bodies[0] == HELLO
    assert [body.event.signal for body in bodies[1:] if isinstance(body, EventMessage)] == list(range(1, events + 1))
    got = [body.number for body in bodies if isinstance(body, PageMessage)]
    assert got == sorted(set(got))
    assert pages - len(got) <= sum(link.outbox.pages_dropped.values())
    if page_bytes > 1 << 19:
        assert len(got) == pages


def numbers(outbox: MessageOutbox) -> list[int]:
    return [message.body.number for data in outbox.unacknowledged() if (message := decode_agent(data)).n > 0]


def test_pages_are_dropped_oldest_first_and_counted_by_rank():
    outbox = MessageOutbox(page_bytes=3500)
    for number in range(6):
        outbox.put(page(number, rank=number % 2))
    assert numbers(outbox) == [3, 4, 5]
    assert outbox.pages_dropped == {0: 2, 1: 1}


def test_the_newest_page_is_kept_however_big_it_is():
    outbox = MessageOutbox(page_bytes=10)
    outbox.put(page(0))
    outbox.put(page(1, size=100_000))
    assert numbers(outbox) == [1]


def test_an_acknowledged_page_makes_room():
    outbox = MessageOutbox(page_bytes=2500)
    for number in range(10):
        outbox.put(page(number))
        outbox.due()
        outbox.acknowledged(number + 1)
    assert outbox.pages_dropped == {}


def test_without_any_credit_pages_wait_and_events_go():
    outbox = MessageOutbox()
    outbox.acknowledged(0, credit=0)
    outbox.put(page(0))
    outbox.put(event(1))
    (sent,) = outbox.due()
    assert isinstance(decode_agent(sent[1]).body, EventMessage)
    outbox.sent(sent[0])
    outbox.acknowledged(1, credit=1)
    assert bodies(outbox) == [0]


def test_events_are_never_dropped():
    outbox = MessageOutbox(page_bytes=10)
    for number in range(100):
        outbox.put(event(number))
        outbox.put(page(number))
    kept = [decode_agent(data).body for data in outbox.unacknowledged()]
    assert sum(isinstance(body, EventMessage) for body in kept) == 100


def test_what_was_sent_is_not_due_until_it_is_to_be_sent_again():
    outbox = MessageOutbox()
    for number in range(3):
        outbox.put(event(number))
    assert [number for number, _ in outbox.due()] == [1, 2, 3]
    outbox.sent(2)
    assert [number for number, _ in outbox.due()] == [3]
    outbox.acknowledged(1)
    outbox.send_again()
    assert [number for number, _ in outbox.due()] == [2, 3]


def test_a_hello_that_is_sent_again_says_what_it_has_learnt():
    outbox = MessageOutbox()
    outbox.put(HELLO)
    outbox.put(event(1))
    outbox.sent(2)
    outbox.change_first(replace(HELLO, run="run"))
    outbox.send_again()
    assert [decode_agent(data).body for _, data in outbox.due()] == [replace(HELLO, run="run"), event(1)]


def test_a_hello_that_was_acknowledged_is_never_sent_again():
    outbox = MessageOutbox()
    outbox.put(HELLO)
    outbox.put(event(1))
    outbox.acknowledged(1)
    outbox.change_first(replace(HELLO, run="run"))
    outbox.send_again()
    assert [decode_agent(data).body for _, data in outbox.due()] == [event(1)]


def bodies(outbox: MessageOutbox) -> list[object]:
    return [getattr(decode_agent(data).body, "number", "event") for _, data in outbox.due()]


def test_pages_wait_for_credit_and_events_do_not():
    outbox = MessageOutbox()
    for number in range(4):
        outbox.put(page(number))
    outbox.acknowledged(0, 2500)
    assert bodies(outbox) == [0, 1]
    outbox.sent(2)
    outbox.put(event(0))
    assert bodies(outbox) == ["event"]
    outbox.sent(3)
    outbox.acknowledged(1, 2500)
    assert bodies(outbox) == [2]
    assert outbox.pages_dropped == {}


def test_with_little_credit_one_page_at_a_time_is_sent_however_big_it_is():
    outbox = MessageOutbox()
    outbox.put(page(0, size=100_000))
    outbox.put(page(1))
    outbox.acknowledged(0, 1)
    assert bodies(outbox) == [0]
    outbox.sent(1)
    assert bodies(outbox) == []
    outbox.acknowledged(1, 1)
    assert bodies(outbox) == [1]


def test_what_has_come_and_cannot_be_stored_does_not_hold_up_the_rest():
    """A collector whose disk is full takes what it can into its memory; the goodbye must reach it."""
    outbox = MessageOutbox(page_bytes=2500)
    told: list[object] = []

    def deliver() -> None:
        for number, data in outbox.due():
            told.append(decode_agent(data).body)
            outbox.sent(number)
        outbox.acknowledged(0, 1, outbox.last_sent)

    for number in range(3):
        outbox.put(NameDefinitions(0, 0, [RootDef(number, "Net")]))
    for number in range(8):
        outbox.put(page(number))
        deliver()
    assert sum(outbox.pages_dropped.values()) > 0, "its memory is bounded"
    outbox.put(NodeBye("ok"))
    for _ in range(20):
        deliver()
    assert isinstance(told[-1], NodeBye)
    kept = sum(isinstance(body, PageMessage) for body in told)
    assert kept + sum(outbox.pages_dropped.values()) == 8
    assert not outbox.empty, "nothing of it is stored"


def test_the_goodbye_comes_after_all_pages():
    outbox = MessageOutbox()
    for number in range(3):
        outbox.put(page(number))
    outbox.put(NodeBye("ok"))
    outbox.put(event(0))
    told: list[object] = []
    while not outbox.empty:
        for number, data in outbox.due():
            told.append(decode_agent(data).body)
            outbox.sent(number)
            outbox.acknowledged(number, 0)
    assert isinstance(told[0], EventMessage)
    assert [type(body) for body in told[1:]] == [PageMessage, PageMessage, PageMessage, NodeBye]


def test_what_has_a_number_follows_without_a_gap():
    outbox = MessageOutbox(page_bytes=10)
    outbox.put(event(0))
    outbox.put(page(0))
    outbox.put(event(1))
    outbox.put(page(1))  # the first page is dropped
    assert [(m.n, m.after) for m in map(decode_agent, outbox.unacknowledged())] == [(1, 0), (2, 1), (3, 2)]
    assert outbox.pages_dropped == {0: 1}


def test_an_acknowledgement_of_what_was_never_sent_does_no_harm():
    outbox = MessageOutbox()
    outbox.put(event(0))
    outbox.due()
    outbox.acknowledged(1 << 40)
    outbox.put(event(1))
    assert [number for number, _ in outbox.due()] == [2]


# -- a collector that does not take anything -----------------------------------------------------------------------


def test_what_an_overflow_is_about_goes_before_all_other_pages():
    outbox = MessageOutbox()
    outbox.acknowledged(0, 0)
    for number in range(100):
        outbox.put(page(number))
    outbox.put(event(1))
    outbox.need(0, 57)
    outbox.put(page(57, rank=1))
    outbox.acknowledged(0, 1 << 20)
    assert bodies(outbox) == ["event", 57, 57, *range(57), *range(58, 100)]


def test_names_go_before_the_pages_that_are_about_them():
    outbox = MessageOutbox()
    outbox.acknowledged(0, 0)
    outbox.put(page(0), needed=True)
    outbox.put(NameDefinitions(0, 0, [RootDef(0, "Net")]))
    outbox.acknowledged(0, 1 << 20)
    assert [type(decode_agent(data).body) for _, data in outbox.due()] == [NameDefinitions, PageMessage]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("event")),
            st.tuples(st.just("page"), st.integers(0, 3000), st.booleans()),
            st.tuples(st.just("need"), st.integers(0, 60)),
            st.tuples(st.just("send"), st.integers(0, 4000)),
        ),
        max_size=80,
    )
)
def test_memory_is_bounded_events_are_all_there_and_the_counters_add_up(steps):
    """Whatever is sent, nothing is stored: the collector is stopped, or its disk is full."""
    limit, biggest = 12_000, 3100
    outbox = MessageOutbox(limit, limit // 3)
    events = pages = event_bytes = 0
    for name, *given_ in steps:
        if name == "event":
            events += 1
            event_bytes += len(outbox.put(event(events)))
        elif name == "page":
            outbox.put(page(pages, size=given_[0]), needed=given_[1])
            pages += 1
        elif name == "need":
            outbox.need(0, *given_)
        else:
            outbox.acknowledged(0, *given_)
            for number, _ in outbox.due():
                outbox.sent(number)
        waiting = sum(map(len, outbox._names)) + outbox._page_bytes
        kept = sum(len(data) for data, _ in outbox._kept.values())
        assert waiting + kept <= limit + biggest + event_bytes
    kept = [decode_agent(data).body for data in outbox.unacknowledged()]
    assert sum(isinstance(body, EventMessage) for body in kept) == events
    there = [body.number for body in kept if isinstance(body, PageMessage)]
    assert len(there) == len(set(there))
    assert len(there) + sum(outbox.pages_dropped.values()) == pages, "recorded = kept + dropped"


def test_what_nothing_needs_is_dropped_first():
    outbox = MessageOutbox(page_bytes=6500)
    for number in range(3):
        outbox.put(page(number), needed=True)
    for number in range(3, 10):
        outbox.put(page(number, rank=1))
    assert outbox.pages_dropped == {1: 5}
    assert numbers(outbox) == [0, 1, 2, 8, 9]


def test_the_pages_of_the_first_overflow_outlive_those_of_later_ones():
    """With `--on-overflow continue` each batch has one, and the verdict is about the first."""
    outbox = MessageOutbox(page_bytes=11_500)
    outbox.acknowledged(0, 0)
    for number in range(20):
        outbox.need(0, number // 2)
        outbox.put(page(number // 2, rank=number % 2))
    assert numbers(outbox) == [0, 0, 1, 1, 2, 2, 3, 3, 9, 9]
    outbox.put(page(10), needed=True)
    assert numbers(outbox) == [0, 0, 1, 1, 2, 2, 3, 3, 9, 10]
    assert outbox.pages_dropped == {0: 6, 1: 5}


def test_an_event_of_the_last_rank_goes_before_the_pages_that_the_same_turn_has_read_of_the_others():
    outbox = MessageOutbox()
    outbox.acknowledged(0, 1 << 20)
    for rank in range(7):
        outbox.put(page(rank, rank=rank), needed=True)
    outbox.put(event(1))
    assert bodies(outbox) == ["event", *range(7)]
