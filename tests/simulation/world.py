"""A whole job in one process and one thread: ranks with real recorders, real node agents, the real protocol and fold.

A seed orders all steps. Time is a number. Sockets are queues (network.py), the store is a list of durable messages.
"""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
from gpuwatch.collector.decide.decide import decide
from gpuwatch.collector.facts.fold import FactFold, fold
from gpuwatch.collector.protocol import RunProtocol
from gpuwatch.collector.report.verdict import Verdict
from gpuwatch.collector.run_actions import FinishRun, SendMessage, StoreMessage
from gpuwatch.core.recorder import layout
from gpuwatch.core.wire.keys import agent_name
from gpuwatch.core.wire.messages import (
    AgentBody,
    AgentHello,
    EventMessage,
    LookAtRanks,
    MessageAck,
    decode_agent,
    encode,
)
from gpuwatch.core.wire.pipe import AgentConfig, LaunchDone, WorkersEnded, WorkersStarted
from gpuwatch.launcher.agent.agent import ForgottenMessages, NodeAgentLoop

from .network import Context, NoGpus
from .oracle import Oracle
from .schedule import Schedule
from .worker import Worker


@dataclass
class Node:
    """A node with its agent, as its launch sees it."""

    number: int
    folder: Path
    ranks: list[int]
    schedule: Schedule
    life: int = 0
    agent: NodeAgentLoop | None = None
    network: Context = field(default_factory=Context)
    told: list[bytes] = field(default_factory=list)
    """Lines for the agent: one that is started again hears them from the beginning."""

    @property
    def agent_name(self) -> str:
        """The name of the agent that was started last."""
        return agent_name(f"node{self.number}.{self.life - 1}".encode())

    def start_agent(self) -> None:
        """The launch starts one, or starts it again."""
        self.network = Context()
        nodes = len(self.schedule.nodes)
        config = AgentConfig(
            collector="tcp://collector:1",
            server_key="",
            public_key="",
            private_key="",
            recorder_dir=str(self.folder),
            spool_dir=str(self.folder),
            hello=AgentHello("", "", len(self.ranks), nodes, nodes, ["train.py"], {}, "job"),
            identity=f"node{self.number}",
            life=self.life,
            hang_timeout_s=0,
        )
        agent = NodeAgentLoop(config, io.BytesIO(), gpus=cast(Any, NoGpus()), context=cast(Any, self.network))
        self.life += 1
        self.agent = agent
        for line in self.told:
            agent.hear_launch(line, 0.0)

    def tell(self, message: Any, now: float) -> None:
        """A line of the launch."""
        self.told.append(msgspec.json.encode(message))
        if self.agent is not None:
            self.agent.hear_launch(self.told[-1], now)

    def lose_agent(self) -> None:
        """It is killed."""
        if self.agent is not None:
            self.agent.close()
        self.agent = None


class Collector:
    """The protocol with its store and its fold, without a socket."""

    def __init__(self, stored: list[tuple[str, int, AgentBody]], beats: dict[str, AgentBody], now: float) -> None:
        self.protocol = RunProtocol("run", "job")
        self.stored = stored
        self.beats = beats
        self.new: list[tuple[str, int, AgentBody]] = []
        self.folded = FactFold()
        for agent, n, body in self.messages:
            self.folded.add(agent, n, body)
        self.protocol.restore(self.messages, now)
        self.finished = False

    @property
    def messages(self) -> list[tuple[str, int, AgentBody]]:
        """All that is in the store."""
        return [*sorted(self.stored, key=lambda each: each[:2]), *((agent, 0, b) for agent, b in self.beats.items())]

    def on_message(self, agent: str, data: bytes, now: float) -> Iterator[SendMessage]:
        """One message from the network."""
        message = decode_agent(data)
        for action in self.protocol.on_message(agent, message, now):
            if isinstance(action, StoreMessage):
                if message.n:
                    self.new.append((agent, message.n, message.body))
                else:
                    self.beats[agent] = message.body
                self.folded.add(agent, message.n, message.body)
            elif isinstance(action, SendMessage):
                yield action

    def commit(self) -> list[SendMessage]:
        """What was heard is durable."""
        self.stored += self.new
        self.new = []
        return self.protocol.committed(self.protocol.received)


class World:
    """One job."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.draw = schedule.draw
        self.oracle = Oracle()
        self.now = 1.0
        self.folder = Path(tempfile.mkdtemp(prefix="simulated-", dir="/dev/shm"))
        self.nodes: list[Node] = []
        rank = 0
        for number, size in enumerate(schedule.nodes):
            folder = self.folder / str(number)
            folder.mkdir()
            self.nodes.append(Node(number, folder, list(range(rank, rank + size)), schedule))
            rank += size
        self.collector = Collector([], {}, self.now)
        self.gone: set[int] = set()
        """Nodes whose agent is not started again, or that never came."""
        self._around = sorted(schedule.around, key=lambda each: each[0])
        self._step = 0
        self._workers: list[Worker] = []

    def run(self) -> list[Verdict]:
        """Until the collector makes its report: the verdict as it came, and the one of the store."""
        try:
            self._run()
            lost = self.collector.protocol.lost_agents
            messages = self.collector.messages
            if messages and "store damaged" in self.schedule.injected:
                events = [message for message in messages if isinstance(message[2], EventMessage)]
                messages.remove(self.draw.choice(events if events and self.draw.random() < 0.7 else messages))
                return [decide(fold(messages, lost))]
            return [decide(self.collector.folded.facts(lost)), decide(fold(messages, lost))]
        finally:
            for worker in self._workers:
                worker.close()
            for node in self.nodes:
                node.lose_agent()
            shutil.rmtree(self.folder)

    def _run(self) -> None:
        for number, node in enumerate(self.nodes):
            if number == 1 and "node never comes" in self.schedule.injected:
                self.gone.add(number)
            else:
                node.start_agent()
        outcome = "ok"
        for attempt in range(self.schedule.attempts):
            outcome = self._attempt(attempt)
        for node in self.nodes:
            node.tell(LaunchDone(outcome), self.now)
        for _ in range(400):
            self._turn_all()
            if self.collector.finished:
                return
        raise AssertionError("the collector never finished")

    def _attempt(self, attempt: int) -> str:
        workers: dict[int, Worker] = {}
        for node in self.nodes:
            for rank in node.ranks:
                workers[rank] = Worker(node.folder, self.schedule, self.oracle, rank, attempt)
            pids = {rank: workers[rank].pid for rank in node.ranks}
            node.tell(WorkersStarted(attempt, pids), self.now)
        self._workers += workers.values()
        alive = {rank: worker.life() for rank, worker in workers.items()}
        restart = self.draw.randrange(3, 12) if attempt + 1 < self.schedule.attempts else 0
        failed: list[int] = []
        while alive:
            rank = self.draw.choice(list(alive))
            next(alive[rank], None)
            if restart and (restart := restart - 1) == 0:
                workers[rank].stop(1)
            code = workers[rank].code
            if code is not None:
                del alive[rank]
                if code:
                    failed = [rank]
                    break
            self._turn_some()
        for worker in workers.values():
            worker.stop(-15)
        for node in self.nodes:
            if "end not told" in self.schedule.injected and node.number == 0:
                continue
            codes = {rank: workers[rank].code for rank in node.ranks}
            node.tell(WorkersEnded(attempt, codes, [rank for rank in failed if rank in codes]), self.now)
        return "failed" if failed else "ok"

    # -- steps --------------------------------------------------------------------------------------------------

    def _turn_some(self) -> None:
        self._step += 1
        self.now += 0.1
        while self._around and self._around[0][0] <= self._step:
            self._happen(self._around.pop(0)[1])
        if self.draw.random() < 0.4:
            self._turn(self.draw.choice(self.nodes))
        if self.draw.random() < 0.3:
            self._deliver(self.draw.choice(self.nodes), self.draw.randint(1, 4))
        if self.draw.random() < 0.1:
            self._send(self.collector.commit())

    def _turn_all(self) -> None:
        self.now += 0.7
        for _, what in self._around:
            self._happen(what)
        self._around.clear()
        for node in self.nodes:
            self._turn(node)
            self._deliver(node, 100)
        self._send(self.collector.commit())
        if len(self.gone) == len(self.nodes):  # nothing else will happen
            self.now += 700.0
            self.collector.protocol.launch_gone(self.now - 100.0)
        elif self.gone:
            self.now += 20.0
        self.collector.finished |= any(isinstance(each, FinishRun) for each in self._ticked())

    def _ticked(self) -> list[Any]:
        actions = self.collector.protocol.tick(self.now)
        self._send([action for action in actions if isinstance(action, SendMessage)])
        return list(actions)

    def _turn(self, node: Node) -> None:
        if node.agent is None:
            if node.number not in self.gone:
                node.start_agent()
            return
        try:
            node.agent.turn(self.now)
        except ForgottenMessages:
            node.lose_agent()

    def _deliver(self, node: Node, number: int) -> None:
        queue = node.network.made.to_collector
        for _ in range(min(number, len(queue))):
            self._send(self.collector.on_message(node.agent_name, queue.popleft(), self.now))

    def _send(self, sends: Iterator[SendMessage] | list[SendMessage]) -> None:
        for send in sends:
            message = send.message
            if isinstance(message, LookAtRanks):  # there are no processes to look at
                continue
            if isinstance(message, MessageAck):
                message = msgspec.structs.replace(message, credit=self.collector.protocol.credit)
            for node in self.nodes:
                if send.agent == node.agent_name:
                    node.network.made.to_agent.append(encode(message))

    # -- what goes wrong ----------------------------------------------------------------------------------------

    def _happen(self, what: str) -> None:
        node = self.draw.choice(self.nodes)
        if what in ("agent dies", "agent dies for good", "connection lost"):
            self.collector.protocol.on_closed(node.agent_name, self.now)
        if what == "agent dies":
            node.lose_agent()
        elif what == "agent dies for good":
            node.lose_agent()
            self.gone.add(node.number)
        elif what == "connection lost":
            node.network.made.lose()
        elif what == "collector dies":
            self.collector = Collector(self.collector.stored, self.collector.beats, self.now)
        elif what == "store lost":
            self.collector = Collector([], {}, self.now)
        else:
            self._damage(node, what)

    def _damage(self, node: Node, what: str) -> None:
        files = sorted(node.folder.glob("*.recorder"))
        if not files:
            return
        path = self.draw.choice(files)
        first, last = {
            "head damaged": (0, 16 * 8),
            "log damaged": (layout.HEADER_BYTES, layout.HEADER_BYTES + 600),
            "ring damaged": (-3 * layout.SEGMENT_BYTES, -2 * layout.SEGMENT_BYTES),
        }.get(what, (0, 0))
        if last == first:
            return
        size = path.stat().st_size
        at = self.draw.randrange(first % size, last % size or size)
        with path.open("r+b") as file:
            file.seek(at)
            found = file.read(1)[0]
            file.seek(at)
            file.write(bytes([found ^ 1 << self.draw.randrange(8)]))
