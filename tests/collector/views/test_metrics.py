"""What a Prometheus scrapes: a collector in its own process, real HTTP, read by prometheus_client's own parser."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler

import psutil
import pytest
import zmq
from gpuwatch.collector.run_files import new_run
from gpuwatch.collector.views.metrics_endpoint import _MOST_SCRAPES, MetricsExporter, OwnNumbers, text_of
from gpuwatch.core.errors import UsageError
from gpuwatch.core.events.agent_events import LimitForecast
from gpuwatch.core.wire.beat import HotModule, NodeBeat, pack_list
from gpuwatch.core.wire.messages import (
    AgentLeaving,
    AgentMessage,
    EventMessage,
    JobResult,
    MessageAck,
    NodeBye,
    decode_collector,
    encode,
)
from gpuwatch.core.wire.pipe import CannotBind, CollectorBound, CollectorConfig
from gpuwatch.core.wire.view import JobView, LimitPassing, RankView, ViewStraggler
from gpuwatch.launcher.head_collector import HeadCollector
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from ...known_keys import KEYS
from ...ports import ports_of_this_test
from ...waiting import WAIT_S, until
from ..conftest import BUILDERS

pytestmark = pytest.mark.quick_here(8)

HOSTILE = 'fc\\1"} 7\n# TYPE x'


def parsed(text: bytes) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """name -> labels -> number"""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            of_name = found.setdefault(sample.name, {})
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in of_name, f"{sample.name}{labels} is told twice"
            of_name[labels] = sample.value
    return found


def scrape(url: str):
    with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return parsed(answer.read())


def scraped_until(url, seen):
    found = {}

    def is_seen() -> bool:
        try:
            found["now"] = scrape(url)
        except urllib.error.HTTPError as error:
            with error:
                assert error.code == 503, "there is a number, or none yet"
            return False
        return seen(found["now"])

    until(is_seen, "a scrape as wanted", lambda: found)
    return found["now"]


def config(folder, metrics="127.0.0.1:0") -> CollectorConfig:
    pair = KEYS.collector
    return CollectorConfig(
        bind="tcp://127.0.0.1:*",
        public_key=pair.public.decode(),
        private_key=pair.private.decode(),
        agent_public_key=KEYS.agent.public.decode(),
        viewer_public_key=KEYS.viewer.public.decode(),
        runs_dir=str(folder),
        rdzv_id="job",
        run_name="scraped",
        metrics=metrics,
    )


@contextmanager
def agent_of(address):
    context = zmq.Context()
    made = context.socket(zmq.DEALER)
    try:
        made.linger = 0
        made.identity = b"a0"
        made.curve_serverkey = KEYS.collector.public
        made.curve_publickey, made.curve_secretkey = KEYS.agent.public, KEYS.agent.private
        made.connect(address)
        yield made
    finally:
        made.close()
        context.term()


def answer_to(agent, kind):
    while True:
        assert agent.poll(WAIT_S * 1000), "the collector did not answer"
        message = decode_collector(agent.recv())
        if isinstance(message, kind):
            return message


@pytest.mark.slow
def test_a_collector_is_scraped_while_its_job_runs_and_until_the_verdict(make, tmp_path):
    collector = HeadCollector(config(tmp_path), print, lambda line: None)
    try:
        bound = collector.answer
        assert isinstance(bound, CollectorBound) and bound.metrics.startswith("http://127.0.0.1:")
        with agent_of(bound.address) as agent:
            batch = make.Batch(1, batch=8)
            batch.call("fc", "Linear", given=[batch.tensor()], returned=[batch.tensor(make.INF)])
            told = LimitForecast(make.where(0, batch=5), "net.up", "Linear", "float16", 65504.0, 9e3, 20, 15, 30, 1)
            bodies = [make.hello_of(nproc=2), *batch.messages(), EventMessage(told)]
            for n, body in enumerate(bodies, 1):
                agent.send(encode(AgentMessage(n, body, n - 1)))
            states = [make.state(0, batch=9, step=8, rows_lost=3), make.state(1, batch=8, step=8, warned=7)]
            hot = [HotModule(0, 9, HOSTILE, "float16", 3e4, 1.1, 0.1), HotModule(1, 9, HOSTILE, "float16", 2e4, 1.7, 0)]
            agent.send(encode(AgentMessage(0, NodeBeat(states, {1: 4}, sent_ns=5, hot=pack_list(hot)))))
            while not (ack := answer_to(agent, MessageAck)).echo_ns:
                pass
            assert ack.looks, "who scrapes looks on"

            found = scraped_until(bound.metrics, lambda found: found["gpuwatch_verdict"][(("kind", "overflow"),)] == 1)
            rank = (("host", "h0"), ("rank", "0"))
            assert found["gpuwatch_rank_batches_total"][rank] == 10
            assert found["gpuwatch_rank_steps_total"][rank] == 8
            assert found["gpuwatch_rank_state"] == {
                (*rank, ("state", "running")): 1,
                (("host", "h0"), ("rank", "1"), ("state", "overflow")): 1,
            }
            assert found["gpuwatch_ranks"][(("state", "overflow"),)] == 1
            (module,) = found["gpuwatch_module_headroom"].items()
            assert module == ((("dtype", "float16"), ("module", HOSTILE.replace("\n", "\\n"))), 1.1), "as it is shown"
            where = ("bound", "middle"), ("dtype", "float16"), ("module", "net.up")
            assert found["gpuwatch_forecast_batch"][where] == 25
            assert found["gpuwatch_events_total"][(("kind", "anomaly"),)] == 1
            assert found["gpuwatch_anomalies_total"][(("value", "+inf"),)] == 1
            assert found["gpuwatch_events_total"][(("kind", "warned_row"),)] == 7
            assert found["gpuwatch_lost_total"] == {
                (("what", "rows"),): 3,
                (("what", "records"),): 0,
                (("what", "pages"),): 4,
            }
            assert found["gpuwatch_metrics_faults_total"][()] == 0
            assert "gpuwatch_collector_waiting_messages" in found
            assert found["gpuwatch_run_info"] == {(("attempt", "0"), ("run", "scraped")): 1}

            agent.send(encode(AgentMessage(len(bodies) + 1, NodeBye("failed"), len(bodies))))
            answer_to(agent, JobResult)
            assert scrape(bound.metrics)["gpuwatch_verdict"][(("kind", "overflow"),)] == 1, "until the agent has left"
            agent.send(encode(AgentMessage(0, AgentLeaving())))
    finally:
        collector.end(WAIT_S)
    with pytest.raises(urllib.error.URLError):
        scrape(bound.metrics)
    report = json.loads((tmp_path / "scraped" / "report.json").read_text())
    assert (report["verdict"]["kind"], report["collector"]["metrics_faults"]) == ("overflow", 0)


def rank_view(number, **more) -> RankView:
    fields = {"overflow": False, "warned": 0, **more}
    return RankView(number, f"node-{number // 8}", "forward", 9, 10, -1, "net", 0.1, **fields)


def view_of_ranks(number, **more) -> JobView:
    return JobView(
        5, "run", [], number, 0, [], [rank_view(rank) for rank in range(number)], **{"hot": [], **more}, events=[]
    )


def test_series_grow_with_ranks_alone():
    """1,024 ranks with the most modules that a picture has: four series each without GPUs, and a bounded rest."""
    hot = [HotModule(rank, 9, f"layers.{rank}", "float16", 3e4, 1.0, 0.0) for rank in range(8)]
    passing = [LimitPassing(f"layers.{n}", "float16", 9, 8, 10) for n in range(8)]
    small = parsed(text_of(view_of_ranks(2, hot=hot, passing=passing), OwnNumbers()))
    large = parsed(text_of(view_of_ranks(1024, hot=hot, passing=passing), OwnNumbers()))
    rest = sum(map(len, small.values())) - 2 * 4
    assert rest < 100
    assert sum(map(len, large.values())) == 1024 * 4 + rest


def test_a_gpu_adds_two_series_to_its_rank():
    view = view_of_ranks(2)
    ranks = [replace(view.ranks[0], gpu_use=0.97, gpu_memory=0.5), view.ranks[1]]
    found = parsed(text_of(replace(view, ranks=ranks), OwnNumbers()))
    labels = (("host", view.ranks[0].host), ("rank", "0"))
    assert found["gpuwatch_rank_gpu_use_share"] == {labels: 0.97}
    assert found["gpuwatch_rank_gpu_memory_share"] == {labels: 0.5}


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "a\\nb", "}", "", "héllo", 'a b="c",d'])
def test_label_values_are_escaped(name):
    view = view_of_ranks(1, hot=[HotModule(0, 9, name, "float16", 3e4, 1.5, 0.0)], slow=ViewStraggler(0, name, 0.25))
    found = parsed(text_of(view, OwnNumbers(turned_away={name: 2})))
    assert found["gpuwatch_module_headroom"] == {(("dtype", "float16"), ("module", name)): 1.5}
    assert found["gpuwatch_straggler_share"] == {(("host", name), ("rank", "0")): 0.25}
    assert found["gpuwatch_collector_turned_away_total"] == {(("reason", name),): 2}


@pytest.fixture
def served():
    made = MetricsExporter("127.0.0.1:0")
    yield made
    made.close()


def test_before_the_first_picture_there_is_no_number_and_elsewhere_nothing(served):
    for url, code in ((served.url, 503), (f"{served.url}/nowhere", 404)):
        with pytest.raises(urllib.error.HTTPError) as found:
            scrape(url)
        with found.value:
            assert found.value.code == code


def test_the_last_scrapes_have_the_verdict(served):
    served.show(lambda: (view_of_ranks(2), OwnNumbers()), 0.0)
    assert set(scrape(served.url)["gpuwatch_verdict"].values()) == {0}
    served.conclude("hang")
    told = scrape(served.url)["gpuwatch_verdict"]
    assert [labels for labels, number in told.items() if number] == [(("kind", "hang"),)]


def broken(*given):
    raise RuntimeError("no such thing")


def test_an_error_of_ours_is_counted_and_logged_once_and_costs_one_picture(served, capsys):
    served.show(lambda: (view_of_ranks(1), OwnNumbers()), 0.0)
    served.show(broken, 10.0)
    served.show(broken, 20.0)
    assert scrape(served.url)["gpuwatch_world_size"] == {(): 1}, "the last picture that could be made"
    assert served.faults == 2
    served.show(lambda: (view_of_ranks(3), OwnNumbers(metrics_faults=served.faults)), 30.0)
    found = scrape(served.url)
    assert (found["gpuwatch_world_size"][()], found["gpuwatch_metrics_faults_total"][()]) == (3, 2)
    assert capsys.readouterr().err == "the metrics could not be computed: RuntimeError: no such thing\n"


def test_a_text_that_cannot_be_written_is_counted_too(served, monkeypatch, capsys):
    monkeypatch.setattr("gpuwatch.collector.views.metrics_endpoint.text_of", broken)
    served.show(lambda: (view_of_ranks(1), OwnNumbers()), 0.0)
    with pytest.raises(urllib.error.HTTPError) as found:
        scrape(served.url)
    with found.value:
        assert found.value.code == 503
    assert served.faults == 1
    assert "no such thing" in capsys.readouterr().err


def test_an_answer_that_cannot_be_given_is_counted_too_and_the_next_one_is(served, monkeypatch, capsys):
    served.show(lambda: (view_of_ranks(1), OwnNumbers()), 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(BaseHTTPRequestHandler, "send_header", broken)
        with pytest.raises(OSError):
            scrape(served.url)
    assert scrape(served.url)["gpuwatch_world_size"] == {(): 1}
    assert served.faults == 1
    assert "no such thing" in capsys.readouterr().err


@pytest.mark.slow
def test_clients_that_say_nothing_hold_nobody_up(served):
    port = int(served.url.rpartition(":")[2].partition("/")[0])
    with ExitStack() as idle:
        for _ in range(_MOST_SCRAPES):
            idle.enter_context(socket.create_connection(("127.0.0.1", port)))
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as one_more:
            assert one_more.recv(1) == b"", "it is hung up on: there is room for so many"
        shown = threading.Event()

        def show():
            served.show(lambda: (view_of_ranks(1), OwnNumbers()), 0.0)
            shown.set()

        thread = threading.Thread(target=show)
        thread.start()
        assert shown.wait(WAIT_S), "the loop waits for a scrape"
        thread.join()

    def gets_in() -> bool:
        try:
            return scrape(served.url)["gpuwatch_world_size"] == {(): 1}
        except OSError:
            return False  # those that have gone still take up the room

    until(gets_in, "a scrape gets in again")


def test_a_port_in_use_ends_the_collector_before_there_is_a_run(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        collector = HeadCollector(config(tmp_path / "runs", address), print, lambda line: None)
        collector.end(WAIT_S)
        found = collector.answer
        assert isinstance(found, CannotBind) and found.code == "GW422"
        assert found.reason == (
            f"--metrics-port: expected an address that is free, found {address}: Address already in use; pass another "
            "[HOST:]PORT"
        )
        assert not (tmp_path / "runs").exists()


def end_job(address) -> None:
    """A node that has come and gone."""
    with agent_of(address) as agent:
        agent.send(encode(AgentMessage(1, BUILDERS.hello_of(nproc=0))))
        agent.send(encode(AgentMessage(2, NodeBye("ok"), 1)))
        answer_to(agent, JobResult)
        agent.send(encode(AgentMessage(0, AgentLeaving())))


def told(said, words) -> None:
    until(lambda: any(words in line for line in said), repr(words), lambda: said)


@pytest.mark.slow
def test_a_collector_that_was_killed_serves_at_the_same_port_again(tmp_path):
    with ports_of_this_test((port,) for port in range(29800, 29890)) as (port,):
        said = []
        collector = HeadCollector(config(tmp_path, f"127.0.0.1:{port}"), said.append, lambda line: None)
        try:
            url = collector.answer.metrics
            assert url == f"http://127.0.0.1:{port}/metrics"
            scraped_until(url, lambda found: "gpuwatch_world_size" in found)
            psutil.Process(collector.pid).kill()
            told(said, "it was started again")
            scraped_until(url, lambda found: "gpuwatch_world_size" in found)
            end_job(collector.answer.address)
        finally:
            collector.end(WAIT_S)


def test_a_collector_that_is_started_again_goes_on_without_a_port_that_was_taken_meanwhile(tmp_path):
    said = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        again = replace(config(tmp_path, address), resume=str(new_run(tmp_path).folder))
        collector = HeadCollector(again, said.append, lambda line: None)
        try:
            assert isinstance(collector.answer, CollectorBound) and collector.answer.metrics == ""
            assert any(line.startswith("the run continues without metrics: --metrics-port: expected") for line in said)
            end_job(collector.answer.address)
        finally:
            collector.end(WAIT_S)


def collect(*args, before="pass"):
    words = ["gpuwatch", "collect", *args]
    code = f"{before}; import sys; sys.argv = {words!r}; from gpuwatch.cli.main import main; main()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S)


@pytest.mark.parametrize(
    ("before", "port", "sentence"),
    [
        ("import sys; sys.modules['prometheus_client'] = None", "9", "pip install prometheus_client"),
        ("pass", "http", "--metrics-port: expected [HOST:]PORT with a port from 1 to 65535, found 'http'"),
    ],
)
def test_by_hand_it_is_one_sentence(tmp_path, before, port, sentence):
    done = collect("--bind", "tcp://127.0.0.1:*", "--runs-dir", str(tmp_path), "--metrics-port", port, before=before)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "encrypting" not in line]
    assert sentence in line


def test_an_address_of_another_host_is_one_sentence():
    with pytest.raises(UsageError, match=r"expected an address that is free, found 203\.0\.113\.7:9: "):
        MetricsExporter("203.0.113.7:9")
