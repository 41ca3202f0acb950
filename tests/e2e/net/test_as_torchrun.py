"""Two nodes and a fault, under torchrun alone and under gpuwatch: what torchrun survives, gpuwatch survives, with the
same losses to the last digit; where torchrun ends, gpuwatch ends.

The seconds are printed and not asserted.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
from gpuwatch.core.recorder.run_folder import remove_stale

from ...waiting import until

pytestmark = pytest.mark.slow

PORT, COLLECTOR_PORT = 29400, 29401
STEPS, PACE_S = 160, 0.05
SHORT_S, LONG_S, LATE_S = 8.0, 25.0, 30.0
"""How long a fault lasts: less than any timeout; more than what makes an agent count as lost; until the second node
comes, when the first has said for whom it waits."""
GROUP_TIMEOUT_S = 60
WITHIN_S = 600
CLEAN, LOST, UNKNOWN = 0, 5, 6
COMMANDS = {
    "torchrun": ("torch.distributed.run",),
    "gpuwatch": ("gpuwatch.cli.main", "launch", "--preflight", "off"),
}

CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    const char *off = getenv("CLOCK_OFF_S");
    if (!failed && clock == CLOCK_REALTIME && off) now->tv_sec += atoi(off);
    return failed;
}

time_t time(time_t *where) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where) *where = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *restrict where, void *restrict zone) {
    (void)zone;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    where->tv_sec = now.tv_sec;
    where->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""
"""Namespaces of time have no clock of the day: the C library's functions add seconds to it."""


class TwoNodes:
    """One job of two ranks, one on each node, under one of the commands: in a folder of its own."""

    def __init__(self, bench, network, command):
        self.bench, self.network, self.command = bench, network, command
        self.head, self.other = network.nodes
        self.folder = bench.cwd / command
        self.folder.mkdir()
        self._processes = {}
        self._hurt_at = None

    def start(self, node, nnodes=2, **environment):
        where = ["--nnodes", str(nnodes), "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "a job"]
        where += ["--rdzv-endpoint", f"{self.head.address}:{PORT}"]
        plan = ["--steps", str(STEPS), "--pace", str(PACE_S), "--group-timeout", str(GROUP_TIMEOUT_S)]
        with self._said(node).open("w") as said:
            self._processes[node] = subprocess.Popen(
                node.inside(
                    [sys.executable, "-m", *COMMANDS[self.command], *where, self.bench.script("chaos.py"), *plan]
                ),
                cwd=self.folder,
                env={**self.bench.environment, "GPUWATCH_SECRET": "a secret that is long enough", **environment},
                stdout=said,
                stderr=said,
            )
        self.bench.started.append(self._processes[node])

    def start_both(self):
        """Returns once both ranks train."""
        for node in self.network.nodes:
            self.start(node)
        until(lambda: self._alive() and all(len(self.losses(rank)) > 5 for rank in (0, 1)), "training", self.told)

    def losses(self, rank):
        """A line for each batch that this rank has trained."""
        with suppress(FileNotFoundError):
            return (self.folder / f"losses-{rank}").read_text().splitlines()
        return []

    def hurts(self):
        """The fault is there: from here on it takes as long as it takes."""
        self._hurt_at = time.monotonic()

    def process(self, node, word):
        """The one process of this node with this word on its command line. None: torchrun has none."""
        here = set(node.pids())
        found = [process for process in self.bench.running(word) if process.pid in here]
        assert len(found) == (self.command == "gpuwatch"), found
        return found[0] if found else None

    def rank(self, node):
        here = set(node.pids())
        (found,) = [process for process in self.bench.processes() if process.pid in here and is_rank(process)]
        return found

    def launch(self, node):
        return psutil.Process(self._processes[node].pid)

    def kill(self, node):
        """All that runs there."""
        for pid in node.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self, *nodes):
        """Exit codes of the commands on these nodes."""
        codes = [self._end(node) for node in nodes]
        since = time.monotonic() - self._hurt_at if self._hurt_at is not None else 0.0
        print(f"{self.command}: ended with {codes}, {since:.1f} s after the fault")
        print(self.told())
        return codes

    def told(self):
        return "\n\n".join(self._said(node).read_text() for node in self._processes)

    def _end(self, node):
        until(lambda: self._processes[node].poll() is not None, f"the end on {node.host}", self.told, WITHIN_S)
        return self._processes[node].returncode

    def _alive(self):
        assert [process.poll() for process in self._processes.values()] == [None, None], self.told()
        return True

    def _said(self, node):
        return self.folder / f"said-{node.host}"


def is_rank(process):
    with suppress(psutil.Error):
        return "RANK" in process.environ() and process.status() != psutil.STATUS_ZOMBIE
    return False


def frozen(process, seconds):
    """None: the command has no such process, and nothing happens."""
    if process is not None:
        process.suspend()
        time.sleep(seconds)
        process.resume()


def nothing(nodes):
    nodes.start_both()


def the_link_is_down_for_a_while(nodes):
    nodes.start_both()
    nodes.network.cut_off(nodes.other)
    time.sleep(SHORT_S)
    nodes.network.restore()


def the_collectors_port_is_blocked(nodes):
    nodes.network.block(nodes.head, nodes.other, COLLECTOR_PORT)
    nodes.start_both()


def the_second_node_comes_late(nodes):
    nodes.start(nodes.head)
    time.sleep(LATE_S)
    nodes.start(nodes.other)


def the_first_node_comes_late(nodes):
    """It is the one with the rendezvous and the collector."""
    nodes.start(nodes.other)
    time.sleep(LATE_S)
    nodes.start(nodes.head)


def a_clock_is_ten_seconds_off(nodes):
    """All clocks that count from 1970, for all that runs on that node."""
    library = nodes.folder / "clock.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), "-x", "c", "-", "-ldl"]
    subprocess.run(command, input=CLOCK, text=True, check=True)
    nodes.start(nodes.head)
    nodes.start(nodes.other, LD_PRELOAD=str(library), CLOCK_OFF_S="10")


def a_rank_is_frozen(nodes):
    nodes.start_both()
    frozen(nodes.rank(nodes.other), SHORT_S)


def a_launch_is_frozen(nodes):
    nodes.start_both()
    frozen(nodes.launch(nodes.other), SHORT_S)


def an_agent_is_frozen(nodes):
    nodes.start_both()
    frozen(nodes.process(nodes.other, "gpuwatch.launcher.agent.agent"), LONG_S)


def an_agent_is_killed(nodes):
    """Its launch holds its connection, and starts another."""
    nodes.start_both()
    agent = nodes.process(nodes.other, "gpuwatch.launcher.agent.agent")
    if agent is not None:
        agent.kill()


def the_collector_is_frozen(nodes):
    nodes.start_both()
    frozen(nodes.process(nodes.head, "gpuwatch.collector"), LONG_S)


SURVIVED = [
    nothing,
    the_link_is_down_for_a_while,
    the_collectors_port_is_blocked,
    the_second_node_comes_late,
    the_first_node_comes_late,
    a_clock_is_ten_seconds_off,
    a_rank_is_frozen,
    a_launch_is_frozen,
    an_agent_is_frozen,
    an_agent_is_killed,
    the_collector_is_frozen,
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("fault", SURVIVED, ids=lambda fault: fault.__name__)
def test_what_torchrun_survives_gpuwatch_survives(bench, network, fault):
    net = network(2)
    plain, watched = (TwoNodes(bench, net, command) for command in COMMANDS)
    codes = []
    for nodes in (plain, watched):
        fault(nodes)
        nodes.hurts()
        codes.append(nodes.end(*net.nodes))
        net.restore()

    good = UNKNOWN if fault is the_collectors_port_is_blocked else CLEAN  # a node that is not heard is not proven clean
    assert codes == [[0, 0], [good, good]]
    for rank in (0, 1):
        assert watched.losses(rank) == plain.losses(rank), f"rank {rank}"
        assert len(plain.losses(rank)) == STEPS
    if fault is a_clock_is_ten_seconds_off:
        assert f"the clock of {watched.other.host} is +" in watched.told(), "it was not changed"


def a_node_is_killed(nodes):
    nodes.start_both()
    nodes.kill(nodes.other)


def the_link_is_down_for_good(nodes):
    nodes.start_both()
    nodes.network.cut_off(nodes.other)


@pytest.mark.sample(1)
@pytest.mark.parametrize("fault", [a_node_is_killed, the_link_is_down_for_good], ids=lambda fault: fault.__name__)
def test_where_torchrun_ends_gpuwatch_ends_and_names_the_node(bench, network, fault):
    net = network(2)
    plain, watched = (TwoNodes(bench, net, command) for command in COMMANDS)
    codes = []
    for nodes in (plain, watched):
        fault(nodes)
        nodes.hurts()
        codes += nodes.end(nodes.head)
        nodes.kill(nodes.other)  # by itself it may wait for its rendezvous
        nodes.end(nodes.other)
        net.restore()
    remove_stale()  # as the next launch on that node does

    assert codes == [1, LOST]
    verdict = json.loads((watched.folder / "gpuwatch-runs" / "latest" / "report.json").read_text())["verdict"]
    assert (verdict["kind"], verdict["host"], verdict["rank"]) == ("lost", watched.other.host, 1)
    assert ("ended without a word" in verdict["statement"]) == (fault is a_node_is_killed)
    for rank in (0, 1):
        both = min(len(nodes.losses(rank)) for nodes in (plain, watched))
        assert both > 0
        assert watched.losses(rank)[:both] == plain.losses(rank)[:both], f"rank {rank}"
