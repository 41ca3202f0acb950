"""Threads stand for nodes; the store is torch's own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from gpuwatch.launcher.elastic import agree_on_attempt


@pytest.fixture(scope="module")
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300))


def agree(server, starts: list[int], namespace: str, prefix: str = "round") -> list[tuple[int, str, tuple[str, ...]]]:
    def node(number: int) -> tuple[int, str, tuple[str, ...]]:
        client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=300))
        store = dist.PrefixStore(namespace, client)
        host = f"host {number}"
        found = agree_on_attempt(store, starts[number], number, len(starts), host=host, prefix=prefix, timeout_s=300)
        attempt, name, hosts = found
        return attempt, name, tuple(hosts)

    with ThreadPoolExecutor(len(starts)) as pool:
        return list(pool.map(node, range(len(starts))))


@pytest.mark.parametrize("starts", [[0], [0, 0], [2, 0, 1], [0, 0, 5, 5]])
def test_all_nodes_take_the_largest_number_of_starts_and_one_name(server, starts):
    answers = agree(server, starts, f"one {starts}")
    assert len(set(answers)) == 1
    attempt, name, hosts = answers[0]
    assert hosts == tuple(f"host {number}" for number in range(len(starts)))
    assert attempt == max(starts)
    assert name.endswith(f"-{attempt}")


def test_two_rounds_in_one_store_are_told_apart_by_their_prefix(server):
    (first,) = agree(server, [0], "two", prefix="0")
    (second,) = agree(server, [1], "two", prefix="1")
    assert (first[0], second[0]) == (0, 1)
    assert first[1].rpartition("-")[0] != second[1].rpartition("-")[0]


def test_a_node_that_never_answers_raises_at_the_timeout(server):
    with pytest.raises(dist.DistStoreError):
        agree_on_attempt(dist.PrefixStore("three", server), 0, 0, 2, timeout_s=0.05)
