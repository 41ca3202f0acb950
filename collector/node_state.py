"""What the collector knows of one agent: how far it was heard, and how long its silence may last. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ..core.wire.messages import AgentHello, NodeBye

SILENT_S = 20.0
"""An agent beats twice a second. After this silence it counts as lost until it is heard again."""
KILLED_S = 4.0
"""The same, where its connection was closed at its end, and the launch had held it, too: both have ended. If something
on the way has closed it, the agent connects again, with 2 s at most between two tries."""
GONE_S = 60.0
"""Once one agent has said goodbye, the report is made without another that is silent for longer than this: a link that
is down may come back. An agent whose end of the connection was closed is waited for until it counts as lost: only a
launch that has started another one could say more."""
AT_ITS_END_S = 5.0
"""A connection that is closed within this time of the last message was closed at the agent's end: where a link is down,
ZeroMQ gives the connection up after 30 s (`heartbeat_ttl`)."""
ON_THE_WAY_S = 1.0
"""How much later than the end of its connection a message may be read that came through it."""


@dataclass
class NodeState:
    """The agent, and so the node, of one name. Times are seconds of the collector's clock."""

    hello: AgentHello
    heard: float
    closed_at: float = -inf
    """When its connection was closed last."""
    launch_holds: bool = False
    """Its launch holds the connection, too."""
    received: int = 0
    """The last number up to which everything was heard."""
    stored: int = 0
    """The last number that is acknowledged: everything up to it is durable."""
    bye: NodeBye | None = None
    bye_at: float = 0.0
    lost: bool = False
    told_silent: bool = False
    stopped: bool = False
    replaced: bool = False
    """Its agent had ended, and the launch has started it again under another name."""
    restored: bool = False
    """Known from the store of a collector that had ended, and not heard since."""

    @property
    def gone(self) -> bool:
        """It says nothing more that the others wait for."""
        return self.bye is not None or self.lost or self.replaced

    @property
    def was_closed(self) -> bool:
        """Its connection was closed at its end, and nothing was heard since."""
        return self.closed_at - AT_ITS_END_S < self.heard < self.closed_at + ON_THE_WAY_S

    @property
    def was_killed(self) -> bool:
        """Neither the launch nor the agent lives any more, and neither has said goodbye."""
        return self.launch_holds and self.was_closed and self.bye is None

    @property
    def silent_s(self) -> float:
        """After this silence it counts as lost."""
        return KILLED_S if self.was_killed else SILENT_S

    @property
    def patience_s(self) -> float:
        """How long its silence may last, once another node has said goodbye."""
        return self.silent_s if self.was_closed else GONE_S

    @property
    def failed(self) -> bool:
        """It has said goodbye, and its ranks did not end well."""
        return self.bye is not None and self.bye.outcome != "ok"
