"""A node without torchrun: the launch's own helpers, and recorders that real writers write."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from gpuwatch.core.events.definitions import ModuleDef, RootDef, SlotDef
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.events.script_events import ScriptExit
from gpuwatch.core.recorder.layout import HeadField, HooksState, RankPhase, file_name
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.values import ValueEncoding
from gpuwatch.core.wire.keys import JobKeys
from gpuwatch.core.wire.messages import AgentHello
from gpuwatch.core.wire.pipe import (
    AgentConfig,
    CollectorBound,
    CollectorConfig,
    JobResult,
    LaunchDone,
    WorkersEnded,
    WorkersStarted,
)
from gpuwatch.launcher.head_collector import HeadCollector
from gpuwatch.launcher.helper_processes import NodeAgent

from ..known_keys import KEYS
from ..ports import ports_of_this_test
from ..waiting import until


class Rank:
    """A rank as its recorder shows it."""

    def __init__(self, folder: Path, rank: int, world_size: int, attempt: int = 0) -> None:
        self.rank, self.attempt = rank, attempt
        self.writer = RecorderWriter(
            folder / file_name(rank, attempt),
            rank=rank,
            local_rank=rank,
            world_size=world_size,
            attempt=attempt,
            log_bytes=1 << 20,
            segments=8,
        )
        self.writer.fields[HeadField.HOOKS] = HooksState.ATTACHED
        self.writer.append(RootDef(0, "Net"), name=True)
        self.writer.append(ModuleDef(0, 0, "fc", "Linear"), name=True)
        self.writer.append(SlotDef(0, 0, "output"), name=True)

    def batch(self, number: int) -> None:
        page = self.writer.begin_page(0, number, number)
        value = self.writer.value(0, 0x3F800000, ValueEncoding.FLOAT32 << 8)
        self.writer.frame(0, 0xFFFFFFFF, 0, 0, number, [(0, value, 0xFFFFFFFF, 1, 0, 0)])
        self.writer.end_page(page)

    def finish(self) -> None:
        self.writer.append(ScriptExit(RunPosition(self.rank, self.attempt), 0))
        self.writer.fields[HeadField.PHASE] = RankPhase.FINISHED


@dataclasses.dataclass
class Node:
    """One node of a job: its agent, its ranks, and, on the head, its collector."""

    scratch: Path
    runs: Path
    keys: JobKeys
    port: int
    """Nobody else takes it while a collector that has ended is started again."""
    said: list[str] = dataclasses.field(default_factory=list)
    stops: list[str] = dataclasses.field(default_factory=list)
    collector: HeadCollector | None = None
    agent: NodeAgent | None = None
    ranks: list[Rank] = dataclasses.field(default_factory=list)
    is_shown: bool = False
    """Whether others may watch its run live."""

    def start_collector(self, bind: str = "") -> str:
        config = CollectorConfig(
            bind=bind or f"tcp://127.0.0.1:{self.port}",
            public_key=self.keys.collector.public.decode(),
            private_key=self.keys.collector.private.decode(),
            agent_public_key=self.keys.agent.public.decode(),
            viewer_public_key=self.keys.viewer.public.decode(),
            runs_dir=str(self.runs),
            rdzv_id="job",
            fallback=str(self.scratch / "rescued"),
            viewer_private_key=self.keys.viewer.private.decode() if self.is_shown else "",
        )
        self.collector = HeadCollector(config, self.said.append, lambda line: None)
        assert isinstance(self.collector.answer, CollectorBound)
        return self.collector.answer.address

    @property
    def run_dir(self) -> Path:
        assert self.collector is not None
        assert isinstance(self.collector.answer, CollectorBound)
        return Path(self.collector.answer.run_dir)

    def start_agent(self, address: str, *, ranks: range = range(2), world: int = 2, nodes: int = 1) -> None:
        config = AgentConfig(
            collector=address,
            server_key=self.keys.collector.public.decode(),
            public_key=self.keys.agent.public.decode(),
            private_key=self.keys.agent.private.decode(),
            recorder_dir=str(self.scratch),
            spool_dir=str(self.runs),
            hello=AgentHello("", "", len(ranks), nodes, nodes, ["gpuwatch", "launch", "train.py"], {}, "job"),
        )
        self.agent = NodeAgent(config, self.said.append, lambda reason, restart: self.stops.append(reason))
        self.ranks = [Rank(self.scratch, rank, world) for rank in ranks]
        pids = {rank.rank: 1 for rank in self.ranks}
        self.agent.send(WorkersStarted(0, pids))

    def train(self, *batches: int) -> None:
        for rank in self.ranks:
            for number in batches:
                rank.batch(number)

    def end_ranks(self, attempt: int = 0) -> None:
        """All ranks finish, and torchrun has ended."""
        assert self.agent is not None
        for rank in self.ranks:
            rank.finish()
        self.agent.send(WorkersEnded(attempt, {rank.rank: 0 for rank in self.ranks}, []))
        self.agent.send(LaunchDone("ok"))

    def verdict(self) -> JobResult:
        assert self.agent is not None
        self.agent.wait()
        assert self.agent.verdict is not None, self.said
        return self.agent.verdict

    def heard(self, words: str) -> None:
        until(lambda: any(words in sentence for sentence in self.said), f"{words!r} in {self.said}")

    def close(self) -> None:
        for helper in (self.agent, self.collector):
            if helper is not None:
                helper.end(30.0)
                assert not psutil.pid_exists(helper.pid) or psutil.Process(helper.pid).status() == "zombie"
        for rank in self.ranks:
            rank.writer.close()


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Nodes of one job."""
    made: list[Node] = []
    numbers = itertools.count()

    def make(runs: Path | None = None) -> Node:
        scratch = tmp_path / f"scratch-{next(numbers)}"
        scratch.mkdir()
        (port,) = held.enter_context(ports_of_this_test((number,) for number in range(20000, 30000)))
        made.append(Node(scratch, runs or tmp_path / "runs", KEYS, port))
        return made[-1]

    with ExitStack() as held:
        yield make
        for node in reversed(made):
            node.close()


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    """A job of one node with its collector; its agent is up and has been heard."""
    made = make_node()
    made.start_agent(made.start_collector())
    return made
