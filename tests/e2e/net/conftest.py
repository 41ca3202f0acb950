"""Several nodes in network namespaces, and the real command on each of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode adds no folder

from network import Network, Node, name_of_this_process, take_down_stale, why_not

PORT = 29400


@pytest.fixture(scope="session")
def namespaces() -> None:
    if reason := why_not():
        pytest.skip(reason)
    take_down_stale()


@pytest.fixture
def network(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Network]]:
    """`network(3)` is three nodes that reach each other."""
    made = []

    def bring_up(count: int) -> Network:
        made.append(Network(name_of_this_process(), count, tmp_path_factory.mktemp("network")))
        made[-1].up()
        return made[-1]

    yield bring_up
    for network in made:
        network.down()


@pytest.fixture
def on_node(bench) -> Callable[..., subprocess.Popen[str]]:
    """`on_node(node, "launch", ...)` starts gpuwatch there, with the bench's marks and checks."""

    def start(node: Node, *command: str, module: str = "gpuwatch.cli.main", **environment: str):
        process = subprocess.Popen(
            node.inside([sys.executable, "-m", module, *command]),
            cwd=bench.cwd,
            env={**bench.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        bench.pids.add(process.pid)
        return process

    return start


@pytest.fixture
def on_all(on_node) -> Callable[..., list[subprocess.Popen[str]]]:
    """The same on all nodes, as one job with its head on the first; `options` come before the script."""

    def start(nodes: list[Node], command: str, *options: str, script: str = "", nnodes: int | None = None, **kwargs):
        where = ("--nnodes", str(nnodes or len(nodes)), "--nproc-per-node", "1", "--rdzv-id", "a job")
        meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"10.213.78.1:{PORT}")
        last = (script,) if script else ()
        return [on_node(node, command, *where, *meet, *options, *last, **kwargs) for node in nodes]

    return start
