"""What the protocol has the collector do: protocol.py decides it, and server.py does it."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.codes import Code
from ..core.wire.messages import CollectorMessage


@dataclass(frozen=True)
class SendMessage:
    """Send a message to an agent."""

    agent: str
    message: CollectorMessage


@dataclass(frozen=True)
class StoreMessage:
    """Put the message that was heard into the store; it is acknowledged once it is durable there (`committed`)."""


@dataclass(frozen=True)
class LookAhead:
    """Inspect the event that was heard now, though earlier messages are missing; the agent sends it again, in order."""


@dataclass(frozen=True)
class FinishRun:
    """All agents are done: decide, and write the report."""


@dataclass(frozen=True)
class NotifyUser:
    """Tell the user something now."""

    text: str
    code: Code = Code.HANG


Action = SendMessage | StoreMessage | LookAhead | FinishRun | NotifyUser
