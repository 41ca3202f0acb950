"""The collector's reactions to messages: pure decisions, time is an argument, no socket.

hear(agent, message, now) -> actions        committed(numbers) -> acknowledgements        tick(now) -> actions

A helper that is silent never ends the job: only a rank's own end, the user or the scheduler does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from ..core.codes import Code
from ..core.events.agent_events import RankLook, RankStall, WorkerExit
from ..core.events.alarm_evidence import SECOND_RUN_S, ForwardCaptured, SecondRun
from ..core.events.alarms import Anomaly
from ..core.events.definitions import split_label
from ..core.events.preflight_events import PreflightResult
from ..core.events.script_events import ScriptError
from ..core.settings import OnHang
from ..core.wire import messages as wire
from ..core.wire.beat import NodeBeat
from ..core.wire.messages import AgentHello, AgentMessage, CollectorMessage, MessageAck, life_of, node_of
from .asking import AskedAll, RankOwnership
from .decide.overflow_at_rest import RestingOverflow
from .ends.hang_finding import HangAction
from .ends.hang_model import HangFinding
from .ends.silent_nodes import IS_LOST, WAS_KILLED, node_text, ranks_by_host
from .node_state import SILENT_S, NodeState
from .run_actions import Action, FinishRun, LookAhead, NotifyUser, SendMessage, StoreMessage

TOLD_S = 60.0
"""After this silence of one node, the user is told."""
ABANDONED_S = 600.0
"""Silence of all agents after which a collector that no launch started makes its report."""
STOP_AFTER_S = 5.0
"""How long the other nodes have to end by themselves, once the job cannot go on."""
LINGER_S = 300.0
"""How long after the first goodbye the other nodes may go on: torchrun's own exit barrier."""
ON_THE_WAY_BYTES = 16 << 20
"""Bytes of definitions and pages in flight, over all agents: an event behind them does not wait long."""
MOST_CREDIT = 2 << 20
"""Most bytes in flight for one agent. Its socket holds the same amount, too."""
NOBODY_S = 10.0
"""After the launch has gone, how long an agent may take to appear."""


@dataclass
class RunProtocol:
    """State of one run."""

    run_id: str
    rdzv_id: str
    nodes: dict[str, NodeState] = field(default_factory=dict)
    expected_nodes: int = 1
    """Given to a collector that is started by hand; else the first hello says it."""
    claims: RankOwnership = field(default_factory=RankOwnership)
    asking: AskedAll = field(default_factory=AskedAll)
    disbelieved: int = 0
    """Messages about ranks of other nodes."""
    strangers: int = 0
    """Agents that were refused."""
    on_hang: OnHang = "report"
    ends_at_overflow: bool = False
    """An overflow ends the job, also one that a rank that rests could not tell of."""
    overflow_at_rest: Callable[[], RestingOverflow | None] = lambda: None
    """What is known of an overflow when no rank moves any more."""
    replays: int = 0
    """Hellos that were heard before, with other contents or of an agent that another has replaced."""
    by_hand: bool = False
    """No launch started this collector, so none can tell it that the job is over."""
    _wanted: dict[tuple[int, str, int], list[wire.WantedBatch]] = field(default_factory=dict)
    _over_since: float | None = None
    _launch_gone_at: float | None = None
    _ended: bool = False
    _finished: bool = False

    # -- hearing ------------------------------------------------------------------------------------------------

    def on_message(self, agent: str, message: AgentMessage, now: float) -> list[Action]:
        """One message of an agent."""
        node = self.nodes.get(agent)
        if isinstance(message.body, AgentHello) and node is None:
            return self._greet(agent, message, message.body, now)
        if node is None:  # its hello was lost on the way, or with the store of a collector before this one
            return [SendMessage(agent, MessageAck(0, resend=True))]
        node.heard, node.lost = now, False
        replayed = isinstance(message.body, AgentHello) and replace(message.body, run=node.hello.run) != node.hello
        believed = not replayed and self.claims.may_say(node_of(agent), node.hello.nproc, message.body)
        self.replays += replayed
        self.disbelieved += not replayed and not believed
        actions: list[Action] = []
        if node.restored:
            node.restored = False
            actions += [SendMessage(agent, want) for wants in self._wanted.values() for want in wants]
        if believed and isinstance(message.body, NodeBeat):
            node.launch_holds = message.body.launch_holds
        if message.n == 0:
            echo = message.body.sent_ns if isinstance(message.body, NodeBeat) else 0
            kept = [StoreMessage()] if believed and not isinstance(message.body, wire.AgentLeaving) else []
            received = node.received if echo else -1
            return [*actions, *kept, SendMessage(agent, MessageAck(node.stored, echo_ns=echo, received=received))]
        if message.n <= node.received:
            if isinstance(message.body, AgentHello):  # it has not heard the welcome
                actions.append(SendMessage(agent, wire.RunWelcome(self.run_id)))
            return [*actions, SendMessage(agent, MessageAck(node.stored))]
        if message.after > node.received:
            ahead = self._look_ahead(message.body, now) if believed else []
            return [*actions, *ahead, SendMessage(agent, MessageAck(node.stored, resend=True))]
        node.received = message.n
        if not believed or isinstance(message.body, AgentHello):  # a repeated hello changes nothing
            return actions
        return [*actions, StoreMessage(), *self._react(node, message.body, now)]

    def _look_ahead(self, body: wire.AgentBody, now: float) -> list[Action]:
        """The verdict over an overflow does not wait until pages that were lost with a connection are sent again."""
        if isinstance(body, wire.EventMessage) and isinstance(body.event, Anomaly):
            return [LookAhead(), *self._react_to_event(body, now)]
        return []

    @property
    def credit(self) -> int:
        """Bytes of definitions and pages that each agent may have on the way."""
        speaking = sum(not node.gone for node in self.nodes.values())
        return min(MOST_CREDIT, ON_THE_WAY_BYTES // max(1, speaking))

    def answer_while_finishing(self, agent: str, message: AgentMessage) -> MessageAck:
        """Answer a beat while the report is made, so that the agent knows that the collector is alive."""
        node = self.nodes.get(agent)
        echo = message.body.sent_ns if isinstance(message.body, NodeBeat) else 0
        return MessageAck(node.stored if node is not None else 0, echo_ns=echo)

    @property
    def received(self) -> dict[str, int]:
        """agent -> the number up to which everything of it was heard"""
        return {agent: node.received for agent, node in self.nodes.items()}

    def committed(self, numbers: Mapping[str, int]) -> list[SendMessage]:
        """Acknowledge the messages up to these numbers, which are durable now."""
        found = []
        for agent, number in numbers.items():
            node = self.nodes[agent]
            if node.stored < number:
                node.stored = number
                found.append(SendMessage(agent, MessageAck(node.stored)))
        return found

    def taken(self, agents: Iterable[str]) -> list[SendMessage]:
        """Return the credit for messages that were taken from the socket, stored or not."""
        nodes = ((agent, self.nodes[agent]) for agent in agents if agent in self.nodes)
        return [SendMessage(agent, MessageAck(node.stored, received=node.received)) for agent, node in nodes]

    def tell_again(self) -> list[SendMessage]:
        """Repeat the last acknowledgement to every live agent, because its other fields have changed."""
        return [SendMessage(agent, MessageAck(node.stored)) for agent, node in self.nodes.items() if not node.gone]

    def restore(self, stored: Iterable[tuple[str, int, wire.AgentBody]], now: float) -> None:
        """Take over from a collector that has ended: it had acknowledged every message in its store."""
        for agent, n, body in stored:
            if isinstance(body, AgentHello) and agent not in self.nodes:
                self._enter(agent, body, now)
            node = self.nodes.get(agent)
            if node is not None:
                self.claims.may_say(node_of(agent), node.hello.nproc, body)
            if node is not None and n:
                node.received = node.stored = max(node.received, n)
                node.restored = True
                self._react(node, body, now)
        self.asking.forget()

    def _greet(self, agent: str, message: AgentMessage, hello: AgentHello, now: float) -> list[Action]:
        reason = self._why_not(agent, hello)
        if reason:
            self.strangers += 1
            return [SendMessage(agent, wire.AgentRefused(reason))]
        self._enter(agent, hello, now).received = message.n
        return [StoreMessage(), SendMessage(agent, wire.RunWelcome(self.run_id))]

    def _why_not(self, agent: str, hello: AgentHello) -> str:
        """Why this agent is not one of this job; "" if it is."""
        if hello.rdzv_id != self.rdzv_id:
            return f"this is the collector of rendezvous {self.rdzv_id!r}, not {hello.rdzv_id!r}"
        if hello.schema != wire.SCHEMA:
            found = f"version {wire.SCHEMA} of the protocol, found version {hello.schema}"
            return f"this collector speaks {found}; install the same gpuwatch on every node"
        if hello.agent != agent:
            return "its hello is another agent's"
        if hello.run not in ("", self.run_id):
            return f"this is run {self.run_id}, but the node joined run {hello.run} before"
        if any(node_of(other) == node_of(agent) and life_of(other) >= life_of(agent) for other in self.nodes):
            self.replays += 1
            return "a later agent of its launch has already joined"
        well = [name for name, node in self.nodes.items() if not node.lost and not node.failed]
        present = set(map(node_of, well))
        most = next(iter(self.nodes.values())).hello.max_nodes if self.nodes else 0
        if present and node_of(agent) not in present and len(present) >= most:
            return f"all {len(present)} nodes of this job have already joined"
        return ""

    def _enter(self, agent: str, hello: AgentHello, now: float) -> NodeState:
        for other, node in self.nodes.items():
            if node_of(other) == node_of(agent):
                node.replaced = True
        self.nodes[agent] = NodeState(hello, now)
        return self.nodes[agent]

    def _react(self, node: NodeState, body: wire.AgentBody, now: float) -> list[Action]:
        if isinstance(body, wire.EventMessage):
            return self._react_to_event(body, now)
        if isinstance(body, wire.NodeBye):
            node.bye, node.bye_at = body, now
            fixed = node.hello.min_nodes == node.hello.max_nodes
            if body.outcome != "ok" and not body.runs_on and (fixed or node.hello.starts_all):
                self._job_is_over(now)
        return []

    def _react_to_event(self, message: wire.EventMessage, now: float) -> list[Action]:
        event = message.event
        if isinstance(event, RankStall | RankLook | WorkerExit | ScriptError):
            number = self.asking.on_message(event, now)
            return self._to_all(wire.LookAtRanks(number)) if number is not None else []
        if isinstance(event, PreflightResult) and event.stops:
            self._job_is_over(now)
        if isinstance(event, SecondRun | ForwardCaptured):
            self._job_is_over(now)
        if not isinstance(event, Anomaly):
            return []
        if event.aborts:
            self._job_is_over(now + SECOND_RUN_S * event.looks)
        where = event.where
        key = (where.attempt, where.root, where.batch)
        if key in self._wanted:
            return []
        batches = [where.batch, where.batch - 1] if where.batch > 0 else [where.batch]  # the one before: its history
        self._wanted[key] = [wire.WantedBatch(where.attempt, *split_label(where.root), batch) for batch in batches]
        return self._to_all(*self._wanted[key])

    def look_for_viewers(self) -> list[Action]:
        """Every agent looks at its ranks; nothing is decided by it."""
        return self._to_all(wire.LookAtRanks(wire.SHOWN_LOOK))

    def watch_slow_rank(self, asked: wire.WatchSlowRank) -> list[Action]:
        """The agent whose rank it is looks at that rank."""
        return self._to_all(asked)

    def _to_all(self, *messages: CollectorMessage) -> list[Action]:
        speaking = [agent for agent, node in self.nodes.items() if not node.gone]
        return [SendMessage(agent, message) for message in messages for agent in speaking]

    def _conclude_asking(self, now: float) -> list[Action]:
        if not self.asking.is_open:
            return []
        announced = sum(node.hello.nproc for node in self.nodes.values() if not node.replaced)
        silent = ranks_by_host(
            (self.nodes[agent].hello.host, self.claims.ranks_of(node_of(agent))) for agent in self.lost_agents
        )
        concluded = self.asking.conclude(announced or self.claims.num_ranks, now, self.on_hang, silent)
        if concluded is None:
            return []
        found, ending = concluded
        overflow = self.overflow_at_rest()
        if overflow is not None and overflow.attempt == self.asking.attempt:
            return self._stands_after(overflow, found, ending)
        stop = self._to_all(wire.StopRanks("no rank moves any more", restart=True)) if ending.now else []
        text = f"{found.statement} {'; '.join(found.evidence)} ({ending.text})"
        return [NotifyUser(text), *stop]

    def _stands_after(self, overflow: RestingOverflow, found: HangFinding, ending: HangAction) -> list[Action]:
        """The overflow comes first: that the ranks wait may follow from it."""
        self.asking.last = None
        ends = self.ends_at_overflow and overflow.ends
        reason = "an overflow was found, and no rank moves any more" if ends else "no rank moves any more"
        stop = self._to_all(wire.StopRanks(reason, restart=not ends)) if ends or ending.now else []
        then = "ending the ranks for the overflow" if ends else ending.text
        text = f"{overflow.statement} No rank has moved since: {'; '.join(found.evidence)} ({then})"
        return [NotifyUser(text, Code.OVERFLOW), *stop]

    def _text_of(self, agent: str) -> str:
        return node_text({self.nodes[agent].hello.host: self.claims.ranks_of(node_of(agent))})

    def _tell_of_silence(self, now: float) -> list[Action]:
        """A node that is silent is told once, and once it is heard again. Not where all are: it may be this one that
        was stopped."""
        nodes = [node for node in self.nodes.values() if not node.replaced]
        heard = sum(not node.lost for node in nodes)
        if not heard or any(node.bye is not None for node in nodes):
            return []
        actions: list[Action] = []
        for agent, node in self.nodes.items():
            told_s = node.silent_s if node.was_killed else TOLD_S
            if node.lost and not node.told_silent and not node.replaced and now - node.heard > told_s:
                node.told_silent = True
                others = f"{heard} other node{' is' if heard == 1 else 's are'} heard"
                what = WAS_KILLED if node.was_killed else f"has been silent for {now - node.heard:.0f} s: {IS_LOST}"
                actions.append(NotifyUser(f"{self._text_of(agent)} {what}; {others}", Code.LOST))
            elif node.told_silent and not node.lost:
                node.told_silent = False
                actions.append(NotifyUser(f"{self._text_of(agent)} is heard again", Code.LOST))
        return actions

    def _job_is_over(self, at: float) -> None:
        self._over_since = at if self._over_since is None else min(self._over_since, at)

    def on_closed(self, agent: str, now: float) -> None:
        """The connection of an agent was closed. An agent that lives makes another."""
        if agent in self.nodes:
            self.nodes[agent].closed_at = now

    def launch_gone(self, now: float) -> None:
        """The launch that started this collector has ended or was killed."""
        if self._launch_gone_at is None:
            self._launch_gone_at = now

    def end_now(self, now: float) -> None:
        """The user ends a collector that was started by hand."""
        self._ended = True

    # -- time ---------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """Actions that are due by time alone."""
        if self._finished:
            return []
        actions: list[Action] = []
        for node in self.nodes.values():
            if not node.gone and now - node.heard > node.silent_s:
                node.lost = True
        actions += self._conclude_asking(now)
        actions += self._tell_of_silence(now)
        if self._over_since is not None and now - self._over_since >= STOP_AFTER_S:
            failed = sorted({node.hello.host for node in self.nodes.values() if node.failed})
            why = f"the job has ended on {', '.join(failed)}" if failed else "another rank has aborted the job"
            for agent, node in self.nodes.items():
                if not node.gone and not node.stopped:
                    node.stopped = True
                    actions.append(SendMessage(agent, wire.StopRanks(why)))
        if self._may_finish(now):
            self._finished = True
            actions.append(FinishRun())
        return actions

    def _may_finish(self, now: float) -> bool:
        if self._ended:
            return True
        nodes = [node for node in self.nodes.values() if not node.replaced]
        if not nodes:
            return self._launch_gone_at is not None and now - self._launch_gone_at > NOBODY_S
        byes = [node.bye_at for node in nodes if node.bye is not None]
        over = bool(byes) and self._over_since is not None and now - self._over_since >= STOP_AFTER_S
        silent = [node for node in nodes if node.bye is None and not (over and self._is_held(node))]
        if not silent:
            expected = max(self.expected_nodes, *(node.hello.min_nodes for node in nodes))
            # an agent that has said goodbye goes on beating until it has the verdict
            return len(nodes) >= expected or now - max(byes) > STOP_AFTER_S
        since = now - max(node.heard for node in silent)
        if byes:
            return now - min(byes) > LINGER_S or all(now - node.heard > node.patience_s for node in silent)
        launch_gone = self._launch_gone_at is not None and now - self._launch_gone_at > NOBODY_S
        return since > SILENT_S and (launch_gone or (self.by_hand and since > ABANDONED_S))

    def _is_held(self, node: NodeState) -> bool:
        """Its ranks have all left with exit code 0, so torchrun's exit barrier holds its launch: for five minutes, as
        the others have failed. It has nothing to add."""
        ranks = self.claims.ranks_of(node_of(node.hello.agent))
        return len(ranks) >= max(1, node.hello.nproc) and self.asking.have_left(self.claims.last_attempt, ranks)

    @property
    def lost_agents(self) -> list[str]:
        """Agents that went silent."""
        return [a for a, node in self.nodes.items() if node.lost and node.bye is None and not node.replaced]

    @property
    def killed_agents(self) -> list[str]:
        """Those of them that were ended, and their launches with them."""
        return [agent for agent in self.lost_agents if self.nodes[agent].was_killed]
