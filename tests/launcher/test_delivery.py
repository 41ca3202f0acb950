"""Helpers that are killed, stopped and started again: nothing is lost, nothing told twice, and no job is ended."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from gpuwatch.cli.report import report as report_command
from gpuwatch.collector.store import RunStore
from gpuwatch.core.errors import GpuwatchError
from gpuwatch.core.events.alarm_evidence import BatchInputs
from gpuwatch.core.events.alarms import Anomaly, RangeWarning
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.recorder.run_folder import keep_rescued
from gpuwatch.core.wire.messages import VERDICT_PATIENCE_S, AgentHello, EventMessage, NameDefinitions, NodeBye
from gpuwatch.core.wire.pipe import LaunchDone, WorkersEnded, WorkersStarted

from ..waiting import WAIT_S, until
from .conftest import Rank

ANOMALY = Anomaly(RunPosition(1, 0, 2, 2, "Net", 2, 2), 0, "fc", "Linear", "forward", "output", "+inf", "float32")
ANOMALY_OF_ATTEMPT_4 = Anomaly(
    RunPosition(1, 4, 2, 2, "Net", 2, 2), 0, "fc", "Linear", "forward", "output", "nan", "float32"
)


def stored(node, kind) -> list:
    """Bodies of a kind that are in the run's store now."""
    try:
        store = RunStore(node.run_dir / "run.sqlite")
    except GpuwatchError:
        return []
    try:
        bodies = [body for _, _, body in store.messages()]
        return [body for body in bodies if isinstance(body, kind)]
    finally:
        store.close()


def fact_of(node, key) -> str | None:
    """A fact that is in the run's store now."""
    store = RunStore(node.run_dir / "run.sqlite")
    try:
        return store.get(key)
    finally:
        store.close()


def report_of(node) -> dict:
    return json.loads((node.run_dir / "report.json").read_text())


def kill(helper, signal_=signal.SIGKILL) -> None:
    """Its launch is its parent, and hears of its end."""
    psutil.Process(helper.pid).send_signal(signal_)


def test_an_undisturbed_job_is_clean(node):
    node.train(0, 1, 2)
    node.end_ranks()
    verdict = node.verdict()
    assert (verdict.exit_code, verdict.kind) == (0, "clean"), verdict.text
    assert node.said == node.stops == []


def test_an_agent_that_is_killed_is_started_again_and_nothing_is_lost_or_doubled(node):
    node.train(0, 1)
    node.ranks[1].writer.append(ANOMALY)
    until(lambda: any(isinstance(body.event, Anomaly) for body in stored(node, EventMessage)), "the anomaly")
    kill(node.agent)
    node.heard("the node agent has ended; it is started again")
    node.train(2)
    node.end_ranks()
    verdict = node.verdict()
    assert (verdict.exit_code, verdict.kind) == (4, "overflow"), verdict.text
    report = report_of(node)
    assert [entry["state"] for entry in report["nodes"]] == ["ok"]
    assert report["run"]["nnodes"] == 1
    assert [rank["exit"] for rank in report["ranks"]] == [0, 0]
    told = Counter((entry["rank"], entry["what"]) for entry in report["timeline"])
    assert set(told.values()) == {1}, told
    assert node.stops == []


@pytest.mark.slow
def test_a_collector_that_is_killed_is_started_again_with_what_it_had(node):
    node.train(0)
    until(lambda: stored(node, AgentHello), "the hello in the store")
    kill(node.collector)
    node.train(1)
    node.ranks[1].writer.append(ANOMALY)
    node.heard("it was started again and goes on with what it had received")
    node.end_ranks()
    verdict = node.verdict()
    assert (verdict.exit_code, verdict.kind) == (4, "overflow"), verdict.text
    assert report_of(node)["verdict"]["rank"] == 1
    assert node.stops == []


@pytest.mark.slow
def test_a_collector_that_is_killed_while_the_verdict_is_waited_for(node):
    node.train(0)
    kill(node.collector, signal.SIGSTOP)
    node.end_ranks()
    os.kill(node.collector.pid, signal.SIGKILL)
    verdict = node.verdict()
    assert (verdict.exit_code, verdict.kind) == (0, "clean"), verdict.text


@pytest.mark.slow
def test_a_collector_whose_store_was_lost_is_told_everything_again(node):
    """Also what no recorder holds any more: the attempts whose recorders were freed."""
    for attempt in range(1, 5):
        node.agent.send(WorkersEnded(attempt - 1, {rank.rank: 1 for rank in node.ranks}, [0]))
        for rank in node.ranks:
            rank.writer.close()
        node.ranks = [Rank(node.scratch, rank, 2, attempt) for rank in range(2)]
        node.agent.send(WorkersStarted(attempt, {0: 1, 1: 1}))
    until(lambda: not list(node.scratch.glob("*.attempt-001.recorder")), "the oldest recorders are freed")
    node.ranks[1].writer.append(ANOMALY_OF_ATTEMPT_4)
    until(lambda: any(isinstance(body.event, Anomaly) for body in stored(node, EventMessage)), "the anomaly")
    node.ranks[1].writer.append(BatchInputs(ANOMALY_OF_ATTEMPT_4.where, {"input[0]": "516d23b029490e8d"}))
    inputs = "what came after it: the anomaly was acknowledged before that was stored"
    until(lambda: any(isinstance(body.event, BatchInputs) for body in stored(node, EventMessage)), inputs)
    kill(node.collector, signal.SIGSTOP)
    for path in node.run_dir.glob("run.sqlite*"):
        path.unlink()
    kill(node.collector)
    node.heard("the collector has lost what it had received; this node sends it again")
    node.end_ranks(4)
    verdict = node.verdict()
    assert (verdict.exit_code, verdict.kind) == (4, "overflow"), verdict.text
    report = report_of(node)
    assert (report["verdict"]["rank"], report["verdict"]["attempt"]) == (1, 4)
    assert [attempt["attempt"] for attempt in report["attempts"]] == [0, 1, 2, 3]
    assert [entry["state"] for entry in report["nodes"]] == ["ok"]
    assert node.stops == []


@contextlib.contextmanager
def nothing_can_be_stored(node):
    """What is stored is acknowledged. The store is locked: its collector welcomes, and acknowledges nothing."""
    with contextlib.closing(sqlite3.connect(node.run_dir / "run.sqlite", isolation_level=None)) as store:
        store.execute("BEGIN IMMEDIATE")
        yield


@pytest.mark.slow
def test_a_verdict_waits_for_no_disk(node):
    """The store takes nothing from before the overflow until after the verdict so far; at the end it has all."""
    until(lambda: stored(node, NameDefinitions), "the names")
    with nothing_can_be_stored(node):
        node.train(0, 1, 2)
        node.ranks[1].writer.append(ANOMALY)
        log = node.run_dir / "logs" / "collector.log"
        until(lambda: "the verdict so far: supported: Rank 1 " in log.read_text(), "the verdict so far")
        assert not stored(node, EventMessage)
    node.end_ranks()
    verdict = node.verdict()
    assert (verdict.exit_code, verdict.kind) == (4, "overflow"), verdict.text
    assert any(isinstance(body.event, Anomaly) for body in stored(node, EventMessage))


@pytest.mark.slow
@pytest.mark.parametrize("is_acknowledged", [True, False], ids=["hello stored", "hello not stored"])
def test_an_agent_goes_to_no_other_run_than_its_own(make_node, is_acknowledged):
    """The head's launch was killed and the job started again there, on the same port, while this node lived on."""
    node = make_node()
    address = node.start_collector()
    with contextlib.nullcontext() if is_acknowledged else nothing_can_be_stored(node):
        node.start_agent(address)
        until(node.agent.welcomed.is_set, "the welcome")  # from then on the node belongs to that run
        if is_acknowledged:
            until(lambda: stored(node, AgentHello), "the hello")
        kill(node.collector, signal.SIGSTOP)
        gone = psutil.Process(node.collector.pid)
        node.collector.end(0.01)  # so that no other one is started in its place
        gone.kill()
        gone.wait(300.0)
    assert len(stored(node, AgentHello)) == is_acknowledged
    later = make_node()
    later.start_collector(address)
    node.train(0)
    node.end_ranks()
    node.heard("refuses this node: this is run")
    verdict = node.verdict()
    assert (verdict.exit_code, verdict.kind) == (6, "unknown"), verdict.text
    assert "this node's records are in" in verdict.text
    assert stored(later, AgentHello) == []


@pytest.mark.slow
def test_a_collector_that_is_killed_when_only_its_own_node_has_the_verdict(make_node):
    head, other = make_node(), make_node()
    address = head.start_collector()
    for number, node in enumerate((head, other)):
        node.start_agent(address, ranks=range(number, number + 1), nodes=2)
        node.train(0, 1)
    until(lambda: len(stored(head, AgentHello)) == 2, "both hellos")
    other.end_ranks()
    until(lambda: stored(head, NodeBye), "the other node's goodbye")
    kill(other.agent, signal.SIGSTOP)
    head.end_ranks()
    assert head.verdict().kind == "clean"
    until(lambda: fact_of(head, "left"), "the collector hears that it has left")
    with ThreadPoolExecutor() as launch:
        ended = None
        for _ in range(3):
            pid = head.collector.pid
            kill(head.collector)
            ended = ended or launch.submit(head.collector.end, 2 * VERDICT_PATIENCE_S)
            until(lambda pid=pid: head.collector.pid != pid, "another collector")
        kill(other.agent, signal.SIGCONT)
        ended.result()  # the verdict may have come from the first collector, and its thanks be lost: then it waits
    verdict = other.verdict()
    assert (verdict.exit_code, verdict.kind) == (0, "clean"), verdict.text


@pytest.mark.slow  # a collector that never came is given up after 15 s
@pytest.mark.sample(1, of="a collector that never came")
def test_without_any_collector_the_spools_make_the_very_report(make_node, tmp_path):
    """Two nodes; the address is of nobody."""
    nodes = [make_node(), make_node()]
    for number, node in enumerate(nodes):
        node.start_agent("tcp://127.0.0.1:9", ranks=range(number, number + 1), nodes=2)
        node.train(0, 1, 2)
    nodes[1].ranks[0].writer.append(ANOMALY)
    for node in nodes:
        node.end_ranks()
    verdicts = [node.verdict() for node in nodes]
    assert [verdict.exit_code for verdict in verdicts] == [6, 4], "what each node knows by itself"
    spools = sorted((tmp_path / "runs").glob("*.spool"))
    assert len(spools) == 2
    assert {spool.stat().st_mode & 0o777 for spool in spools} == {0o600}
    done = CliRunner().invoke(report_command, ["--merge", *map(str, spools), "--format", "json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["verdict"]["kind"], report["verdict"]["rank"], report["verdict"]["module"]) == ("overflow", 1, "fc")
    assert [rank["state"] for rank in report["ranks"]] == ["finished", "finished"]
    assert [[f["module"] for f in rank["frames"]] for rank in report["ranks"]] == [["fc"], ["fc"]], "with their names"
    assert [entry["state"] for entry in report["nodes"]] == ["ok", "ok"]


@pytest.mark.slow
@pytest.mark.sample(1, of="a collector that never came")
def test_a_clean_job_whose_collector_never_came_is_clean_once_its_spools_are_merged(make_node, tmp_path):
    node = make_node()
    node.start_agent("tcp://127.0.0.1:9")
    node.train(0, 1)
    node.end_ranks()
    assert node.verdict().exit_code == 6
    (spool,) = (tmp_path / "runs").glob("*.spool")
    report = json.loads(CliRunner().invoke(report_command, [str(spool), "--format", "json"]).stdout)
    assert (report["verdict"]["kind"], report["verdict"]["certainty"]) == ("clean", "established")


@pytest.mark.slow
def test_recorders_of_old_attempts_are_freed_and_the_last_ones_kept(node):
    attempts = 13
    for attempt in range(1, attempts):
        node.agent.send(WorkersEnded(attempt - 1, {rank.rank: 1 for rank in node.ranks}, [0]))
        for rank in node.ranks:
            rank.writer.close()
        node.ranks = [Rank(node.scratch, rank, 2, attempt) for rank in range(2)]
        node.agent.send(WorkersStarted(attempt, {0: 1, 1: 1}))
    node.train(0)
    left = [f"rank-0000{rank}.attempt-0{attempt}.recorder" for rank in range(2) for attempt in (10, 11, 12)]
    until(lambda: sorted(path.name for path in node.scratch.glob("*.recorder")) == left, f"{left} alone")
    kill(node.agent)
    node.heard("started again")
    node.end_ranks(attempts - 1)
    verdict = node.verdict()
    assert (verdict.exit_code, verdict.kind) == (0, "clean"), verdict.text


@pytest.mark.slow
def test_an_agent_does_not_die_of_a_recorder_that_is_cut_short(node):
    node.train(0, 1)
    until(lambda: stored(node, NameDefinitions), "the names in the store")
    broken = node.ranks.pop()
    broken.writer.close()
    os.truncate(broken.writer.path, 5000)  # its own rank would be killed by SIGBUS
    node.train(2)
    node.ranks[0].finish()
    node.agent.send(WorkersEnded(0, {0: -signal.SIGTERM, 1: -signal.SIGBUS}, [1]))
    node.agent.send(LaunchDone("failed"))
    verdict = node.verdict()
    assert (verdict.exit_code, verdict.kind) == (5, "lost"), verdict.text
    assert report_of(node)["verdict"]["rank"] == 1
    assert report_of(node)["ranks"][0]["batch"] == 2
    assert node.said == [], "nobody had to be started again"


# -- a full disk --------------------------------------------------------------------------------------------------


def chatter(rank, number: int) -> None:
    """A kilobyte of events."""
    place = RunPosition(rank.rank, 0, number, number, "Net", number, number)
    rank.writer.append(
        RangeWarning(place, "near overflow", f"module {number} {'x' * 1000}", "Linear", "forward", "output", "float16")
    )


@pytest.mark.slow
def test_an_overflow_on_a_full_runs_folder_is_told_and_its_store_is_kept_elsewhere(small_disk, make_node):
    node = make_node(small_disk / "runs")
    node.start_agent(node.start_collector())
    for number in range(500):
        chatter(node.ranks[number % 2], number)
    node.heard("it continues in")
    node.ranks[1].batch(2)
    node.ranks[1].writer.append(ANOMALY)
    node.end_ranks()
    verdict = node.verdict()
    assert (verdict.exit_code, verdict.kind) == (4, "overflow"), verdict.text
    node.collector.end(WAIT_S)  # as the launch does: until then it may move what it writes
    rescued = keep_rescued(node.scratch)
    assert rescued is not None
    try:
        kept = sorted(path.name for path in rescued.iterdir())
        assert "run.sqlite" in kept
        done = CliRunner().invoke(report_command, ["--merge", str(node.run_dir), str(rescued), "--format", "json"])
        assert json.loads(done.stdout)["verdict"]["module"] == "fc"
    finally:
        shutil.rmtree(rescued)


@pytest.mark.slow
def test_with_no_room_anywhere_nothing_is_acknowledged_that_cannot_be_read_and_the_verdict_stands(
    small_disk, make_node, tmp_path, monkeypatch
):
    """What is in memory only is in the report, too; and is not acknowledged, so the agents keep it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    node = make_node(small_disk / "runs")
    (node.scratch / "rescued").write_text("in the way")
    node.start_agent(node.start_collector())
    for number in range(500):
        chatter(node.ranks[number % 2], number)
    node.heard("cannot be written")
    node.ranks[1].writer.append(ANOMALY)
    node.end_ranks()
    verdict = node.verdict()
    assert (verdict.exit_code, verdict.kind) == (4, "overflow"), verdict.text
    assert len(stored(node, EventMessage)) < 500
    assert not (node.run_dir / "report.json").exists()
    assert json.loads(Path(verdict.report).read_text())["verdict"]["kind"] == "overflow", "in a temporary folder"


@pytest.mark.slow
def test_a_collector_that_is_killed_while_its_disk_is_full_still_knows_what_it_had_acknowledged(small_disk, make_node):
    node = make_node(small_disk / "runs")
    node.start_agent(node.start_collector())
    node.train(0)
    node.ranks[1].writer.append(ANOMALY)
    until(lambda: any(isinstance(body.event, Anomaly) for body in stored(node, EventMessage)), "the anomaly")
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        while filler.write(bytes(1024)):
            pass
    kill(node.collector)
    node.heard("it was started again and goes on with what it had received")
    node.train(1)
    node.end_ranks()
    verdict = node.verdict()
    assert (verdict.exit_code, verdict.kind) == (4, "overflow"), verdict.text
    assert "rank 1" in verdict.text
    assert "`fc`" in verdict.text


# -- helpers that are stopped -------------------------------------------------------------------------------------

LONGER_THAN_ANY_PATIENCE_S = 32.0


@pytest.mark.slow  # longer than the longest silence that used to end a job
@pytest.mark.sample(1, of="a helper that is stopped for long")
def test_an_agent_that_is_stopped_for_long_ends_nobodys_job(make_node):
    head, other = make_node(), make_node()
    address = head.start_collector()
    for number, node in enumerate((head, other)):
        node.start_agent(address, ranks=range(number, number + 1), nodes=2)
        node.train(0, 1)
    until(lambda: len(stored(head, AgentHello)) == 2, "both hellos")
    kill(other.agent, signal.SIGSTOP)
    time.sleep(LONGER_THAN_ANY_PATIENCE_S)
    kill(other.agent, signal.SIGCONT)
    for node in (head, other):
        node.end_ranks()
    verdicts = [node.verdict() for node in (head, other)]
    assert [(verdict.exit_code, verdict.kind) for verdict in verdicts] == [(0, "clean")] * 2, verdicts[0].text
    assert head.stops == other.stops == []


@pytest.mark.slow
@pytest.mark.sample(1, of="a helper that is stopped for long")
def test_a_collector_that_is_stopped_for_long_counts_nobodys_silence(node):
    node.train(0, 1)
    until(lambda: stored(node, AgentHello), "the hello")
    kill(node.collector, signal.SIGSTOP)
    node.end_ranks()
    time.sleep(LONGER_THAN_ANY_PATIENCE_S)
    kill(node.collector, signal.SIGCONT)
    verdict = node.verdict()
    assert (verdict.exit_code, verdict.kind) == (0, "clean"), verdict.text
    assert [entry["state"] for entry in report_of(node)["nodes"]] == ["ok"]
