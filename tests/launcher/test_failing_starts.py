"""A launch that has no descriptor left for its helpers: the job goes on, and a helper is started once there is one."""

from __future__ import annotations

import os
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue
from threading import Event, Thread

import pytest
from gpuwatch.core.events.alarms import Anomaly
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.wire.messages import AgentHello
from gpuwatch.core.wire.pipe import AgentConfig, CollectorConfig
from gpuwatch.launcher.agent.process_ends import where_it_is
from gpuwatch.launcher.head_collector import HeadCollector, give_up_silent
from gpuwatch.launcher.helper_processes import HelperProcess, NodeAgent

from . import conftest

ANOMALY = Anomaly(RunPosition(1, 0, 2, 2, "Net", 2, 2), 0, "fc", "Linear", "forward", "output", "+inf", "float32")


@contextmanager
def no_descriptor() -> Iterator[None]:
    """Nothing can be opened in this process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with pytest.raises(OSError):
            os.pipe()
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def starved(*arguments) -> NodeAgent:
    with no_descriptor():
        return NodeAgent(*arguments)


@pytest.mark.slow
def test_an_agent_that_cannot_be_started_is_started_later_and_hears_all_that_was_told(make_node, monkeypatch):
    monkeypatch.setattr(conftest, "NodeAgent", starved)
    node = make_node()
    node.start_agent(node.start_collector())
    node.heard("the node agent could not be started: [Errno 24]")
    node.train(0, 1)
    node.end_ranks()
    verdict = node.verdict()
    assert (verdict.exit_code, verdict.kind) == (0, "clean"), verdict.text


def test_a_collector_that_cannot_be_started_answers_nothing_and_has_nothing_to_end(tmp_path):
    said: list[str] = []
    with no_descriptor():
        collector = HeadCollector(CollectorConfig("", "", "", "", "", str(tmp_path), "job"), said.append, print)
    assert collector.answer is None
    assert said == ["the collector could not be started: [Errno 24] Too many open files: '/dev/null' [GW602]"]
    collector.end(30.0)


def test_without_a_collector_the_agent_waits_for_none_and_keeps_what_it_has_seen(make_node):
    node = make_node()
    node.start_agent("")
    node.train(0, 1)
    node.end_ranks()
    verdict = node.verdict()
    assert (verdict.exit_code, verdict.kind) == (6, "unknown")
    (spool,) = node.runs.glob("*.spool")
    assert f"no collector could be started; this node's records are in {spool}" in verdict.text
    assert where_it_is(verdict) == "the report lacks this overflow: its event was lost in transit"


def test_an_overflow_that_only_a_spool_has_is_told_with_the_command_that_makes_its_report(make_node):
    node = make_node()
    node.start_agent("")
    node.train(0, 1)
    node.ranks[1].writer.append(ANOMALY)
    node.end_ranks()
    told = where_it_is(node.verdict())

    before, _, command = told.partition(": ")
    assert before == "no report shows it yet; make one from this node's spool with"
    program, *arguments = shlex.split(command)
    made = subprocess.run(
        [sys.executable, "-m", "gpuwatch.cli.main", *arguments], capture_output=True, text=True, check=False
    )
    assert program == "gpuwatch"
    assert "VERDICT  overflow" in made.stdout, made
    assert "`fc` (Linear)" in made.stdout


def test_a_helper_that_cannot_be_told_its_settings_is_ended(monkeypatch):
    monkeypatch.setattr("gpuwatch.launcher.helper_processes.write_line", lambda pipe, message: False)
    config = AgentConfig("", "", "", "", "", "", AgentHello("", "", 1, 1, 1, [], {}, "job"))
    child = HelperProcess("launcher.agent.agent", config)
    assert child.stdout.read() == b""
    assert child.end(30.0) == -9


@pytest.mark.slow
@pytest.mark.sample(1, of="helpers that die at once")
def test_a_collector_that_dies_before_its_first_word_is_started_again(make_node, monkeypatch):
    lives: list[HelperProcess] = []

    class DiesOnce(HelperProcess):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            if arguments[0] == "collector":  # the agent is such a child, too
                lives.append(self)
                if len(lives) == 1:
                    self.kill()

    monkeypatch.setattr("gpuwatch.launcher.helper_processes.HelperProcess", DiesOnce)
    node = make_node()
    node.start_agent(node.start_collector())
    node.train(0)
    node.end_ranks()
    assert node.verdict().kind == "clean"
    assert len(lives) == 2


@pytest.mark.slow
@pytest.mark.parametrize("does", ["works", "sleeps"])
def test_a_silent_collector_is_given_up_unless_it_works(monkeypatch, does):
    """Its imports take long where many processes start at once: at a load of 20 it was given up, and there was no
    report."""
    monkeypatch.setattr("gpuwatch.launcher.head_collector._FIRST_WORD_S", 2.0)
    monkeypatch.setattr("gpuwatch.launcher.head_collector._STILL_S", 2.0)
    code = {"works": "while True: pass", "sleeps": "import time; print(flush=True); time.sleep(900)"}[does]
    child, has_spoken, said = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE), Event(), Queue()
    if does == "sleeps":
        child.stdout.readline()  # it has started
    watch = Thread(target=give_up_silent, args=(child, has_spoken, said.put))
    watch.start()
    try:
        if does == "sleeps":
            assert child.wait(300) == -signal.SIGKILL
            assert said.empty()
        else:
            assert "the launch waits for it" in said.get(timeout=300)
            has_spoken.set()
            watch.join()
            assert child.poll() is None
    finally:
        has_spoken.set()
        watch.join()
        child.kill()
        child.communicate()


@pytest.mark.slow
@pytest.mark.sample(1, of="a collector that says nothing more")
def test_a_collector_that_was_killed_and_says_nothing_when_it_is_started_again_is_not_tried_for_ever(
    make_node, monkeypatch
):
    lives: list[HelperProcess] = []

    class SaysNothingAgain(HelperProcess):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            if arguments[0] == "collector":
                lives.append(self)
                if len(lives) > 1:
                    os.kill(self.pid, signal.SIGSTOP)

    monkeypatch.setattr("gpuwatch.launcher.helper_processes.HelperProcess", SaysNothingAgain)
    monkeypatch.setattr("gpuwatch.launcher.helper_processes.LIVED_S", 0.1)  # one that was waited for has lived long
    node = make_node()
    node.start_collector()
    monkeypatch.setattr("gpuwatch.launcher.head_collector._FIRST_WORD_S", 0.5)
    monkeypatch.setattr("gpuwatch.launcher.head_collector._STILL_S", 1.0)
    node.collector._ending.set()
    lives[0].kill()
    node.collector.end(30.0)
    node.collector = None  # it has ended
    assert len(lives) == 2


@pytest.mark.slow
@pytest.mark.sample(1, of="an agent that does not answer")
def test_an_agent_that_does_not_answer_at_the_end_is_ended_and_the_next_one_has_the_verdict(make_node, monkeypatch):
    monkeypatch.setattr("gpuwatch.launcher.helper_processes.SILENT_S", 8.0)  # one that is alive says so every 5 s
    node = make_node()
    node.start_agent(node.start_collector())
    node.train(0, 1)
    os.kill(node.agent.pid, signal.SIGSTOP)
    node.end_ranks()
    verdict = node.verdict()
    assert (verdict.exit_code, verdict.kind) == (0, "clean"), verdict.text
    assert node.said.count("the node agent does not answer [GW603]") == 1
