"""The verdict over a node that was lost: it went silent, was killed whole, or its scheduler says so. Pure."""

from __future__ import annotations

from ...core.codes import Certainty, VerdictKind
from ..facts.run_facts import RunFacts
from ..facts.words import cascade_of, progress_of
from ..report.sentence_parts import ranks_text
from ..report.verdict import Verdict
from .silent_nodes import WAS_KILLED, WAS_SILENT


def lost_node_verdict(facts: RunFacts) -> Verdict | None:
    """A node that went silent while the job failed elsewhere, or that the scheduler has lost."""
    lost = [node for node in facts.nodes.values() if node.lost] if facts.failed else []
    if not lost:
        return _down_verdict(facts)
    hosts = ", ".join(sorted(node.name for node in lost))
    ranks = sorted({rank.rank for rank in facts.ranks.values() if rank.agent in {node.agent for node in lost}})
    what, evidence, step = WAS_SILENT, f"the agent on {hosts} sent no more messages, and no goodbye", ""
    if all(node.killed for node in lost):
        what = WAS_KILLED
        evidence = f"the launch and the agent on {hosts} held one connection; it was closed there, with no goodbye"
        step = f"Look on {hosts} for what ended its processes: uptime, dmesg -T, the scheduler's log. "
    return Verdict(
        VerdictKind.LOST,
        f"Node {hosts} ({_who(ranks)}) {what}.",
        Certainty.SUPPORTED,
        rank=ranks[0] if len(ranks) == 1 else None,
        host=hosts,
        attempt=facts.last_attempt,
        evidence=[evidence],
        cascade=cascade_of(facts, facts.last_attempt, set(ranks)),
        next=[f"{step}Check whether {hosts} is up; if not, leave it out of the next run."],
    )


def _down_verdict(facts: RunFacts) -> Verdict | None:
    """The scheduler has lost a node and ended the job for it. The node itself may still run."""
    down = facts.down_nodes
    if not down:
        return None
    jobs = {n.agent: n.hello.job for n in facts.nodes.values() if n.hello is not None and n.hello.job is not None}
    agents = {agent for agent, job in jobs.items() if job.node in down}
    scheduler = next((job.scheduler for job in jobs.values()), "The scheduler")
    daemon = next((job.daemon for job in jobs.values() if job.daemon), "")
    told_by = next((n.signal.told_by for n in facts.nodes.values() if n.signal and n.signal.told_by), "its scheduler")
    ranks = sorted({rank.rank for rank in facts.of_attempt(facts.last_attempt) if rank.agent in agents})
    names = ", ".join(down)
    return Verdict(
        VerdictKind.LOST,
        f"{scheduler} has lost node {names} ({_who(ranks)}) and ended the job.",
        Certainty.ESTABLISHED,
        rank=ranks[0] if len(ranks) == 1 else None,
        host=names,
        attempt=facts.last_attempt,
        evidence=[f"{told_by} says that {names} is down", *progress_of(facts, facts.last_attempt)],
        next=[f"Check whether {names} is up{f' and its {daemon} runs' if daemon else ''}."],
    )


def _who(ranks: list[int]) -> str:
    return ranks_text(ranks) if ranks else "no rank known"
