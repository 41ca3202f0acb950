"""Several nodes in network namespaces, and the real command on each of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode adds no folder

from network import Network, Node, name_of_this_process, take_down_stale, why_not

PORT = 29400
"""Each node has all ports to itself. The collector takes the next one."""


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


@dataclass
class Gate:
    """Where a rank waits in its preflight, after its arrival and before its group, until the test lets it go on."""

    path: Path
    _writer: Any = None

    def reached(self) -> None:
        """Returns once a rank stands there: a pipe can be opened for writing only when somebody reads."""
        self._writer = self.path.open("w")

    def open(self) -> None:
        self._writer.close()


@dataclass
class Job:
    """One job over all nodes of a network, its head on the first."""

    bench: Any
    network: Network
    static: bool = False
    """Without a rendezvous: every node has its number, and one that is missing keeps no other from starting."""
    began: float = field(default_factory=time.monotonic)
    processes: dict[Node, subprocess.Popen[str]] = field(default_factory=dict)

    def start(
        self, node: Node, command: str, *options: str, script: str = "", args: tuple[str, ...] = (), **environment: str
    ) -> None:
        count = len(self.network.nodes)
        head = self.network.nodes[0].address
        if self.static:
            meet = ["--node-rank", str(node.number), "--master-addr", head, "--master-port", str(PORT)]
        else:
            meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{head}:{PORT}", "--rdzv-id", "a job"]
        where = ["--nnodes", str(count), "--nproc-per-node", "1", *meet]
        last = [self.bench.script(script), *args] if script else []
        self.processes[node] = subprocess.Popen(
            node.inside([sys.executable, "-m", "gpuwatch.cli.main", command, *where, *options, *last]),
            cwd=self.bench.cwd,
            env={**self.bench.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.bench.started.append(self.processes[node])

    def start_all(self, command: str, *options: str, **environment: str) -> None:
        for node in self.network.nodes:
            self.start(node, command, *options, **environment)

    def gate(self, node: Node) -> tuple[Gate, dict[str, str]]:
        """A gate and the environment of the node that is to wait at it."""
        gate = Gate(self.bench.cwd / f"gate-{node.number}")
        os.mkfifo(gate.path)
        return gate, {"GATE": str(gate.path), "PYTHONPATH": _with_path(self.bench.script("gate"))}

    def finish(self, within_s: float) -> list[Any]:
        """The ended commands of all nodes that were started; all of them must end in this time."""
        deadline = time.monotonic() + within_s
        return [
            self.bench.finish(process, max(1.0, deadline - time.monotonic())) for process in self.processes.values()
        ]


def _with_path(folder: str) -> str:
    return os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture
def job(bench, network) -> Callable[..., Job]:
    """`job(3)` is a job for three nodes, of which none has started yet."""
    return lambda count, **kwargs: Job(bench, network(count), **kwargs)
