"""What the collector does about what it hears. Time is a number that the test sets."""

from __future__ import annotations

import msgspec
import pytest
from gpuwatch.collector.decide.overflow_at_rest import RestingOverflow
from gpuwatch.collector.ends.silent_nodes import WAS_KILLED
from gpuwatch.collector.node_state import GONE_S, KILLED_S, SILENT_S
from gpuwatch.collector.protocol import (
    ABANDONED_S,
    LINGER_S,
    MOST_CREDIT,
    NOBODY_S,
    ON_THE_WAY_BYTES,
    STOP_AFTER_S,
    RunProtocol,
)
from gpuwatch.collector.run_actions import FinishRun, LookAhead, NotifyUser, SendMessage, StoreMessage
from gpuwatch.core.codes import Code
from gpuwatch.core.events.agent_events import RankLook, RankStall
from gpuwatch.core.events.alarm_evidence import SECOND_RUN_S, CaptureFile, ForwardCaptured, SecondRun
from gpuwatch.core.events.alarms import Anomaly
from gpuwatch.core.events.definitions import RootDef
from gpuwatch.core.events.node_events import NodeSignal
from gpuwatch.core.events.rank_standing import GroupState, IssuedOperation, StackLine
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.recorder.stalls import ANSWER_S
from gpuwatch.core.wire.beat import NodeBeat
from gpuwatch.core.wire.messages import (
    AgentMessage,
    AgentRefused,
    EventMessage,
    LookAtRanks,
    MessageAck,
    NameDefinitions,
    NodeBye,
    RunWelcome,
    StopRanks,
    WantedBatch,
)
from msgspec.structs import replace


class Cluster:
    """A run_protocol and the agents that talk to it."""

    def __init__(self, make, nodes=2, nproc=1, max_nodes=None):
        self.run_protocol = RunProtocol("run", "job")
        self._sent = {}
        for number in range(nodes):
            agent = f"a{number}"
            greeting = make.hello(agent, f"h{number}", nproc, nodes)
            if max_nodes:
                greeting = type(greeting)(
                    **{f: getattr(greeting, f) for f in greeting.__struct_fields__} | {"max_nodes": max_nodes}
                )
            self.say(agent, greeting)

    def say(self, agent, body, now=0.0):
        n = 0 if isinstance(body, NodeBeat) else self._sent.get(agent, 0) + 1
        if n:
            self._sent[agent] = n
        return self.run_protocol.on_message(agent, AgentMessage(n, body, max(0, n - 1)), now)

    def beat(self, now, *agents, launch_holds=False):
        for agent in agents:
            self.say(agent, NodeBeat([], {}, launch_holds=launch_holds), now)

    def tick(self, now):
        return self.run_protocol.tick(now)


@pytest.fixture
def two(make) -> Cluster:
    return Cluster(make)


def sent(actions, kind):
    return [
        (action.agent, action.message)
        for action in actions
        if isinstance(action, SendMessage) and isinstance(action.message, kind)
    ]


def event(number=1) -> EventMessage:
    return EventMessage(NodeSignal(number))


def anomaly(rank=0, batch=3, root="Net", aborts=False, looks=False) -> EventMessage:
    return EventMessage(
        Anomaly(
            RunPosition(rank, 0, batch, batch, root),
            0,
            "fc",
            "Linear",
            "forward",
            "output",
            "nan",
            "float32",
            aborts=aborts,
            looks=looks,
        )
    )


# -- greeting, numbering ------------------------------------------------------------------------------------------


def test_a_hello_is_kept_welcomed_and_acknowledged(make):
    run_protocol = RunProtocol("run", "job")
    message = AgentMessage(1, make.hello())
    assert run_protocol.on_message("a0", message, 0) == [
        StoreMessage(),
        SendMessage("a0", RunWelcome("run")),
    ]
    assert run_protocol.committed(run_protocol.received) == [SendMessage("a0", MessageAck(1))]


def test_an_agent_of_another_job_is_refused_and_counted(make):
    run_protocol = RunProtocol("run", "job")
    actions = run_protocol.on_message("x", AgentMessage(1, make.hello(rdzv_id="other job")), 0)
    assert [type(action.message) for action in actions] == [AgentRefused]
    assert "'other job'" in actions[0].message.reason
    assert run_protocol.strangers == 1
    assert run_protocol.nodes == {}


@pytest.mark.parametrize(
    ("agent", "hello", "reason"),
    [
        ("a9", {"schema": 99}, "version 99; install the same gpuwatch on every node"),
        ("a9", {"agent": "a1"}, "another agent's"),
        ("a9", {}, "all 2 nodes of this job have already joined"),
        ("a9", {"run": "yesterday's"}, "this is run run, but the node joined run yesterday's before"),
    ],
)
def test_a_hello_that_is_not_of_this_job_is_refused_and_ends_nothing(two, make, agent, hello, reason):
    greeting = make.hello(**{"agent": agent, "nproc": 1, "nodes": 2, **hello})
    ((_, refused),) = sent(two.run_protocol.on_message(agent, AgentMessage(1, greeting), 0), AgentRefused)
    assert reason in refused.reason
    two.run_protocol.on_message(agent, AgentMessage(2, NodeBye("failed"), 1), 0)
    two.beat(100, "a0", "a1")
    assert two.tick(100) == []
    assert two.run_protocol.strangers == 1
    assert set(two.run_protocol.nodes) == {"a0", "a1"}


def test_a_node_that_has_failed_or_is_silent_makes_room_for_another(two, make):
    two.say("a1", NodeBye("failed"))
    two.run_protocol.on_message("a9", AgentMessage(1, make.hello("a9", "h9", 1, 2)), 0)
    assert "a9" in two.run_protocol.nodes


def test_what_a_node_says_of_another_nodes_rank_is_not_believed(two, make):
    two.say("a0", make.NodeBeat([make.state(0)], {}))
    two.say("a1", make.NodeBeat([make.state(1)], {}))
    assert two.say("a1", anomaly(rank=0, aborts=True)) == []
    beat = AgentMessage(0, make.NodeBeat([make.state(1), make.state(0)], {}))
    assert not any(isinstance(action, StoreMessage) for action in two.run_protocol.on_message("a1", beat, 0))
    assert two.run_protocol.disbelieved == 2
    two.beat(STOP_AFTER_S + 1, "a0", "a1")
    assert two.tick(STOP_AFTER_S + 1) == []
    assert sent(two.say("a1", anomaly(rank=1)), WantedBatch) != [], "it goes on being heard"
    assert two.run_protocol.committed(two.run_protocol.received)[-1] == SendMessage("a1", MessageAck(3))


def test_a_node_speaks_of_no_more_ranks_than_it_said_hello_with(two, make):
    assert two.say("a0", anomaly(rank=5)) != []
    assert two.say("a0", anomaly(rank=6)) == []
    later = anomaly(rank=6).event
    again = EventMessage(msgspec.structs.replace(later, where=msgspec.structs.replace(later.where, attempt=1)))
    assert two.say("a0", again) != [], "in another attempt its ranks are others"


def test_a_second_hello_of_an_agent_changes_nothing_and_is_counted(two, make):
    assert two.say("a0", make.hello("a0", "another host", 100, 1)) == []
    assert two.run_protocol.nodes["a0"].hello.host == "h0"
    assert two.run_protocol.replays == 1


def test_a_hello_that_is_sent_again_as_nobody_has_answered_is_no_replay(two):
    first = AgentMessage(1, two.run_protocol.nodes["a0"].hello)
    assert sent(two.run_protocol.on_message("a0", first, 0), RunWelcome) != []
    assert two.run_protocol.replays == 0


def test_a_replayed_hello_of_an_earlier_agent_does_not_take_the_place_of_a_later_one(make):
    run_protocol = RunProtocol("run", "job")
    run_protocol.on_message("a.1", AgentMessage(1, make.hello("a.1")), 0)
    ((_, refused),) = sent(run_protocol.on_message("a.0", AgentMessage(1, make.hello("a.0")), 0), AgentRefused)
    assert "a later agent of its launch" in refused.reason
    assert set(run_protocol.nodes) == {"a.1"}
    assert not run_protocol.nodes["a.1"].replaced
    assert run_protocol.replays == 1


def test_a_message_is_acknowledged_once_it_is_durable_and_not_before(two):
    two.run_protocol.committed(two.run_protocol.received)
    assert [type(action) for action in two.say("a0", event())] == [StoreMessage]
    beat = AgentMessage(0, NodeBeat([], {}))
    assert two.run_protocol.on_message("a0", beat, 0)[1] == SendMessage("a0", MessageAck(1))
    again = AgentMessage(2, event(), after=1)
    assert two.run_protocol.on_message("a0", again, 0) == [SendMessage("a0", MessageAck(1))]
    assert two.run_protocol.committed(two.run_protocol.received) == [SendMessage("a0", MessageAck(2))]
    assert two.run_protocol.committed(two.run_protocol.received) == []


def test_a_gap_is_not_kept_and_asked_for_again(two):
    two.run_protocol.committed(two.run_protocol.received)
    lost = AgentMessage(4, event(), after=3)
    assert two.run_protocol.on_message("a0", lost, 0) == [SendMessage("a0", MessageAck(1, resend=True))]


def test_an_anomaly_behind_a_gap_is_looked_at_and_not_kept_before_it_comes_in_its_order(two):
    """Once in its order it is kept, and no batch is asked for twice."""
    ahead = AgentMessage(4, anomaly(), 3)
    actions = two.run_protocol.on_message("a0", ahead, 0)
    assert actions[0] == LookAhead()
    assert actions[-1] == SendMessage("a0", MessageAck(0, resend=True))
    assert len(sent(actions, WantedBatch)) == 4, "two batches of two nodes"
    for number in (2, 3):
        two.run_protocol.on_message("a0", AgentMessage(number, event(number), number - 1), 0)
    assert two.run_protocol.on_message("a0", ahead, 0) == [StoreMessage()]


def test_a_page_that_the_agent_dropped_is_no_gap(two):
    dropped = AgentMessage(9, event(), after=1)
    assert two.run_protocol.on_message("a0", dropped, 0) == [StoreMessage()]
    assert two.run_protocol.committed(two.run_protocol.received)[0] == SendMessage("a0", MessageAck(9))


def test_a_duplicate_is_acknowledged_and_not_kept_again(two):
    two.say("a0", event())
    two.run_protocol.committed(two.run_protocol.received)
    again = AgentMessage(2, event(), after=1)
    assert two.run_protocol.on_message("a0", again, 0) == [SendMessage("a0", MessageAck(2))]


def test_an_agent_whose_hello_was_lost_is_asked_for_everything(make):
    run_protocol = RunProtocol("run", "job")
    assert run_protocol.on_message("a9", AgentMessage(2, event(), 1), 0) == [
        SendMessage("a9", MessageAck(0, resend=True))
    ]
    # nor does one say more that has told everything, to a collector whose store was lost
    assert run_protocol.on_message("a9", AgentMessage(0, NodeBeat([], {})), 0) == [
        SendMessage("a9", MessageAck(0, resend=True))
    ]


def test_an_agent_whose_welcome_was_lost_is_welcomed_again(make):
    run_protocol = RunProtocol("run", "job")
    message = AgentMessage(1, make.hello())
    run_protocol.on_message("a0", message, 0)
    run_protocol.committed(run_protocol.received)
    again = run_protocol.on_message("a0", message, 1)
    assert sent(again, RunWelcome) == [("a0", RunWelcome("run"))]
    assert not any(isinstance(action, StoreMessage) for action in again)


def test_a_hello_that_comes_again_with_the_run_that_has_welcomed_it_is_no_replay(make):
    run_protocol = RunProtocol("run", "job")
    run_protocol.on_message("a0", AgentMessage(1, make.hello()), 0)
    again = run_protocol.on_message("a0", AgentMessage(1, make.hello(run="run")), 1)
    assert sent(again, RunWelcome) == [("a0", RunWelcome("run"))]
    assert run_protocol.replays == 0


def test_a_beat_is_kept_and_answered_with_what_there_is(two):
    two.say("a0", event())
    two.run_protocol.committed(two.run_protocol.received)
    beat = AgentMessage(0, NodeBeat([], {}))
    assert two.run_protocol.on_message("a0", beat, 0) == [StoreMessage(), SendMessage("a0", MessageAck(2))]


def test_an_answer_to_a_beat_says_what_had_come_before_it_stored_or_not(two):
    two.say("a0", event())
    assert two.run_protocol.on_message("a0", AgentMessage(0, NodeBeat([], {}, sent_ns=7)), 0)[-1] == SendMessage(
        "a0", MessageAck(0, echo_ns=7, received=2)
    )


def test_agents_share_the_room_for_what_is_on_the_way(make):
    run_protocol = RunProtocol("run", "job")
    assert run_protocol.credit == MOST_CREDIT
    for number in range(128):
        agent = f"a{number}"
        run_protocol.on_message(agent, AgentMessage(1, make.hello(agent, nproc=8, nodes=128)), 0)
    assert run_protocol.credit == ON_THE_WAY_BYTES // 128
    run_protocol.on_message("a0", AgentMessage(2, NodeBye("ok"), 1), 0)
    assert run_protocol.credit == ON_THE_WAY_BYTES // 127


# -- wanting the batch from all -----------------------------------------------------------------------------------


def test_the_first_anomaly_asks_every_node_for_that_batch_once(two):
    two.say("a1", NameDefinitions(1, 0, [RootDef(3, "Net", 1)]))
    wants = [WantedBatch(0, "Net", 1, 3), WantedBatch(0, "Net", 1, 2)]
    expected = [(agent, want) for want in wants for agent in ("a0", "a1")]
    assert sent(two.say("a1", anomaly(rank=1, root="Net#2")), WantedBatch) == expected
    assert sent(two.say("a0", anomaly(rank=0, root="Net#2")), WantedBatch) == []


def test_other_batches_are_asked_for_too(two):
    assert len(sent(two.say("a0", anomaly(batch=3)), WantedBatch)) == 4
    assert len(sent(two.say("a0", anomaly(batch=4)), WantedBatch)) == 4
    assert len(sent(two.say("a0", anomaly(batch=0)), WantedBatch)) == 2, "there is no batch before the first"


def test_the_second_root_of_a_class_is_told_by_its_name_even_if_its_definition_is_missing(two):
    ((_, want), *_) = sent(two.say("a0", anomaly(root="Net#3")), WantedBatch)
    assert (want.root_cls, want.root_ordinal) == ("Net", 2)


# -- the end ------------------------------------------------------------------------------------------------------


def test_a_run_is_over_when_every_node_has_said_goodbye(two):
    two.say("a0", NodeBye("ok"), 1)
    assert two.tick(1.1) == []
    two.say("a1", NodeBye("ok"), 2)
    assert two.tick(2.1) == [FinishRun()]
    assert two.tick(3) == []


def test_after_a_failure_the_other_nodes_are_told_to_stop_once(two):
    two.say("a0", NodeBye("failed"), 10)
    two.beat(10, "a1")
    assert two.tick(10 + STOP_AFTER_S - 0.1) == []
    ((agent, stop),) = sent(two.tick(10.1 + STOP_AFTER_S), StopRanks)
    assert (agent, stop.reason) == ("a1", "the job has ended on h0")
    assert sent(two.tick(11 + STOP_AFTER_S), StopRanks) == []


def test_a_launch_that_was_killed_stops_nobody_while_its_ranks_run_on(two):
    two.say("a0", NodeBye("failed", 9, runs_on=True), 10)
    two.beat(10, "a1")
    assert sent(two.tick(11 + STOP_AFTER_S), StopRanks) == []
    two.say("a1", NodeBye("ok"), 100)
    assert FinishRun() in two.tick(100.1 + STOP_AFTER_S)


def test_a_node_whose_ranks_have_all_left_is_not_waited_for_after_the_others_failure(two, make):
    """Its launch is in torchrun's exit barrier."""
    two.say("a1", make.ended(1), 9)
    two.say("a0", NodeBye("failed"), 10)
    two.beat(10, "a1")
    assert two.tick(9.9 + STOP_AFTER_S) == []
    assert FinishRun() in two.tick(10 + STOP_AFTER_S)
    assert not two.run_protocol.lost_agents


@pytest.mark.parametrize(
    ("nproc", "ends"),
    [(1, [{"code": 1}]), (1, [{"attempt": 0}, {"attempt": 1, "code": -15}]), (2, [{}])],
    ids=["failed", "left an attempt before", "one of two"],
)
def test_any_other_node_is_waited_for_until_it_says_goodbye(make, nproc, ends):
    cluster = Cluster(make, nproc=nproc)
    for end in ends:
        cluster.say("a1", make.ended(nproc, **end), 9)
    cluster.say("a0", NodeBye("failed"), 10)
    cluster.beat(20, "a1")
    assert FinishRun() not in cluster.tick(20)


def test_while_the_job_may_go_on_a_node_whose_ranks_have_left_is_waited_for(make):
    cluster = Cluster(make, max_nodes=4)
    cluster.say("a1", make.ended(1), 9)
    cluster.say("a0", NodeBye("failed"), 10)
    cluster.beat(20, "a1")
    assert cluster.tick(20) == []


def test_a_node_that_ends_by_itself_in_time_is_not_told(two):
    two.say("a0", NodeBye("failed"), 10)
    two.say("a1", NodeBye("failed"), 12)
    assert two.tick(20) == [FinishRun()]


@pytest.mark.parametrize("what", ["abort", "preflight"])
def test_an_abort_or_a_failed_preflight_stops_the_others(two, make, what):
    two.say("a0", anomaly(aborts=True) if what == "abort" else make.preflight(0, "failed"), 10)
    two.beat(10, "a1", "a0")
    assert [agent for agent, _ in sent(two.tick(10.1 + STOP_AFTER_S), StopRanks)] == ["a0", "a1"]


@pytest.mark.parametrize(
    "done",
    [
        SecondRun(RunPosition(0, 0, 3, 3, "Net")),
        ForwardCaptured(RunPosition(0, 0, 3, 3, "Net"), CaptureFile()),
        None,
    ],
)
def test_a_rank_that_looks_at_its_forward_once_more_has_the_time_for_it(two, done):
    two.say("a0", anomaly(aborts=True, looks=True), 10)
    over = 22 if done is not None else 10 + SECOND_RUN_S
    two.beat(20, "a1", "a0")
    assert sent(two.tick(20), StopRanks) == []
    if done is not None:
        two.say("a0", EventMessage(done), over)
    assert sent(two.tick(over + STOP_AFTER_S - 0.1), StopRanks) == []
    assert len(sent(two.tick(over + STOP_AFTER_S + 0.1), StopRanks)) == 2


def test_an_elastic_job_goes_on_without_a_node_that_failed(make):
    cluster = Cluster(make, max_nodes=4)
    cluster.say("a0", NodeBye("failed"), 10)
    cluster.beat(20, "a1")
    assert cluster.tick(20.5) == []


def test_a_silent_node_ends_nobodys_job(two):
    two.beat(SILENT_S, "a0")
    assert two.tick(SILENT_S + 0.1) == []
    assert two.run_protocol.lost_agents == ["a1"]
    actions = []
    for later in range(1, 100):
        two.beat(SILENT_S + 10 * later, "a0")
        actions += two.tick(SILENT_S + 10 * later + 0.1)
    assert told(actions, Code.LOST) == [action.text for action in actions], "that it is silent, and nothing else"


def test_a_silent_node_is_told_once_and_once_it_is_heard_again(make):
    cluster = Cluster(make)
    cluster.say("a1", stalled(1), 1.0)
    texts = []
    for second in range(10, 200, 10):
        cluster.beat(second, "a0")
        texts += told(cluster.tick(second + 0.1), Code.LOST)
    (text,) = texts
    assert text == (
        "Node h1 (rank 1) has been silent for 69 s: the node, or the link to it, is lost; 1 other node is heard"
    )
    cluster.beat(201, "a0", "a1")
    assert told(cluster.tick(201.1), Code.LOST) == ["Node h1 (rank 1) is heard again"]


def test_where_all_nodes_are_silent_it_may_be_the_collectors_own_host(make):
    cluster = Cluster(make)
    assert told(cluster.tick(10_000), Code.LOST) == []


def test_a_job_that_waits_for_a_silent_node_names_the_node(make):
    """It would be a hang without a culprit, and for a node that answers it is."""
    cluster = Cluster(make)
    for rank in range(2):
        cluster.say(f"a{rank}", NodeBeat([make.state(rank)], {}), 1.0)
    for second in range(10, 400, 10):
        cluster.beat(second, "a0")
    cluster.tick(399.9)
    cluster.say("a0", stalled(0), 400.0)
    cluster.say("a0", look(0, "all_reduce"), 401.0)
    (text,) = told(cluster.tick(400.0 + ANSWER_S))

    assert text.startswith("Node h1 (rank 1) went silent: the node, or the link to it, is lost. Rank 0 waits for what")


def test_all_nodes_silent_end_nobodys_job_while_the_launch_lives(two):
    assert two.tick(10_000) == []
    assert two.run_protocol.lost_agents == ["a0", "a1"]


def test_a_silent_node_is_waited_for_after_a_goodbye_but_not_for_ever(two):
    two.beat(100, "a1")
    two.say("a0", NodeBye("ok"), 100)
    assert two.tick(100 + GONE_S) == []
    assert two.tick(101 + GONE_S) == [FinishRun()]
    assert two.run_protocol.lost_agents == ["a1"]


def test_an_agent_whose_connection_was_closed_is_waited_for_until_it_counts_as_lost(two):
    two.beat(100, "a1")
    two.run_protocol.on_closed("a1", 99.9)  # its last beat was on the way
    two.say("a0", NodeBye("failed"), 101)
    two.tick(100 + SILENT_S)
    assert not two.run_protocol.lost_agents
    assert FinishRun() in two.tick(101 + SILENT_S)
    assert two.run_protocol.lost_agents == ["a1"]


def test_a_connection_that_was_given_up_after_a_silence_says_nothing_of_the_agents_end(two):
    two.beat(100, "a1")
    two.say("a0", NodeBye("failed"), 100)
    two.run_protocol.on_closed("a1", 131)
    assert FinishRun() not in two.tick(100 + GONE_S)
    assert FinishRun() in two.tick(101 + GONE_S)


def test_an_agent_that_has_connected_again_is_waited_for_as_before(two):
    two.beat(100, "a1")
    two.run_protocol.on_closed("a1", 100.1)
    two.beat(103, "a1")
    two.say("a0", NodeBye("failed"), 103)
    assert FinishRun() not in two.tick(103 + GONE_S)
    assert FinishRun() in two.tick(104 + GONE_S)


def test_one_node_of_which_no_connection_was_closed_is_waited_for_longest(make):
    three = Cluster(make, 3)
    three.beat(100, "a1", "a2")
    three.run_protocol.on_closed("a1", 100.1)
    three.say("a0", NodeBye("failed"), 101)
    assert FinishRun() not in three.tick(100 + GONE_S)
    assert FinishRun() in three.tick(101 + GONE_S)


def test_a_node_whose_launch_and_agent_have_ended_is_lost_soon(two):
    two.beat(100, "a1", launch_holds=True)
    two.run_protocol.on_closed("a1", 99.9)
    two.say("a0", NodeBye("failed"), 101)
    assert two.tick(100 + KILLED_S) == []
    assert two.tick(100.1 + KILLED_S) == [FinishRun()]
    assert two.run_protocol.killed_agents == two.run_protocol.lost_agents == ["a1"]


def test_an_agent_that_its_launch_outlives_is_waited_for(two):
    two.beat(100, "a1", launch_holds=True)  # so nothing closes the connection
    two.say("a0", NodeBye("failed"), 101)
    two.tick(100 + SILENT_S)
    assert not two.run_protocol.lost_agents
    assert FinishRun() not in two.tick(100 + GONE_S)
    assert FinishRun() in two.tick(101 + GONE_S)
    assert two.run_protocol.lost_agents == ["a1"]
    assert not two.run_protocol.killed_agents


def test_a_cut_link_is_no_death_also_where_the_launch_holds_the_connection(two):
    two.beat(100, "a1", launch_holds=True)
    two.say("a0", NodeBye("failed"), 100)
    two.run_protocol.on_closed("a1", 131)  # ZeroMQ has given it up
    assert FinishRun() not in two.tick(100 + GONE_S)
    assert FinishRun() in two.tick(101 + GONE_S)
    assert not two.run_protocol.killed_agents


def test_a_node_whose_link_was_reset_and_came_back_is_not_lost(two):
    two.beat(100, "a0", "a1", launch_holds=True)
    two.run_protocol.on_closed("a1", 100.1)
    two.beat(103, "a0", "a1")
    two.tick(110)
    assert not two.run_protocol.lost_agents
    two.tick(104 + SILENT_S)
    assert two.run_protocol.lost_agents == ["a0", "a1"]
    assert not two.run_protocol.killed_agents


def test_a_connection_that_the_launch_lets_go_of_for_the_next_one_ends_nobody(two):
    two.beat(100, "a1", launch_holds=True)
    two.beat(100.5, "a1", launch_holds=True)  # over the next one
    two.run_protocol.on_closed("a1", 100.6)
    two.beat(101, "a1", launch_holds=True)
    two.beat(102, "a1", launch_holds=True)
    two.say("a0", NodeBye("failed"), 102)
    assert FinishRun() not in two.tick(103 + KILLED_S)


def test_a_killed_node_is_told_while_the_others_go_on_and_so_is_its_return(two):
    two.beat(100, "a0", "a1", launch_holds=True)
    two.run_protocol.on_closed("a1", 100.1)
    two.beat(101 + KILLED_S, "a0", launch_holds=True)
    (told,) = two.tick(101 + KILLED_S)
    assert told == NotifyUser(f"Node h1 {WAS_KILLED}; 1 other node is heard", Code.LOST)
    assert two.tick(102 + KILLED_S) == []
    two.beat(103 + KILLED_S, "a1")
    assert two.tick(103 + KILLED_S) == [NotifyUser("Node h1 is heard again", Code.LOST)]


def test_a_node_that_says_goodbye_before_its_connection_ends_is_not_lost(two):
    two.beat(100, "a0", "a1", launch_holds=True)
    two.say("a1", NodeBye("failed"), 100)
    two.run_protocol.on_closed("a1", 100.1)
    two.beat(101 + KILLED_S, "a0", launch_holds=True)
    two.tick(101 + KILLED_S)
    assert not two.run_protocol.lost_agents


def test_the_place_of_a_killed_node_is_free_for_its_next_launch(two, make):
    two.beat(100, "a0", "a1", launch_holds=True)
    two.run_protocol.on_closed("a1", 100.1)
    two.beat(101 + KILLED_S, "a0", launch_holds=True)
    two.tick(101 + KILLED_S)
    welcomed = two.say("a9", make.hello("a9", "h1", 1, 2), 101 + KILLED_S)
    assert sent(welcomed, RunWelcome)


def test_when_the_launch_and_all_agents_are_gone_the_report_is_made(two):
    two.run_protocol.launch_gone(100)
    two.beat(100, "a0", "a1")
    assert two.tick(100 + SILENT_S) == []
    assert two.tick(101 + SILENT_S) == [FinishRun()]


def test_a_collector_without_a_launch_gives_up_after_a_long_silence(make):
    cluster = Cluster(make)
    cluster.run_protocol.by_hand = True
    assert cluster.tick(ABANDONED_S) == []
    assert cluster.tick(ABANDONED_S + 1) == [FinishRun()]


def test_an_agent_that_was_started_again_takes_the_place_of_the_one_before(make):
    cluster = Cluster(make, nodes=0)
    cluster.say("a.0", make.hello("a.0", nproc=1, nodes=1))
    cluster.say("a.1", make.hello("a.1", nproc=1, nodes=1), 5)
    assert cluster.tick(SILENT_S + 1) == []
    assert cluster.run_protocol.lost_agents == []
    cluster.say("a.1", NodeBye("ok"), SILENT_S + 2)
    assert cluster.tick(SILENT_S + 2) == [FinishRun()]


# -- a collector that was started again ---------------------------------------------------------------------------


def restored(make, *bodies, nodes=2):
    """A protocol that goes on from what another had stored of a0."""
    run_protocol = RunProtocol("run", "job")
    hello = make.hello("a0", "h0", 1, nodes)
    run_protocol.restore([("a0", n, body) for n, body in enumerate([hello, *bodies], 1)], 0.0)
    return run_protocol


def test_it_goes_on_where_the_one_before_it_was(make):
    run_protocol = restored(make, event())
    beat = AgentMessage(0, NodeBeat([], {}))
    assert run_protocol.on_message("a0", beat, 1) == [StoreMessage(), SendMessage("a0", MessageAck(2))]
    lost = AgentMessage(4, event(), after=3)
    assert run_protocol.on_message("a0", lost, 1) == [SendMessage("a0", MessageAck(2, resend=True))]
    assert run_protocol.on_message("a0", AgentMessage(3, event(), after=2), 1) == [StoreMessage()]


def test_it_asks_again_for_the_batches_that_the_one_before_it_wanted(make):
    run_protocol = restored(make, anomaly(rank=1, root="Net#2"))
    beat = AgentMessage(0, NodeBeat([], {}))
    asked = sent(run_protocol.on_message("a0", beat, 1), WantedBatch)
    assert asked == [("a0", WantedBatch(0, "Net", 1, 3)), ("a0", WantedBatch(0, "Net", 1, 2))]
    assert sent(run_protocol.on_message("a0", beat, 2), WantedBatch) == []


def test_it_knows_who_has_said_goodbye(make):
    run_protocol = restored(make, NodeBye("ok"), nodes=1)
    assert run_protocol.tick(0.1) == [FinishRun()]


def test_a_node_that_is_heard_again_is_not_lost(two):
    two.beat(30, "a0")
    two.tick(30)
    two.beat(31, "a1")
    assert two.run_protocol.lost_agents == []


def test_a_node_that_has_said_goodbye_may_be_silent(two):
    two.say("a0", NodeBye("ok"), 1)
    two.beat(50, "a1")
    two.tick(50)
    assert two.run_protocol.lost_agents == []


def test_a_straggler_is_waited_for_but_not_for_ever(two):
    two.say("a0", NodeBye("ok"), 1)
    two.beat(LINGER_S, "a1")
    assert FinishRun() not in two.tick(LINGER_S)
    two.beat(LINGER_S + 2, "a1")
    assert FinishRun() in two.tick(LINGER_S + 2)


def test_a_node_that_never_came_is_given_a_moment(make):
    run_protocol = RunProtocol("run", "job")
    run_protocol.on_message("a0", AgentMessage(1, make.hello("a0", nodes=2)), 0)
    run_protocol.on_message("a0", AgentMessage(2, NodeBye("failed"), 1), 1)
    assert run_protocol.tick(2) == []
    run_protocol.on_message("a0", AgentMessage(0, NodeBeat([], {})), 1 + STOP_AFTER_S)  # it waits for the verdict
    assert run_protocol.tick(1.1 + STOP_AFTER_S) == [FinishRun()]


def test_without_any_agent_the_launchs_end_is_the_end():
    run_protocol = RunProtocol("run", "job")
    assert run_protocol.tick(1000) == []
    run_protocol.launch_gone(1000)
    run_protocol.launch_gone(1000 + NOBODY_S)
    assert run_protocol.tick(999 + NOBODY_S) == []
    assert run_protocol.tick(1001 + NOBODY_S) == [FinishRun()]


# -- a job that stands still --------------------------------------------------------------------------------------


def stalled(rank, limit_s=300.0):
    return EventMessage(RankStall(RunPosition(rank, batch=4), limit_s))


def look(rank, function, *, still_s=300.0, number=1, limit_s=0.0, busy=0.0, phase="script", state="S"):
    stack = [StackLine("/torch/distributed/distributed_c10d.py", 1, function)] if function else []
    stack.append(StackLine("/home/me/train.py", 7, "main", "work()"))
    where = RunPosition(rank, batch=4)
    seen = RankLook(where, number, still_s, phase, state=state, busy=busy, stack=stack, limit_s=limit_s)
    return EventMessage(seen)


def asked(actions):
    return {
        action.agent: action.message.number
        for action in actions
        if isinstance(getattr(action, "message", None), LookAtRanks)
    }


def told(actions, code=Code.HANG):
    return [action.text for action in actions if isinstance(action, NotifyUser) and action.code == code]


def test_when_one_rank_stalls_all_nodes_are_asked_once(make):
    cluster = Cluster(make)

    assert asked(cluster.say("a0", stalled(0), 400.0)) == {"a0": 1, "a1": 1}
    assert asked(cluster.say("a1", stalled(1), 400.1)) == {}


def test_what_all_of_them_show_is_told_when_the_last_has_answered(make):
    cluster = Cluster(make)
    cluster.say("a0", stalled(0), 400.0)
    cluster.say("a0", look(0, "all_reduce"), 401.0)
    assert told(cluster.tick(401.1)) == []
    cluster.say("a1", look(1, ""), 401.2)
    (text,) = told(cluster.tick(401.3))

    assert (
        text.startswith("Rank 1 is ") and "It never reached all_reduce, in which rank 0 has waited for 300 s." in text
    )
    assert "gpuwatch leaves the job as it is; to end it: --on-hang abort" in text
    assert told(cluster.tick(402.0)) == []


def test_a_node_that_does_not_answer_is_not_waited_for_for_ever(make):
    cluster = Cluster(make)
    cluster.say("a0", stalled(0), 400.0)
    cluster.say("a0", look(0, "all_reduce"), 401.0)
    (text,) = told(cluster.tick(400.0 + ANSWER_S))

    assert "1 of the ranks did not report their positions" in text


@pytest.mark.parametrize(
    ("on_hang", "ends_at_overflow", "decided", "stop"),
    [
        ("auto", True, True, StopRanks("an overflow was found, and no rank moves any more")),
        ("auto", True, False, None),
        ("auto", False, True, None),
        ("abort", False, True, StopRanks("no rank moves any more", restart=True)),
    ],
)
def test_an_overflow_is_told_in_place_of_the_hang_and_ends_the_job(make, on_hang, ends_at_overflow, decided, stop):
    cluster = Cluster(make)
    cluster.run_protocol.on_hang, cluster.run_protocol.ends_at_overflow = on_hang, ends_at_overflow
    cluster.run_protocol.overflow_at_rest = lambda: RestingOverflow(0, "Rank 0 overflowed first.", decided)
    cluster.say("a0", stalled(0), 400.0)
    cluster.say("a0", look(0, "all_reduce"), 401.0)
    cluster.say("a1", look(1, ""), 401.2)
    actions = cluster.tick(401.3)
    (text,) = told(actions, Code.OVERFLOW)

    assert text.startswith("Rank 0 overflowed first. No rank has moved since: rank 0 waits in all_reduce")
    assert told(actions) == []
    assert cluster.run_protocol.asking.last is None  # viewers are shown the overflow
    stops = [a.message for a in actions if isinstance(a, SendMessage) and isinstance(a.message, StopRanks)]
    assert stops == ([stop] * 2 if stop is not None else [])


def soon_timed_out(rank, timeout_s):
    return EventMessage(RankStall(RunPosition(rank, batch=4), 0.8 * timeout_s, timeout_s))


def test_a_wait_that_its_groups_timeout_soon_ends_is_told_before_and_not_ended(make):
    """Whatever the limits of the ranks are: their positions are gone afterwards."""
    cluster = Cluster(make)
    cluster.run_protocol.on_hang = "abort"
    cluster.say("a0", soon_timed_out(0, 20.0), 400.0)
    cluster.say("a0", look(0, "all_reduce", still_s=16.0, limit_s=1200.0), 401.0)
    cluster.say("a1", look(1, "", still_s=16.0, limit_s=1200.0), 401.0)
    actions = cluster.tick(401.1)
    (text,) = told(actions)

    assert text.startswith("Rank 1 is ") and "It never reached all_reduce, in which rank 0 has waited for 16 s." in text
    assert text.endswith("(the timeout of its process group, 20 s, ends the job)")
    assert not [a for a in actions if isinstance(a, SendMessage) and isinstance(a.message, StopRanks)]


def in_mismatch(rank):
    return EventMessage(RankStall(RunPosition(rank, batch=4), 300.0, mismatch_s=10.0))


def stands_in(rank, operation, *, still_s=11.0):
    seen = look(rank, operation, still_s=still_s, limit_s=300.0).event
    issued = IssuedOperation(7, operation, "float32", 8)
    group = GroupState("0", "0-1", 2, begun=7, ended=6, phase="waiting", at=7, since_s=still_s, recent=[issued])
    return EventMessage(replace(seen, groups=[group]))


def test_operations_that_do_not_match_are_told_before_the_limit_and_end_the_job_with_it(make):
    cluster = Cluster(make)
    cluster.run_protocol.on_hang = "auto"
    cluster.say("a0", in_mismatch(0), 400.0)
    cluster.say("a0", stands_in(0, "all_reduce"), 401.0)
    cluster.say("a1", stands_in(1, "all_gather"), 401.0)
    actions = cluster.tick(401.1)
    (text,) = told(actions)

    assert "the ranks do not issue the same collectives" in text
    assert "(if no rank moves, gpuwatch ends the job after 300 s)" in text
    assert not [a for a in actions if isinstance(a, SendMessage) and isinstance(a.message, StopRanks)]
    cluster.say("a0", stalled(0, 20.0), 410.0)  # a limit that is passed soon after
    cluster.say(
        "a0", EventMessage(replace(stands_in(0, "all_reduce", still_s=21.0).event, number=2, limit_s=20.0)), 410.5
    )
    cluster.say(
        "a1", EventMessage(replace(stands_in(1, "all_gather", still_s=21.0).event, number=2, limit_s=20.0)), 410.5
    )
    actions = cluster.tick(411.0)
    assert [a for a in actions if isinstance(a, SendMessage) and isinstance(a.message, StopRanks)]


def test_what_turns_out_to_match_is_not_told_before_the_limit(make):
    cluster = Cluster(make)
    cluster.say("a0", in_mismatch(0), 400.0)
    cluster.say("a0", stands_in(0, "all_reduce"), 401.0)
    cluster.say("a1", stands_in(1, "all_reduce"), 401.0)
    assert told(cluster.tick(401.1)) == []


@pytest.mark.parametrize(("function", "still_s"), [("", 16.0), ("all_reduce", 2.0)], ids=["nobody waits", "one moves"])
def test_before_a_timeout_nothing_is_told_of_ranks_that_do_not_wait(make, function, still_s):
    cluster = Cluster(make)
    cluster.say("a0", soon_timed_out(0, 20.0), 400.0)
    cluster.say("a0", look(0, function, still_s=16.0), 401.0)
    cluster.say("a1", look(1, "", still_s=still_s), 401.0)

    assert told(cluster.tick(401.1)) == []


@pytest.mark.parametrize(
    ("peer", "state", "is_told"),
    [(True, "T", True), (True, "S", False), (False, "T", False)],
    ids=["stopped", "not stopped", "its own error"],
)
def test_a_stopped_rank_is_told_while_the_group_times_out_in_the_others(make, peer, state, is_told):
    """Rank 0 raises while all are asked: it has just moved, and it has only given up."""
    cluster = Cluster(make)
    cluster.say("a0", soon_timed_out(0, 7.0), 400.0)
    cluster.say("a0", make.raised(0, peer=peer), 401.0)
    cluster.say("a0", look(0, "", still_s=0.0, phase="raised", busy=0.9), 401.1)
    cluster.say("a1", look(1, "", still_s=7.2, state=state), 401.2)
    texts = told(cluster.tick(401.3))

    assert [text.partition(" (by")[0] for text in texts] == ["Rank 1 is stopped"] * is_told


def test_while_one_of_them_still_moves_it_is_no_hang(make):
    """Rank 1 evaluates, the others wait for it."""
    cluster = Cluster(make)
    cluster.say("a0", stalled(0), 400.0)
    cluster.say("a0", look(0, "barrier"), 401.0)
    cluster.say("a1", look(1, "", still_s=0.2), 401.0)
    assert told(cluster.tick(401.1)) == []

    assert asked(cluster.say("a0", stalled(0), 700.0)) == {"a0": 2, "a1": 2}
    cluster.say("a0", look(0, "barrier", still_s=600.0, number=2), 701.0)
    cluster.say("a1", look(1, "", still_s=290.0, number=2), 701.0)
    assert len(told(cluster.tick(701.1))) == 1


def test_while_one_of_them_may_rest_for_longer_it_is_no_hang(make):
    """Rank 1 compiles, saves a checkpoint or loads its first batch, the others wait for it."""
    cluster = Cluster(make)
    for number, (still_s, texts) in enumerate([(301.0, 0), (601.0, 0), (1201.0, 1)], 1):
        at = 1000.0 * number
        assert asked(cluster.say("a0", stalled(0), at)) == {"a0": number, "a1": number}
        cluster.say("a0", look(0, "barrier", still_s=still_s, number=number, limit_s=300.0), at + 1)
        cluster.say("a1", look(1, "", still_s=still_s - 2, number=number, limit_s=1200.0), at + 1)
        assert len(told(cluster.tick(at + 1.1))) == texts


def test_a_late_answer_to_an_earlier_question_counts_for_nothing(make):
    cluster = Cluster(make)
    cluster.say("a0", stalled(0), 400.0)
    cluster.tick(400.0 + ANSWER_S)
    cluster.say("a0", stalled(0), 700.0)
    cluster.say("a0", look(0, "all_reduce", number=2), 701.0)
    cluster.say("a1", look(1, "", number=1), 701.0)

    assert told(cluster.tick(701.1)) == []


@pytest.mark.parametrize(("on_hang", "stops"), [("report", 0), ("auto", 0), ("abort", 2)])
def test_the_job_is_ended_only_where_that_was_asked_for(make, on_hang, stops):
    cluster = Cluster(make)
    cluster.run_protocol.on_hang = on_hang
    cluster.say("a0", stalled(0), 400.0)
    cluster.say("a0", look(0, "all_reduce"), 401.0)
    cluster.say("a1", look(1, ""), 401.0)
    actions = cluster.tick(401.1)

    assert [a.message.reason for a in actions if isinstance(a, SendMessage) and isinstance(a.message, StopRanks)] == [
        "no rank moves any more"
    ] * stops


@pytest.mark.parametrize(("on_hang", "stops"), [("auto", 0), ("abort", 1)])
def test_the_last_living_rank_that_stands_still_is_ended_where_that_was_asked_for(make, on_hang, stops):
    cluster = Cluster(make)
    cluster.run_protocol.on_hang = on_hang
    cluster.say("a0", make.ended(0, 0, phase="finished"), 300.0)
    cluster.say("a1", stalled(1), 400.0)
    cluster.say("a1", look(1, ""), 401.0)
    actions = cluster.tick(401.1)
    (text,) = told(actions)

    assert text.startswith("Rank 1 has not moved for 300 s, and all other ranks have ended.")
    assert len([a for a in actions if isinstance(a, SendMessage) and isinstance(a.message, StopRanks)]) == stops


def test_where_all_wait_and_nothing_says_that_it_never_comes_the_job_is_ended_later(make):
    cluster = Cluster(make)
    cluster.run_protocol.on_hang = "auto"
    for number, (still_s, stops) in enumerate([(300.0, 0), (600.0, 0), (1200.0, 2)], 1):
        at = 1000.0 * number
        cluster.say("a0", stalled(0), at)
        for rank in range(2):
            cluster.say(f"a{rank}", look(rank, "all_reduce", still_s=still_s, number=number), at + 1)
        actions = cluster.tick(at + 1.1)
        (text,) = told(actions)
        assert ("if no rank moves, gpuwatch ends the job after 1200 s" in text) == (not stops)
        assert len([a for a in actions if isinstance(a, SendMessage) and isinstance(a.message, StopRanks)]) == stops


def test_what_computes_while_the_others_wait_is_told_and_ended_later(make):
    """Rank 1 loops, or works on what only one rank does."""
    cluster = Cluster(make)
    cluster.run_protocol.on_hang = "abort"
    for number, (still_s, stops) in enumerate([(300.0, 0), (600.0, 0), (1200.0, 2)], 1):
        at = 1000.0 * number
        cluster.say("a0", stalled(0), at)
        cluster.say("a0", look(0, "barrier", still_s=still_s, number=number, busy=1.0), at + 1)
        cluster.say("a1", look(1, "", still_s=still_s - 2, number=number, busy=0.9), at + 1)
        actions = cluster.tick(at + 1.1)
        (text,) = told(actions)
        assert ("because rank 1 computes; it ends the job after 1200 s" in text) == (not stops)
        assert len([a for a in actions if isinstance(a, SendMessage) and isinstance(a.message, StopRanks)]) == stops


def test_a_collector_that_was_started_again_does_not_conclude_from_what_is_in_its_store(make):
    """Since then the ranks may have moved."""
    cluster = Cluster(make)
    cluster.run_protocol.on_hang = "abort"
    stored = [("a0", 1, make.hello("a0", "h0", 1, 1)), ("a0", 2, stalled(0)), ("a0", 3, look(0, "all_reduce"))]
    cluster.run_protocol.restore(stored, 0.0)

    assert told(cluster.tick(100.0)) == []
