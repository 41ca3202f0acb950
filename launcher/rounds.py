"""Which attempt this is, agreed by all nodes of a rendezvous.

torchrun's own restart count is local to a node: the node whose worker failed counts up, the others see a change of
membership and do not. So every node puts the number of its own starts into the rendezvous' store and takes the
largest, which is also what the next start counts from. On the occasion they tell each other their hosts, so that a
rank that never arrives can be given a place.
"""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Protocol


class Store(Protocol):
    """What is used of torch.distributed.Store."""

    def set(self, key: str, value: str) -> None:
        """Store a value."""

    def get(self, key: str) -> bytes:
        """A value that is there."""

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Until all keys are there; raises at the timeout."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set it if it is `expected` ("": not there); returns what it then is."""


def agree_on_attempt(
    store: Store,
    starts: int,
    node: int,
    num_nodes: int,
    *,
    host: str = "",
    prefix: str = "round",
    timeout_s: float = 60.0,
) -> tuple[int, str, list[str]]:
    """(attempt, name of the round, hosts of all nodes), the same on all nodes.

    `starts` is how often this node has started its ranks.

    `prefix` tells rounds apart where the store does not: torchrun's c10d backend gives every round a store of its
    own, its static backend one for the whole job. Raises what the store raises when a node does not answer in time.
    """
    prefix = f"gpuwatch/{prefix}"
    store.set(f"{prefix}/starts/{node}", f"{starts} {host}")
    keys = [f"{prefix}/starts/{other}" for other in range(num_nodes)]
    store.wait(keys, timedelta(seconds=timeout_s))
    told = [store.get(key).decode().split(" ", 1) for key in keys]
    attempt = max(int(number) for number, _ in told)
    name = store.compare_set(f"{prefix}/name", "", uuid.uuid4().hex[:12]).decode()
    return attempt, f"{name}-{attempt}", [host for _, host in told]
