"""The link between two nodes is cut in the middle of the training: for a while, or for good."""

import errno
import os
import signal
import subprocess
import sys

import pytest
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.store import RunStore
from gpuwatch.core.recorder.run_folder import remove_stale

from ...waiting import until

pytestmark = pytest.mark.slow

COLLECTOR_PORT = 29401
WITHIN_S = 600
OVERFLOW, LOST = 4, 5
GREETING = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60) as there:
    there.sendall(bytes([0xFF, *[0] * 7, 1, 0x7F, 3, 1]) + b"CURVE".ljust(20, b"\\0") + bytes(32))
    answer = b""
    while len(answer) < 64:
        answer += there.recv(64 - len(answer))
print(answer[12:32].rstrip(b"\\0").decode())
"""
"""Says hello as ZeroMQ does, and prints which kind of security the other side has."""


SECURITY = "CURVE"
BATCHES = range(9)


class Training:
    """gated.py on two nodes, with a gate before and one after the batches in its middle, which need no other node."""

    def __init__(self, job):
        self.job = job
        self.nodes = job.network.nodes
        self._gates = {
            where: [job.bench.cwd / f"{where}-{node.number}" for node in self.nodes] for where in ("before", "after")
        }
        for gate in (*self._gates["before"], *self._gates["after"]):
            os.mkfifo(gate)

    def start(self, *options, **environment):
        for node, *gates in zip(self.nodes, self._gates["before"], self._gates["after"], strict=True):
            variables = {"GATES": os.pathsep.join(map(str, gates)), "GPUWATCH_SECRET": "a secret that is long enough"}
            self.job.start(
                node, "launch", "--preflight", "off", *options, script="gated.py", **variables, **environment
            )

    def reached(self, where):
        """Returns once both ranks stand there: a pipe can be opened for writing only when somebody reads."""
        self._held = []
        for node in self.nodes:
            self._held.append(self.gate(where, node))

    def gate(self, where, node):
        """The gate of one node, once its rank stands there: closing it lets the rank go on."""
        path, held = self._gates[where][node.number], []
        until(lambda: self._hold(path, held), f"a rank opens {path.name}")
        return held[0]

    def _hold(self, gate, held):
        assert [process.poll() for process in self.job.processes.values()] == [None, None], "a launch has ended"
        try:
            held.append(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
        except OSError as error:
            assert error.errno == errno.ENXIO  # nobody reads yet
            return False
        return True

    def go_on(self):
        for gate in self._held:
            os.close(gate)


@pytest.fixture
def training(job):
    return Training(job(2))


def has_connection(node):
    """Whether its agent is connected to the collector, as far as this node knows."""
    listed = subprocess.run(
        node.inside(["ss", "--no-header", "--tcp", "state", "established", f"dport = :{COLLECTOR_PORT}"]),
        capture_output=True,
        text=True,
        check=True,
    )
    return bool(listed.stdout.strip())


def tries_of(node):
    """The ports from which it has asked for a connection with the collector, and has not been answered."""
    listed = subprocess.run(
        node.inside(["ss", "--no-header", "--tcp", "--numeric", "state", "syn-sent", f"dport = :{COLLECTOR_PORT}"]),
        capture_output=True,
        text=True,
        check=True,
    )
    return {line.split()[2] for line in listed.stdout.splitlines()}


def security_of_the_collector(training):
    head, other = training.nodes
    command = other.inside([sys.executable, "-c", GREETING, head.address, str(COLLECTOR_PORT)])
    return subprocess.run(command, capture_output=True, text=True, timeout=300).stdout.strip()


def test_what_happens_while_the_link_is_cut_is_in_the_report_once_it_is_back(training):
    other = training.nodes[1]
    options = ("--on-overflow", "continue", "--trace-batches", ",".join(map(str, BATCHES)))
    training.start(*options, OVERFLOWS="1")
    training.reached("before")
    assert security_of_the_collector(training) == SECURITY
    assert has_connection(other)
    training.job.network.cut_off(other)
    training.go_on()
    training.reached("after")
    until(lambda: not has_connection(other), "the agent gives its connection up")
    tried = set()

    def tries_anew():
        tried.update(tries_of(other))
        return len(tried) > 1

    until(tries_anew, "it tries anew, and does not wait for TCP's own tries, which come ever later", 90)
    training.job.network.restore()
    training.go_on()
    runs = training.job.finish(WITHIN_S)

    assert [run.code for run in runs] == [OVERFLOW, OVERFLOW]
    verdict = runs[0].verdict
    assert (verdict["kind"], verdict["rank"], verdict["host"]) == ("overflow", 1, other.host)
    assert (verdict["module"], verdict["batch"]) == ("widen", 4)
    assert [node["state"] for node in runs[0].report["nodes"]] == ["ok", "ok"]
    assert all(set(rank["lost"].values()) == {0} for rank in runs[0].report["ranks"])
    store = RunStore(runs[0].cwd / "gpuwatch-runs" / "latest" / "run.sqlite")
    messages = list(store.messages())
    store.close()
    for agent in {agent for agent, _, _ in messages}:
        numbers = [number for sender, number, _ in messages if sender == agent and number]
        assert numbers == list(range(1, len(numbers) + 1))
    facts = fold(messages)
    for rank in (0, 1):
        assert {page.batch for page in facts.ranks[0, rank].pages.values()} == set(BATCHES)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 11))
def test_a_link_that_swallows_what_the_ranks_send_is_a_hang_without_a_culprit(training, seed):
    """All have reached the collective, and the agents are heard: nobody can tell at which end it is."""
    head, other = training.nodes if seed % 2 else reversed(training.nodes)
    training.start("--hang-timeout", "30", "--on-hang", "abort")
    training.reached("before")
    training.go_on()
    training.reached("after")
    training.job.network.drop(head, other, f"{COLLECTOR_PORT - 1}-{COLLECTOR_PORT}")
    training.go_on()
    run, _ = training.job.finish(WITHIN_S)

    verdict = run.verdict
    assert (run.code, verdict["kind"], verdict["rank"], verdict["certainty"]) == (5, "hang", None, "unknown")
    assert "lost" not in {node["state"] for node in run.report["nodes"]}
    assert any("gpuwatch check" in advice for advice in verdict["next"])


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 11))
def test_whichever_node_is_cut_off_is_lost(training, seed):
    the_node_is_cut_off(training, 20 + seed)


def test_a_node_that_is_cut_off_for_good_is_lost_and_nobody_else_is_blamed(training):
    """Its silence alone ends nothing: the script's own process group does, when its time is over."""
    the_node_is_cut_off(training, 30)


def stop(node):
    """All that runs there stands still, as on a node that hangs: its connections stay open."""
    for pid in node.pids():
        os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize("before_init", [{}, {"GATE_BEFORE_INIT": "1"}])
def test_a_node_that_stands_still_is_lost_and_told_while_the_others_wait(training, before_init):
    head, other = training.nodes
    training.start(GROUP_TIMEOUT_S="90", **before_init)
    training.reached("before")
    stop(other)
    training.go_on()
    if not before_init:
        gate = training.gate("after", head)
        os.close(gate)
    run = the_node_is_lost(training)

    assert f"Node {other.host} (rank 1) has been silent for " in run.stderr


def the_node_is_cut_off(training, group_timeout_s):
    training.start(GROUP_TIMEOUT_S=str(group_timeout_s))
    training.reached("before")
    training.job.network.cut_off(training.nodes[1])
    training.go_on()
    training.reached("after")
    training.go_on()
    the_node_is_lost(training)


def the_node_is_lost(training):
    head, other = training.nodes
    bench, processes = training.job.bench, training.job.processes
    run = bench.finish(processes[head])

    assert run.code == LOST
    verdict = run.verdict
    assert (verdict["kind"], verdict["host"], verdict["rank"]) == ("lost", other.host, 1)
    assert "or the link to it" in verdict["statement"]
    assert {node["host"]: node["state"] for node in run.report["nodes"]}[other.host] == "lost"

    for pid in other.pids():  # by itself it waits for its peer as long as under torchrun: half an hour
        os.kill(pid, signal.SIGKILL)
    processes[other].communicate()
    remove_stale()  # as the next launch on that node does
    return run
