"""The harness itself: what the other tests here believe of it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from network import Network, can_delay, name_of_this_process, take_down, take_down_stale

pytestmark = [pytest.mark.slow, pytest.mark.sample(4, of="the network that the tests make")]

CONNECT = """
import socket, sys, time
began = time.monotonic()
try:
    with socket.create_connection((sys.argv[1], 7), timeout=2) as there:
        there.settimeout(300)
        there.sendall(bytes(int(sys.argv[2])))
        there.shutdown(socket.SHUT_WR)
        while there.recv(1 << 16):
            pass
    print("reached", time.monotonic() - began)
except OSError as error:
    print("lost", error)
"""
ECHO = """
import socketserver
class Sink(socketserver.BaseRequestHandler):
    def handle(self):
        while self.request.recv(1 << 16):
            pass
socketserver.ThreadingTCPServer.allow_reuse_address = True
with socketserver.ThreadingTCPServer(("", 7), Sink) as server:
    print("ready", flush=True)
    server.serve_forever()
"""


@pytest.fixture
def three(network):
    """Three nodes, each with a server."""
    net = network(3)
    servers = []
    for node in net.nodes:
        command = node.inside([sys.executable, "-c", ECHO])
        servers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert servers[-1].stdout.readline() == "ready\n"
    yield net
    for server in servers:
        server.kill()
        server.communicate()


def run(node, *command):
    return subprocess.run(node.inside(list(command)), capture_output=True, text=True, timeout=300).stdout.strip()


def reach(a, b, size=0):
    return run(a, sys.executable, "-c", CONNECT, b.address, str(size))


def reached(a, b):
    return reach(a, b).startswith("reached")


def seconds(a, b, size):
    word, _, took = reach(a, b, size).partition(" ")
    assert word == "reached"
    return float(took)


def namespaces_of(name):
    """Others may come and go meanwhile: networks of tests that run beside this one."""
    listed = subprocess.check_output(["ip", "netns", "list"], text=True).splitlines()
    return {line.split()[0] for line in listed if line.startswith(f"{name}-")}


def test_each_node_has_its_own_name_and_address_and_they_reach_each_other(three):
    for node in three.nodes:
        assert run(node, "hostname") == node.host
        assert f"{node.address}/24" in run(node, "ip", "-brief", "address", "show", "eth0")
        assert run(node, "getent", "hosts", "node-2").split() == ["10.213.78.3", "node-2"]
    assert all(reached(a, b) for a in three.nodes for b in three.nodes)
    assert os.uname().nodename != "node-0"


def test_packets_are_dropped_between_two_only_until_it_is_restored(three):
    a, b, c = three.nodes
    three.drop(a, b)

    assert not reached(a, b)
    assert not reached(b, a)
    assert reached(a, c)
    assert reached(c, b)
    three.restore()
    assert reached(a, b)


def test_a_firewall_can_let_some_ports_pass(three):
    a, b, _ = three.nodes
    three.drop(a, b, but="7-8")

    assert reached(a, b)
    three.drop(a, b, but="8-9")
    assert not reached(a, b)


def test_a_node_that_is_cut_off_reaches_nobody_until_it_is_restored(three):
    a, b, c = three.nodes
    three.cut_off(b)

    assert not reached(a, b)
    assert not reached(b, c)
    assert reached(b, b)
    assert reached(a, c)
    three.restore()
    assert reached(a, b)


def test_a_link_is_slow_for_these_two_only_until_it_is_restored(three):
    a, b, c = three.nodes
    three.slow(a, b, rate="1mbit")
    three.slow(a, c, rate="5gbit")
    size = 600_000
    at_that_rate = 0.8 * size * 8 / 1e6  # seconds

    slowed = min(seconds(a, b, size), seconds(b, a, size))
    assert slowed > at_that_rate
    assert seconds(a, c, size) < slowed
    assert seconds(b, c, size) < slowed
    three.restore()
    assert seconds(a, b, size) < slowed


def test_a_link_can_be_late(three):
    if not can_delay():
        pytest.skip("this kernel has no netem")
    a, b, _ = three.nodes
    three.slow(a, b, delay="100ms")

    assert seconds(a, b, 0) > 0.2


def test_up_and_down_can_be_said_twice(tmp_path, namespaces):
    net = Network(name_of_this_process(), 2, tmp_path)
    net.up()
    there = namespaces_of(net.name)
    net.up()
    assert namespaces_of(net.name) == there == {f"{net.name}-switch", f"{net.name}-0", f"{net.name}-1"}

    net.down()
    net.down()
    assert namespaces_of(net.name) == set()


def test_down_ends_what_runs_in_it(tmp_path, namespaces):
    net = Network(name_of_this_process(), 2, tmp_path)
    net.up()
    sleeper = subprocess.Popen(net.nodes[1].inside(["sleep", "6000"]))
    while sleeper.pid not in net.nodes[1].pids():
        time.sleep(0.01)
    take_down(net.name)

    assert sleeper.wait(300) == -9


def test_what_a_crashed_process_has_left_is_taken_down(tmp_path, namespaces):
    code = (
        f"import sys, os, pathlib; sys.path.insert(0, {str(Path(__file__).parent)!r}); import network\n"
        f"name = network.name_of_this_process(); print(name, flush=True)\n"
        f"network.Network(name, 2, pathlib.Path({str(tmp_path)!r})).up(); os.kill(os.getpid(), 19); os._exit(9)"
    )
    crashing = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    name = crashing.stdout.readline().strip()
    os.waitpid(crashing.pid, os.WUNTRACED)  # it stops once its network is up, so that nobody takes it down as stale
    assert len(namespaces_of(name)) == 3
    crashing.kill()
    crashing.communicate()

    take_down_stale()
    assert namespaces_of(name) == set()
