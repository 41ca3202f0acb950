"""What the collector does about what it hears: pure decisions, time is an argument, no socket.

hear(agent, message, now) -> actions        tick(now) -> actions
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.messages import (
    Ack,
    AgentMessage,
    Beat,
    Bye,
    CollectorMessage,
    EventMessage,
    Hello,
    Refused,
    Stop,
    Want,
    Welcome,
)
from ..core.records import Anomaly, PreflightResult, split_label

SILENT_S = 20.0
"""An agent that beats twice a second and has not been heard for this long is lost."""
STOP_AFTER_S = 5.0
"""How long the other nodes have to end by themselves, once the job cannot go on."""
LINGER_S = 300.0
"""How long after the first goodbye the other nodes may go on: torchrun's own exit barrier."""
NOBODY_S = 10.0
"""After the launch has gone, how long an agent may take to appear."""


@dataclass(frozen=True)
class Send:
    """Send a message to an agent."""

    agent: str
    message: CollectorMessage


@dataclass(frozen=True)
class Keep:
    """Put the message into the store before it is acknowledged."""

    agent: str
    message: AgentMessage


@dataclass(frozen=True)
class Finish:
    """Everybody is done: decide, and write the report."""


Action = Send | Keep | Finish


@dataclass
class _Node:
    hello: Hello
    heard: float
    received: int = 0
    bye: Bye | None = None
    bye_at: float = 0.0
    lost: bool = False
    stopped: bool = False

    @property
    def gone(self) -> bool:
        return self.bye is not None or self.lost


@dataclass
class RunProtocol:
    """State of one run."""

    run_id: str
    run_dir: str
    rdzv_id: str
    nodes: dict[str, _Node] = field(default_factory=dict)
    expected_nodes: int = 1
    """A collector started by hand is told; else the first hello says."""
    strangers: int = 0
    """Agents that were turned away."""
    _wanted: set[tuple[int, str, int]] = field(default_factory=set)
    _over_since: float | None = None
    _launch_gone_at: float | None = None
    _ended: bool = False
    _finished: bool = False

    # -- hearing ------------------------------------------------------------------------------------------------

    def hear(self, agent: str, message: AgentMessage, now: float) -> list[Action]:
        """One message of an agent."""
        node = self.nodes.get(agent)
        if isinstance(message.body, Hello) and node is None:
            return self._greet(agent, message, message.body, now)
        if node is None:  # its hello was lost on the way: it still has it
            return [Send(agent, Ack(0, resend=True))] if message.n else []
        node.heard = now
        node.lost = False
        if message.n == 0:
            echo = message.body.sent_ns if isinstance(message.body, Beat) else 0
            return [Keep(agent, message), Send(agent, Ack(node.received, echo_ns=echo))]
        if message.n <= node.received:
            again: list[Action] = [Send(agent, Ack(node.received))]
            if isinstance(message.body, Hello):  # it has not heard the welcome
                again.insert(0, Send(agent, Welcome(self.run_id, self.run_dir, node.received)))
            return again
        if message.after > node.received:
            return [Send(agent, Ack(node.received, resend=True))]
        node.received = message.n
        actions: list[Action] = [Keep(agent, message), Send(agent, Ack(message.n))]
        return actions + self._react(node, message, now)

    def _greet(self, agent: str, message: AgentMessage, hello: Hello, now: float) -> list[Action]:
        if hello.rdzv_id != self.rdzv_id:
            self.strangers += 1
            return [
                Send(agent, Refused(f"this is the collector of rendezvous {self.rdzv_id!r}, not {hello.rdzv_id!r}"))
            ]
        self.nodes[agent] = _Node(hello, now, received=message.n)
        return [
            Keep(agent, message),
            Send(agent, Welcome(self.run_id, self.run_dir, message.n)),
            Send(agent, Ack(message.n)),
        ]

    def _react(self, node: _Node, message: AgentMessage, now: float) -> list[Action]:
        body = message.body
        if isinstance(body, EventMessage):
            return self._react_to_event(body, now)
        if isinstance(body, Bye):
            node.bye, node.bye_at = body, now
            fixed = node.hello.min_nodes == node.hello.max_nodes
            if body.outcome != "ok" and fixed:
                self._job_is_over(now)
        return []

    def _react_to_event(self, message: EventMessage, now: float) -> list[Action]:
        event = message.event
        if isinstance(event, PreflightResult) and event.stops:
            self._job_is_over(now)
        if not isinstance(event, Anomaly):
            return []
        if event.aborts:
            self._job_is_over(now)
        where = event.where
        key = (where.attempt, where.root, where.batch)
        if key in self._wanted:
            return []
        self._wanted.add(key)
        batches = [where.batch, where.batch - 1] if where.batch > 0 else [where.batch]  # the one before: its history
        wants = [Want(where.attempt, *split_label(where.root), batch) for batch in batches]
        return [Send(agent, want) for want in wants for agent, node in self.nodes.items() if not node.gone]

    def _job_is_over(self, now: float) -> None:
        if self._over_since is None:
            self._over_since = now

    def launch_gone(self, now: float) -> None:
        """The launch that started this collector has ended or was killed."""
        if self._launch_gone_at is None:
            self._launch_gone_at = now

    def end_now(self, now: float) -> None:
        """The user ends a collector that was started by hand."""
        self._ended = True

    # -- time ---------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """What time alone brings about."""
        if self._finished:
            return []
        actions: list[Action] = []
        for node in self.nodes.values():
            if not node.gone and now - node.heard > SILENT_S:
                node.lost = True
                if node.hello.min_nodes == node.hello.max_nodes:
                    self._job_is_over(now)
        if self._over_since is not None and now - self._over_since > STOP_AFTER_S:
            for agent, node in self.nodes.items():
                if not node.gone and not node.stopped:
                    node.stopped = True
                    actions.append(Send(agent, Stop(self._why())))
        if self._may_finish(now):
            self._finished = True
            actions.append(Finish())
        return actions

    def _why(self) -> str:
        failed = [node.hello.host for node in self.nodes.values() if node.bye is not None and node.bye.outcome != "ok"]
        lost = [node.hello.host for node in self.nodes.values() if node.lost]
        if failed:
            return f"the job has ended on {', '.join(sorted(set(failed)))}"
        if lost:
            return f"node {', '.join(sorted(set(lost)))} is lost"
        return "another rank has aborted the job"

    def _may_finish(self, now: float) -> bool:
        if self._ended:
            return True
        if not self.nodes:
            return self._launch_gone_at is not None and now - self._launch_gone_at > NOBODY_S
        if all(node.gone for node in self.nodes.values()):
            expected = max(self.expected_nodes, *(node.hello.min_nodes for node in self.nodes.values()))
            if len(self.nodes) >= expected:
                return True
            # an agent that has said goodbye goes on beating until it has the verdict
            last = max(node.bye_at if node.bye is not None else node.heard for node in self.nodes.values())
            return now - last > STOP_AFTER_S
        first_bye = min((node.bye_at for node in self.nodes.values() if node.bye is not None), default=None)
        return first_bye is not None and now - first_bye > LINGER_S

    @property
    def lost_agents(self) -> list[str]:
        """Agents that went silent."""
        return [agent for agent, node in self.nodes.items() if node.lost and node.bye is None]
