"""Who has arrived, and who is missing: "ranks 9-15 (node gpu-017) did not arrive within 60 s". Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....core.preflight import Finding
from ....core.text.ranks_text import ranks_text
from ..reports import Attendance, Roster


def roster_of(present: Mapping[int, Attendance], world_size: int) -> Roster:
    """The roster of a job in which all ranks have arrived. NCCL only if every rank has its own GPU."""
    by_rank = [present[rank] for rank in range(world_size)]
    return Roster(
        hosts=[one.host for one in by_rank],
        nodes=[one.node for one in by_rank],
        local_ranks=[one.local_rank for one in by_rank],
        backend="nccl" if all(one.device.startswith("cuda") for one in by_rank) else "gloo",
        gpus=[one.gpu for one in by_rank],
    )


def nodes_of(missing: Sequence[int], present: Mapping[int, Attendance], world_size: int) -> dict[int, int | None]:
    """The node of each missing rank, where it can be known.

    torchrun numbers the ranks node by node. So a rank that has arrived implies which other ranks are on its node. The
    ranks between two such blocks belong to the nodes between them, which are taken to be of equal size.
    """
    blocks: dict[int, tuple[int, int]] = {}  # node -> (first rank, how many)
    for rank, one in present.items():
        blocks[one.node] = (rank - one.local_rank, one.local_world_size)
    found: dict[int, int | None] = dict.fromkeys(missing)
    for node, (first, size) in blocks.items():
        found.update({rank: node for rank in range(first, first + size) if rank in found})
    sizes = {size for _, size in blocks.values()}
    if len(sizes) == 1:  # nearly always: all nodes have equally many ranks
        size = sizes.pop()
        if world_size % size == 0 and all(first == node * size for node, (first, _) in blocks.items()):
            found = {rank: rank // size if node is None else node for rank, node in found.items()}
    return found


def missing_findings(
    missing: Sequence[int],
    present: Mapping[int, Attendance],
    world_size: int,
    known_hosts: Sequence[str],
    timeout_s: float,
) -> list[Finding]:
    """One finding per node with missing ranks. `known_hosts`: the hosts of all nodes in their order, [] if unknown."""
    hosts = {one.node: one.host for one in present.values()}
    hosts = {**dict(enumerate(known_hosts)), **hosts}
    nodes = nodes_of(missing, present, world_size)
    groups: dict[int | None, list[int]] = {}
    for rank in missing:
        groups.setdefault(nodes[rank], []).append(rank)
    findings = []
    for node, ranks in groups.items():
        host = hosts.get(node, "") if node is not None else ""
        place = f" (node {host})" if host else f" (node number {node})" if node is not None else ""
        whole = node is not None and not any(one.node == node for one in present.values())
        findings.append(
            Finding(
                stage="arrive",
                grade="fail",
                subject="node" if whole else "rank",
                ranks=ranks,
                hosts=[host] if host else [],
                sentence=f"{ranks_text(ranks)}{place} did not arrive within {timeout_s:.0f} s",
                next=(
                    f"Look at {host or 'the node of these ranks'}: is it up, does torchrun run there, does it reach "
                    "the others? If the ranks only start late, give them longer with --preflight-timeout SECONDS."
                ),
                victims=sorted(present),
            )
        )
    return findings
