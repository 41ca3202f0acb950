from __future__ import annotations

import os
import shlex

import pytest
from gpuwatch.core.errors import UsageError
from gpuwatch.launcher.option_types import parse_nnodes
from gpuwatch.launcher.options import get_parser
from gpuwatch.launcher.plan import make_plan, split_endpoint
from hypothesis import example, given
from hypothesis import strategies as st


@pytest.fixture(autouse=True)
def no_torchrun_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)


def plan(line: str, here: str = "head"):
    return make_plan(get_parser().parse_args([*shlex.split(line), "train.py"]), lambda host: host == here)


C10D = "--nnodes 2 --rdzv-backend c10d --rdzv-id 7"
STATIC = "--nnodes 2 --master-addr head --master-port 1000"


@pytest.mark.parametrize(
    ("line", "here", "hosts", "bind", "connect"),
    [
        # one node: everything stays on the loopback, the port is any free one
        ("", "head", True, "tcp://127.0.0.1:*", ""),
        ("--standalone", "head", True, "tcp://127.0.0.1:*", ""),
        ("--standalone --nnodes 1 --collector-port 5000", "head", True, "tcp://127.0.0.1:5000", ""),
        ("--nnodes 1:1 --nproc-per-node 8", "head", True, "tcp://127.0.0.1:*", ""),
        # c10d: the node whose host name the endpoint has is the head
        (f"{C10D} --rdzv-endpoint head:3000", "head", True, "tcp://*:3001", "tcp://127.0.0.1:3001"),
        (f"{C10D} --rdzv-endpoint head:3000", "other", False, "tcp://*:3001", "tcp://head:3001"),
        (f"{C10D} --rdzv-endpoint head", "other", False, "tcp://*:29401", "tcp://head:29401"),
        (f"{C10D} --rdzv-endpoint [fe80::1]:3000", "other", False, "tcp://*:3001", "tcp://[fe80::1]:3001"),
        (f"{C10D} --rdzv-endpoint head:3000 --collector-port 5", "other", False, "tcp://*:5", "tcp://head:5"),
        (f"{C10D} --rdzv-endpoint vip:3000 --rdzv-conf is_host=1", "x", True, "tcp://*:3001", "tcp://127.0.0.1:3001"),
        (f"{C10D} --rdzv-endpoint head:3000 --rdzv-conf is_host=0", "head", False, "tcp://*:3001", "tcp://head:3001"),
        (f"{C10D} --rdzv-endpoint h:1 --rdzv-conf a=b,is_host=True", "x", True, "tcp://*:2", "tcp://127.0.0.1:2"),
        # static: node rank 0 is the head, whatever its name
        (STATIC, "other", True, "tcp://*:1001", "tcp://127.0.0.1:1001"),
        (f"{STATIC} --node-rank 1", "head", False, "tcp://*:1001", "tcp://head:1001"),
        ("--nnodes 2 --master-addr head --node-rank 1", "x", False, "tcp://*:29501", "tcp://head:29501"),
        ("--nnodes 2 --rdzv-endpoint head --node-rank 1", "x", False, "tcp://*:29501", "tcp://head:29501"),
        # a collector that was started by hand is nobody's child
        ("--collector tcp://far:9", "head", False, "", "tcp://far:9"),
        ("--nnodes 4 --collector tcp://far:9", "head", False, "", "tcp://far:9"),
    ],
)
def test_where_the_collector_is_and_who_hosts_it(line, here, hosts, bind, connect):
    made = plan(line, here)
    assert (made.hosts, made.bind, made.connect) == (hosts, bind, connect)


def test_only_a_single_node_makes_its_own_keys():
    assert plan("").local
    assert not plan(f"{C10D} --rdzv-endpoint head").local
    assert not plan("--collector tcp://far:9").local


def test_two_launches_on_one_host_may_share_the_collector():
    assert plan(f"{C10D} --rdzv-endpoint head").may_join
    assert not plan("").may_join
    assert not plan(f"{C10D} --rdzv-endpoint head", here="other").may_join


def test_all_nodes_salt_their_keys_with_the_same_job():
    assert plan(f"{C10D} --rdzv-endpoint head").job == plan(f"{C10D} --rdzv-endpoint head", here="other").job == "7"


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("--nnodes 2 --rdzv-backend c10d", ["--rdzv-endpoint", "--nnodes 2"]),
        ("--nnodes 2", ["--rdzv-endpoint"]),
        ("--nnodes 1:4", ["--rdzv-endpoint"]),
        (f"{C10D} --rdzv-endpoint head:0", ["port 0"]),
        (f"{C10D} --rdzv-endpoint head:65535", ["65535", "--collector-port"]),
        (f"{C10D} --rdzv-endpoint head:99999", ["--rdzv-endpoint", "99999"]),
        (f"{C10D} --rdzv-endpoint head:x", ["--rdzv-endpoint", "'head:x'"]),
        (f"{C10D} --rdzv-endpoint :29400", ["--rdzv-endpoint", "HOST:PORT"]),
        (f"{C10D} --rdzv-endpoint [::1]29400", ["--rdzv-endpoint"]),
        ("--nnodes two", ["--nnodes", "'two'"]),
        ("--nnodes 0", ["--nnodes", "'0'"]),
        ("--nnodes 4:2", ["--nnodes", "'4:2'"]),
        ("--nnodes 1:2:3", ["--nnodes", "'1:2:3'"]),
        ("--nnodes ²", ["--nnodes", "'²'"]),
        ("--collector tcp://far:9 --collector-port 9", ["--collector", "--collector-port"]),
        ("--collector tcp://far:9 --metrics-port 9", ["--collector", "gpuwatch collect --metrics-port"]),
        ("--collector tcp://far:9 --notify http://far:9/", ["--collector", "gpuwatch collect --notify"]),
    ],
)
def test_what_cannot_work_is_told_in_one_sentence(line, parts):
    with pytest.raises(UsageError) as caught:
        plan(line)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=12))
@example("²")
@example("[")
@example("[]:1")
@example("a:b:c")
def test_any_text_is_parsed_or_a_usage_error(text):
    for parse in (parse_nnodes, lambda endpoint: split_endpoint(endpoint, 1)):
        try:
            parse(text)
        except UsageError:
            pass


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_a_range_of_nodes_is_read(least, more):
    assert parse_nnodes(f"{least}:{least + more}") == (least, least + more)
    assert parse_nnodes(str(least)) == (least, least)
