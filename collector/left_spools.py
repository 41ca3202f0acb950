"""The spools that nodes of a run have left in its runs folder, as no collector took their records.

A spool belongs to the run if both have an attempt of one name: the launches of an attempt have drawn it together, and
no other job has it (`AttemptNodes`). Where the nodes do not share the folder, somebody copies the spool there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..core.errors import GpuwatchError
from ..core.events.node_events import AttemptNodes
from ..core.wire.messages import AgentMessage, EventMessage
from ..core.wire.spool import SUFFIX, agent_of, read_spool
from .facts.fold import FactFold
from .facts.run_facts import RunFacts
from .run_files import RunPaths


def add_left_spools(folded: FactFold, runs: Path) -> None:
    """Fold what the spools in `runs` have of the run, too. They are looked for only where the records lack a node."""
    facts = folded.as_it_stands()
    if not _lacks_a_node(facts):
        return
    names = {attempt.name for attempt in facts.attempts.values()}
    for path, messages in _spools(runs):
        if names & _attempts_of(messages):
            agent = agent_of(messages, path)
            for message in messages:
                folded.add(agent, message.n, message.body, spool=path.name)


def has_new_spools(paths: RunPaths) -> bool:
    """Whether a spool has come beside a run since its report was made: it may be a node's that the report lacks."""
    with suppress(OSError):
        made = paths.report_json.stat().st_mtime_ns
        # a copy may keep the time of the original, but not that of the last change of its own entry
        return any(path.stat().st_ctime_ns > made for path in paths.folder.parent.glob(f"*{SUFFIX}"))
    return False


def _lacks_a_node(facts: RunFacts) -> bool:
    """Whether an attempt had more nodes than were heard to their end."""
    most = max((len(attempt.hosts) for attempt in facts.attempts.values()), default=0)
    return most > sum(node.bye is not None for node in facts.nodes.values())


def _spools(runs: Path) -> Iterator[tuple[Path, list[AgentMessage]]]:
    """Those of this user. What cannot be read is left alone."""
    for path in sorted(runs.glob(f"*{SUFFIX}")):
        with suppress(OSError, GpuwatchError):
            if path.stat().st_uid == os.geteuid():
                yield path, read_spool(path)


def _attempts_of(messages: list[AgentMessage]) -> set[str]:
    events = (message.body.event for message in messages if isinstance(message.body, EventMessage))
    return {event.name for event in events if isinstance(event, AttemptNodes)}
