"""What the run has done to the GPU of a rank: its error counters since the preflight, and the driver's XIDs."""

from __future__ import annotations

from msgspec.structs import replace

from ...core.gpu_health.difference import GpuSincePreflight, since_preflight
from ...core.gpu_health.whose import gpu_of_rank
from ...core.records import Xid
from ..facts.facts import RankFacts, RunFacts
from .verdict_model import Verdict

_MAX_LINES = 6


def gpu_of(facts: RunFacts, rank: RankFacts) -> GpuSincePreflight | None:
    """A rank's GPU since the preflight; None if it has none, or it is unknown which."""
    node, uuid = facts.nodes.get(rank.agent), uuid_of(rank)
    return since_preflight(node.gpu_events, uuid) if uuid and node is not None else None


def uuid_of(rank: RankFacts) -> str:
    """UUID of a rank's GPU; "" if it has none, or it is unknown which."""
    known = rank.inventory.facts if rank.inventory is not None else None
    return gpu_of_rank(known.uuid, known.local_rank, known.environment) if known is not None else ""


def with_gpu(facts: RunFacts, verdict: Verdict) -> Verdict:
    """The verdict with evidence about the GPU of the rank that it names."""
    if verdict.rank is None or verdict.attempt is None:
        return verdict
    rank = facts.ranks.get((verdict.attempt, verdict.rank))
    gpu = gpu_of(facts, rank) if rank is not None else None
    if gpu is None:
        return verdict
    steps = [xid.next for xid in gpu.xids if xid.next and xid.grade != "ok"]
    return replace(
        verdict,
        evidence=[*verdict.evidence, *gpu_lines(gpu)],
        next=list(dict.fromkeys([*steps, *verdict.next])),
    )


def gpu_lines(gpu: GpuSincePreflight) -> list[str]:
    """What the run has done to it, a line each."""
    lines = [_xid_text(xid) for xid in gpu.xids[:_MAX_LINES]]
    if len(gpu.xids) > _MAX_LINES:
        lines.append(f"and {len(gpu.xids) - _MAX_LINES} more XIDs")
    lines += [f"its GPU since the preflight, {change.grade}: {change.sentence}" for change in gpu.changes[:_MAX_LINES]]
    if not gpu.known:
        return [*lines, f"its GPU {gpu.device} since the preflight: unknown, {gpu.unknown.get('', 'no reading')}"]
    if not lines:
        lines.append(f"its GPU {gpu.device}: no error counter has grown since the preflight, and no XID was reported")
    if gpu.unknown:
        lines.append(f"not read from it: {', '.join(sorted(gpu.unknown))}")
    return lines


def _xid_text(xid: Xid) -> str:
    meaning = f" ({xid.meaning})" if xid.meaning else ""
    return f"the driver reported XID {xid.number}{meaning} for its GPU {xid.device}"
