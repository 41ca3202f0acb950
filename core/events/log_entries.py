"""All that may stand in a recorder's log, and all events that may reach the collector."""

from __future__ import annotations

from .across_ranks import SharedEvent
from .agent_events import AgentEvent
from .alarm_evidence import EvidenceEvent
from .alarms import AlarmEvent
from .definitions import Definition
from .node_events import NodeEvent
from .own_limits import LimitEvent
from .preflight_events import PreflightEvent
from .script_events import ScriptEvent

WorkerEvent = AlarmEvent | EvidenceEvent | SharedEvent | LimitEvent | ScriptEvent | PreflightEvent
"""What a worker itself appends to its recorder's log."""
Event = WorkerEvent | AgentEvent | NodeEvent
LogEntry = Definition | WorkerEvent
