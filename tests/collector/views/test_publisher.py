"""The socket that viewers look at: real sockets, CURVE and all, and a server with facts behind it."""

from __future__ import annotations

import stat
import threading

import msgspec
import pytest
import zmq
from gpuwatch.collector.agent_socket import CurveAccess
from gpuwatch.collector.facts.fold import FactFold
from gpuwatch.collector.views.publisher import EVERY_S, ViewPublisher, job_viewer
from gpuwatch.collector.views.snapshot import view_of
from gpuwatch.core.errors import GpuwatchError
from gpuwatch.core.events.node_events import GpuXid
from gpuwatch.core.events.preflight_events import RankInventoryEvent
from gpuwatch.core.preflight import InventoryFacts
from gpuwatch.core.wire.beat import GpuNow, HostNow, HotModule, NodeBeat, pack_list
from gpuwatch.core.wire.messages import EventMessage
from gpuwatch.core.wire.view import FILE, JobView, read_viewer_keys
from zmq.auth.thread import ThreadAuthenticator

from ...known_keys import KEYS, STRANGER
from ...waiting import WAIT_S, until


@pytest.fixture
def door():
    return CurveAccess(KEYS.agent.public.decode(), KEYS.viewer.public.decode())


@pytest.fixture
def context(door):
    made = zmq.Context()
    authenticator = ThreadAuthenticator(made)
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=door)
    yield made
    authenticator.stop()
    made.destroy(linger=0)


@pytest.fixture
def publisher(context, tmp_path):
    made = ViewPublisher(context, "tcp://127.0.0.1:29401", KEYS.collector, KEYS.viewer)
    made.announce(tmp_path)
    yield made
    made.close()


@pytest.fixture
def link(tmp_path, publisher):
    made = job_viewer(tmp_path)
    yield made
    made.close()


class Shown:
    """Counts how often a picture was made."""

    def __init__(self, payload: str = "") -> None:
        self.times = 0
        self.payload = payload

    def __call__(self) -> JobView:
        self.times += 1
        return JobView(self.times, f"run{self.payload}", [], 0, 0, [], [], [], [])


def looked(publisher, shown, link) -> JobView:
    """Turns of the collector's loop until the viewer has a picture."""
    for turn in range(100_000):
        publisher.show(shown, turn * EVERY_S)
        found = link.newest(0.01)
        if found is not None:
            return found
    raise AssertionError("no picture came")


def test_who_has_the_runs_folder_sees_the_newest_picture(publisher, link):
    shown = Shown()
    assert looked(publisher, shown, link).run == "run"
    assert shown.times >= 1


@pytest.mark.slow
def test_without_a_viewer_no_picture_is_made_and_none_after_the_last_has_left(publisher, link):
    shown = Shown()
    for turn in range(100):
        publisher.show(shown, turn * EVERY_S)
    assert shown.times == 0
    looked(publisher, shown, link)
    link.close()
    turn = 200_000
    while publisher.has_viewers:
        turn += 1
        publisher.show(shown, turn * EVERY_S)
    before = shown.times
    publisher.show(shown, (turn + 1) * EVERY_S)
    assert shown.times == before


def test_at_most_one_picture_a_second(publisher, link):
    shown = Shown()
    looked(publisher, shown, link)
    before = shown.times
    for _ in range(100):
        publisher.show(shown, 1e9)
    assert shown.times == before + 1


def test_the_file_is_for_its_user_alone_and_goes_with_the_collector(publisher, tmp_path):
    path = tmp_path / FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keys = read_viewer_keys(tmp_path)
    assert keys.private_key == KEYS.viewer.private.decode()
    assert "127.0.0.1" in keys.address
    publisher.close()
    assert read_viewer_keys(tmp_path) is None


def subscriber(context, publisher, pair) -> zmq.Socket:
    socket = context.socket(zmq.SUB)
    socket.linger = 0
    socket.curve_serverkey = KEYS.collector.public
    socket.curve_publickey, socket.curve_secretkey = pair.public, pair.private
    socket.subscribe(b"")
    socket.connect(publisher._keys.address)
    return socket


def test_a_stranger_sees_nothing(context, door, publisher, link):
    stranger = subscriber(context, publisher, STRANGER.viewer)
    shown = Shown()

    def is_refused() -> bool:
        publisher.show(shown, 0.0)
        return bool(door.turned_away["refused"])

    until(is_refused, "the stranger is refused", lambda: door.turned_away, look_s=0)
    assert shown.times == 0
    looked(publisher, shown, link)
    assert not stranger.poll(0)
    stranger.close()


def test_a_viewer_that_reads_nothing_holds_nobody_up(context, publisher, link):
    slow = subscriber(context, publisher, KEYS.viewer)
    slow.rcvhwm = 1
    shown = Shown("x" * 200_000)
    looked(publisher, shown, link)
    done = threading.Event()

    def show_many():
        for turn in range(500):
            publisher.show(shown, 1e6 + turn * 100 * EVERY_S)
        done.set()

    thread = threading.Thread(target=show_many)
    thread.start()
    assert done.wait(WAIT_S), "the collector waits for a viewer"
    thread.join()
    slow.close()


def test_words_of_a_viewer_change_nothing(context, publisher, link):
    rude = context.socket(zmq.XSUB)
    rude.linger = 0
    rude.curve_serverkey = KEYS.collector.public
    rude.curve_publickey, rude.curve_secretkey = KEYS.viewer.public, KEYS.viewer.private
    rude.connect(publisher._keys.address)
    for word in (b"\x01", b"garbage", b"\x02" * 1000):
        rude.send(word)
    assert looked(publisher, Shown(), link).run == "run"
    rude.close()


def test_a_damaged_file_is_one_sentence(tmp_path):
    (tmp_path / FILE).write_text("{")
    with pytest.raises(GpuwatchError, match=r"expected the address of a collector in .*view\.json"):
        read_viewer_keys(tmp_path)


def test_the_picture_of_a_job(make):
    folded = FactFold()
    hot = [HotModule(1, 9, "fc", "float16", 3e4, 1.1, 0.1)]
    states = [make.state(0, batch=9, step=8, seq=20), make.state(1, batch=8, step=8, age_s=4.0, begun=19)]
    batch = make.Batch(1, batch=8)
    batch.call("fc", "Linear", given=[batch.tensor()], returned=[batch.tensor(make.INF)])
    bodies = [
        make.hello(host="node-a"),
        *batch.messages(),
        NodeBeat(states, {}, 5, hot=pack_list(hot)),
        EventMessage(GpuXid("G", 79, 5)),
    ]
    for n, body in enumerate([*bodies, make.ended(0, 1)], 1):
        folded.add("a0", n, body)
    view = view_of(folded.as_it_stands(), "run-1", 7, "the verdict so far")
    assert [
        (rank.rank, rank.host, rank.batch, rank.begun, rank.ended, rank.exit, rank.overflow) for rank in view.ranks
    ] == [
        (0, "node-a", 9, -1, True, 1, False),
        (1, "node-a", 8, 19, False, None, True),
    ]
    assert (view.hot, view.nodes[0].xids, view.world_size, view.verdict) == (hot, [79], 2, "the verdict so far")
    assert any("+inf in output of `fc`, batch 8" in event.text for event in view.events)


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        (pack_list([GpuNow("GPU-b", 0.25, 0.5), GpuNow("GPU-a", 0.97, 0.75)]), (0.97, 0.75)),
        (pack_list([GpuNow("GPU-b", 0.25, 0.5)]), (-1.0, -1.0)),
        (pack_list([]), (-1.0, -1.0)),
        (b"garbage", (-1.0, -1.0)),
        (msgspec.msgpack.encode([["GPU-a", "97 %", 0.5]]), (-1.0, -1.0)),
    ],
)
def test_a_rank_is_shown_with_its_own_gpu(make, sent, shown):
    folded = FactFold()
    on = EventMessage(RankInventoryEvent(make.where(0), "cuda:0", {}, InventoryFacts(uuid="GPU-a")))
    for n, body in ((1, make.hello()), (2, on), (0, NodeBeat([make.state(0)], {}, 5, gpus=sent))):
        folded.add("a0", n, body)
    (rank,) = view_of(folded.as_it_stands(), "run-1", 7).ranks
    assert (rank.gpu_use, rank.gpu_memory) == shown


def test_a_module_is_shown_once_on_the_rank_where_it_has_the_least_left(make):
    folded = FactFold()
    for node in range(2):
        hot = [HotModule(node, 9, name, "float16", 3e4, left - node, 0.0) for name, left in (("a", 3.0), ("b", 5.0))]
        folded.add(f"a{node}", 1, make.hello(f"a{node}"))
        folded.add(f"a{node}", 0, NodeBeat([], {}, 5, hot=pack_list(hot)))
    view = view_of(folded.as_it_stands(), "run-1", 7)
    assert [(hot.module, hot.rank, hot.left) for hot in view.hot] == [("a", 1, 2.0), ("b", 1, 4.0)]


@pytest.mark.parametrize(
    ("dtype", "left", "is_shown"),
    [("float32", 127.1, False), ("bfloat16", 120.0, False), ("float32", 3.0, True), ("float16", 14.0, True)],
)
def test_a_module_far_below_a_distant_limit_is_not_shown(make, dtype, left, is_shown):
    folded = FactFold()
    folded.add("a0", 1, make.hello())
    folded.add("a0", 0, NodeBeat([], {}, 5, hot=pack_list([HotModule(0, 9, "fc", dtype, 2.0, left, 0.0)])))
    assert bool(view_of(folded.as_it_stands(), "run-1", 7).hot) == is_shown


def test_a_node_is_shown_with_its_figures(make):
    gpus = [GpuNow("GPU-a", 0.9, 0.5, 61.0, 300.0), GpuNow("GPU-b", 0.7, 0.75, 71.0, 200.0), GpuNow("GPU-c", -1, -1)]
    folded = FactFold()
    folded.add("a0", 1, make.hello())
    folded.add("a0", 0, NodeBeat([], {}, 5, gpus=pack_list(gpus), figures=pack_list([HostNow(0.5, 0.25)])))
    (node,) = view_of(folded.as_it_stands(), "run-1", 7).nodes
    assert (node.cpu, node.memory, node.gpu_memory, node.temperature, node.power) == (0.5, 0.25, 0.75, 71.0, 500.0)
    assert node.gpu_use == pytest.approx(0.8)


@pytest.mark.parametrize("hot", [b"\xff", b"garbage", pack_list([])])
def test_hot_modules_that_no_agent_sends_are_left_out(make, hot):
    folded = FactFold()
    folded.add("a0", 1, make.hello())
    folded.add("a0", 0, NodeBeat([], {}, 5, hot=hot))
    assert view_of(folded.as_it_stands(), "run-1", 7).hot == []


def test_a_collector_with_no_word_yet_has_a_picture():
    assert view_of(FactFold().as_it_stands(), "run-1", 7).ranks == []


def test_a_picture_that_cannot_be_made_costs_the_view_alone(publisher, link, capsys):
    looked(publisher, Shown(), link)

    def broken() -> JobView:
        raise RuntimeError("no such thing")

    for _ in range(2):
        publisher.show(broken, 1e9)
    assert capsys.readouterr().err == "the snapshot for viewers could not be made: RuntimeError: no such thing\n"
