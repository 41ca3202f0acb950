"""The verdict: which rank and module was first, why we know, and how sure we are. A pure function of the facts.

Clocks of different hosts are not compared (DiagnosisOrder). Between two matching collectives there is only local order,
so two origins there are concurrent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from ...core.codes import Certainty, NodeBlame, VerdictKind
from ...core.gpu.counters import GpuSincePreflight, gpu_of_rank, since_preflight
from ...core.wire.batch_job import SchedulerJob, fill_command
from ...core.wire.messages import AgentHello
from ..ends.abort_verdict import abort_verdict, missed_init_verdict
from ..ends.ending_verdict import ending_verdict, interrupted_verdict, unexplained_verdict
from ..ends.hang_verdict import ended_verdict, hang_verdict
from ..ends.killed_together import killed_together_verdict
from ..ends.lost_node import lost_node_verdict
from ..ends.missing_nodes import unheard_nodes
from ..ends.orphaned_ranks import orphaned_steps
from ..ends.preempted_ranks import preemption_verdict
from ..ends.teardown_verdict import teardown_verdict
from ..facts.rank_facts import RankFacts
from ..facts.run_facts import NodeFacts, RunFacts
from ..report.verdict import Verdict
from .clean_verdict import clean_verdict, unnamed_overflow_verdict
from .overflow_verdict import overflow_verdict
from .preflight_verdict import check_verdict, findings_of, preflight_verdict
from .proof_gaps import lost_messages


def decide(facts: RunFacts) -> Verdict:
    """The verdict of a run."""
    for rule in (
        preflight_verdict,
        overflow_verdict,
        unnamed_overflow_verdict,
        hang_verdict,
        preemption_verdict,
        killed_together_verdict,
        teardown_verdict,
        ended_verdict,
        abort_verdict,
        missed_init_verdict,
        ending_verdict,
        lost_node_verdict,
        interrupted_verdict,
        check_verdict,
        unexplained_verdict,
    ):
        verdict = rule(facts)
        if verdict is not None:
            verdict = _without_nodes(facts, _less_sure(facts, verdict))
            return _with_drain(facts, _with_gpu(facts, replace(verdict, next=[*orphaned_steps(facts), *verdict.next])))
    return _without_nodes(facts, clean_verdict(facts))


def _less_sure(facts: RunFacts, verdict: Verdict) -> Verdict:
    """Lower the certainty if messages are missing: one may have reported an earlier event."""
    lost = lost_messages(facts)
    if not lost or verdict.certainty != Certainty.ESTABLISHED:
        return verdict
    return replace(verdict, certainty=Certainty.SUPPORTED, evidence=[*verdict.evidence, *lost])


def _without_nodes(facts: RunFacts, verdict: Verdict) -> Verdict:
    """A node of which nothing has come may have been the first. The preflight has heard it: ranks meet in a store."""
    lines, steps = unheard_nodes(facts)
    if not lines or verdict.kind == VerdictKind.PREFLIGHT:
        return verdict
    certainty = Certainty.SUPPORTED if verdict.certainty == Certainty.ESTABLISHED else verdict.certainty
    lines = [line for line in lines if line not in verdict.evidence]
    return replace(verdict, certainty=certainty, evidence=[*verdict.evidence, *lines], next=[*steps, *verdict.next])


# A rank's GPU during the run: its error counters since the preflight, and the driver's XIDs.

_MAX_LINES = 6


def gpu_of(facts: RunFacts, rank: RankFacts) -> GpuSincePreflight | None:
    """A rank's GPU since the preflight; None if it has none, or it is unknown which."""
    node, uuid = facts.nodes.get(rank.agent), uuid_of(rank)
    return since_preflight(node.gpu_events, uuid) if uuid and node is not None else None


def uuid_of(rank: RankFacts) -> str:
    """UUID of a rank's GPU; "" if it has none, or it is unknown which."""
    known = rank.inventory.facts if rank.inventory is not None else None
    return gpu_of_rank(known.uuid, known.local_rank, known.environment) if known is not None else ""


def _with_gpu(facts: RunFacts, verdict: Verdict) -> Verdict:
    rank = facts.named(verdict.attempt, verdict.rank)
    gpu = gpu_of(facts, rank) if rank is not None else None
    if gpu is None:
        return verdict
    steps = [*(xid.next for xid in gpu.xids if xid.next and xid.grade != "ok"), *verdict.next]
    return replace(verdict, evidence=[*verdict.evidence, *gpu_lines(gpu)], next=list(dict.fromkeys(steps)))


def gpu_lines(gpu: GpuSincePreflight) -> list[str]:
    """XIDs of the GPU and changes of its counters since the preflight, a line each."""
    lines = []
    for xid in gpu.xids[:_MAX_LINES]:
        meaning = f" ({xid.meaning})" if xid.meaning else ""
        lines.append(f"the driver reported XID {xid.number}{meaning} for its GPU {xid.device}")
    if len(gpu.xids) > _MAX_LINES:
        lines.append(f"and {len(gpu.xids) - _MAX_LINES} more XIDs")
    lines += [f"its GPU since the preflight, {change.grade}: {change.sentence}" for change in gpu.changes[:_MAX_LINES]]
    if not gpu.known:
        return [*lines, f"its GPU {gpu.device} since the preflight: unknown, {gpu.unknown.get('', 'no reading')}"]
    if not lines:
        lines.append(f"its GPU {gpu.device}: no error counter has grown since the preflight, and no XID was reported")
    if gpu.unknown:
        lines.append(f"could not be read from it: {', '.join(sorted(gpu.unknown))}")
    return lines


# What to do about a node that the verdict blames: the scheduler's command that drains it, and a next job without it.
#
# There is advice only where a scheduler runs the job and has named its nodes. Where all nodes of a job would be blamed,
# none is: then it is not the node.

_OWN_TO_THE_NODE = ("rank", "gpu", "node")
"""Subjects of preflight findings that blame a node. A link has two ends, and it is unknown which is bad."""


def _with_drain(facts: RunFacts, verdict: Verdict) -> Verdict:
    """The verdict with its advice, if it blames a node."""
    hellos = facts.hellos
    jobs = [hello.job for hello in hellos if hello.job is not None and hello.job.node]
    blamed = _blamed(facts, verdict, hellos) if jobs else {}
    known = {name for job in jobs for name in (*job.nodes, job.node)}
    if not blamed or (len(known) > 1 and known <= blamed.keys()):
        return verdict
    why = ", ".join(dict.fromkeys(blamed.values()))
    lines = advice(sorted(blamed), why, jobs[0], facts.blamed_before)
    return replace(verdict, bad_nodes=sorted(blamed), next=[*verdict.next, *lines])


def advice(nodes: list[str], why: str, job: SchedulerJob, before: Mapping[str, int]) -> list[str]:
    """Advice for those who may drain a node, and for those who may not. A command stands on its own line, to be copied.

    `before`: how many earlier runs blame each node.

    scontrol update nodename=gpu-7 state=drain reason='gpuwatch: preflight compute, job 17, blamed by 2 earlier runs'
    """
    reason = f"gpuwatch: {why}, job {job.job}{_also(nodes, before)}"
    them = "it" if len(nodes) == 1 else "them"
    lines = (
        (f"Drain {them}, or ask an administrator to:", job.drain),
        (f"Leave {them} out of the next run (gpuwatch submit --exclude-bad RUN does this):", job.exclude),
    )
    return [f"{title}\n{fill_command(command, nodes, reason)}" for title, command in lines if command]


def _also(nodes: list[str], before: Mapping[str, int]) -> str:
    """`, blamed by 2 earlier runs`, or of several nodes `, blamed by earlier runs: gpu-1 by 2, gpu-3 by 1`."""
    known = {node: before[node] for node in nodes if before.get(node)}
    if len(nodes) == 1:
        return "".join(f", blamed by {runs} earlier run{'s' * (runs > 1)}" for runs in known.values())
    each = ", ".join(f"{node} by {runs}" for node, runs in known.items())
    return f", blamed by earlier runs: {each}" if each else ""


def _blamed(facts: RunFacts, verdict: Verdict, hellos: list[AgentHello]) -> dict[str, str]:
    if verdict.kind.blames == NodeBlame.PREFLIGHT:
        return _by_preflight(facts, verdict, hellos)
    blamed: dict[str, str] = {}
    if verdict.kind.blames == NodeBlame.SILENT and verdict.signal is None:
        blamed = dict.fromkeys([*_names(node for node in facts.nodes.values() if node.lost), *facts.down_nodes], "lost")
    rank = facts.named(verdict.attempt, verdict.rank)
    if rank is not None and rank.agent in facts.nodes:
        gpu = gpu_of(facts, rank)
        if gpu is not None and gpu.grade == "fail":
            blamed.update(dict.fromkeys(_names([facts.nodes[rank.agent]]), f"errors of GPU {gpu.device}"))
    return blamed


def _by_preflight(facts: RunFacts, verdict: Verdict, hellos: list[AgentHello]) -> dict[str, str]:
    """The nodes blamed in the verdict's stage. A difference between nodes is the job owner's to settle."""
    if verdict.stage is None or verdict.stage == "consistency" or verdict.certainty == Certainty.UNKNOWN:
        return {}
    ranks = facts.of_attempt(facts.last_attempt)
    bad = [finding for finding in findings_of(ranks) if finding.grade == "fail" and finding.stage == verdict.stage]
    names: list[str] = []
    for finding in bad:
        if finding.subject in _OWN_TO_THE_NODE:
            agents = {rank.agent for rank in ranks if rank.rank in finding.ranks}
            names += _names(facts.nodes[agent] for agent in sorted(agents) if agent in facts.nodes)
            names += [_name(hello) for hello in hellos if hello.host in finding.hosts]
    rank = facts.named(facts.last_attempt, verdict.rank)
    if not bad and rank is not None and rank.agent in facts.nodes:
        names += _names([facts.nodes[rank.agent]])
    if not names and verdict.stage == "arrive":
        arrived = {_name(hello) for hello in hellos}
        expected = next((hello.job.nodes for hello in hellos if hello.job is not None), [])
        names = [name for name in expected if name not in arrived]
    return dict.fromkeys(filter(None, names), f"preflight {verdict.stage}")


def _names(nodes: Iterable[NodeFacts]) -> list[str]:
    return [name for node in nodes if node.hello is not None and (name := _name(node.hello))]


def _name(hello: AgentHello) -> str:
    return hello.job.node if hello.job is not None else ""
