"""Limits of a host that a training job may hit later: shared memory, open files, locked memory."""

from __future__ import annotations

from collections.abc import Callable

from ....core.preflight import Finding, InventoryFacts
from .majority import Facts, finding, have, place_text

SHM_BYTES = 1 << 30
"""NVIDIA's recommendation for a container (--shm-size=1g). Docker's default is 64 MiB."""
FILES = 512
"""For Python, torch, the pipes of a data loader, and NCCL within one node."""
FILES_PER_RANK = 16
"""Sockets to every other rank: gloo has one per group, NCCL up to 16 per connection on a fast network."""
MEMLOCK_BYTES = 1 << 30
"""InfiniBand locks its send buffers, hundreds of MB per rank. The defaults of distributions are 64 KiB or 8 MiB."""


def tight_limits(facts: Facts) -> list[Finding]:
    """Warnings about low limits. They are not failures, since the needs of a job are unknown beforehand."""
    files = FILES + FILES_PER_RANK * len(facts)
    found = [
        _below(
            facts,
            lambda known: known.shm_free,
            SHM_BYTES,
            lambda least: f"only {_mib(least)} of /dev/shm free, where NCCL and data loaders put what they share",
            "Start the container with --shm-size=1g or more (--ipc=host), or remove what fills /dev/shm",
        ),
        _below(
            facts,
            lambda known: _limit(known, "nofile"),
            files,
            lambda least: f"a limit of {least} open files, where {len(facts)} ranks may need {files}",
            f"Raise it before the launch (ulimit -n {max(files, 65536)}), or LimitNOFILE of the service that starts it",
        ),
    ]
    if len({known.node for known in facts.values()}) > 1:
        with_rdma = {rank: known for rank, known in facts.items() if _uses_rdma(known)}
        found.append(
            _below(
                with_rdma,
                lambda known: _limit(known, "memlock"),
                MEMLOCK_BYTES,
                lambda least: (
                    f"a limit of {_mib(least)} on locked memory, with which NCCL cannot use InfiniBand or RoCE"
                ),
                "Set it to unlimited (ulimit -l unlimited, --ulimit memlock=-1 for a container, LimitMEMLOCK=infinity "
                "for slurmd), or do without the adapters (NCCL_IB_DISABLE=1)",
            )
        )
    return [one for one in found if one is not None]


def _below(
    facts: Facts,
    amount: Callable[[InventoryFacts], int | None],
    enough: int,
    said: Callable[[int], str],
    next_step: str,
) -> Finding | None:
    """A warning about all ranks whose limit is too low."""
    known = {rank: value for rank in sorted(facts) if (value := amount(facts[rank])) is not None}
    short = [rank for rank, value in known.items() if value < enough]
    if not short:
        return None
    least = min(known[rank] for rank in short)
    return finding("warn", "node", short, facts, f"{place_text(short, facts)} {have(short)} {said(least)}", next_step)


def _limit(known: InventoryFacts, name: str) -> int | None:
    """None if it is unlimited or unknown."""
    limit = known.limits.get(name, -1)
    return limit if limit >= 0 else None


def _uses_rdma(known: InventoryFacts) -> bool:
    return (
        bool(known.rdma_devices)
        and known.device.startswith("cuda")
        and known.environment.get("NCCL_IB_DISABLE", "0") in ("", "0")
        and known.environment.get("NCCL_NET", "").casefold() != "socket"
    )


def _mib(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
