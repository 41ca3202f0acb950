"""The ranks meet in a store: each writes a report, one draws the conclusion, all read it, and no key remains.

For every step of the preflight, the keys are these, below a prefix of this attempt:

    arrive/0 ... arrive/511     a rank's report; the rank deletes it after it has read the conclusion
    arrive/conclusion           drawn by rank 0 from all reports; if rank 0 gives none in time, by another rank
    arrive/deputy               that other rank
    arrive/failed               the first rank whose own part failed: the others need not wait for it in a process group
    left                        number of ranks that have left; the last one deletes the remaining keys
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ...core.identity import RankIdentity
from ...core.preflight import SealBroken, WordSeal
from ...core.text import first_line

LEADER = 0
FAILED = "failed"


class StoreLost(Exception):
    """The store cannot be reached, or no longer answers."""


class ForeignValue(StoreLost):
    """A process without the job's key writes into the store."""


class NoConclusion(Exception):
    """Neither the leader nor a deputy has drawn a conclusion in time."""


@dataclass(frozen=True)
class MetReports:
    """The reports of the ranks in one step."""

    by_rank: dict[int, bytes]
    silent: list[int]
    leader_failed: bool = False
    """Rank 0 gave no conclusion, and a deputy reads the reports."""
    foreign: dict[int, str] = field(default_factory=dict)
    """Rank -> message: a process without the job's key has written in the place of this rank."""


def connect(identity: RankIdentity, timeout_s: float) -> Any:
    """A new client of the store. A client made before a fork must not be used after it. Raises StoreLost."""
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]  # torch re-exports it without saying so
            identity.master_addr,
            identity.master_port,
            world_size=None,
            is_master=False,
            timeout=timedelta(seconds=max(1.0, timeout_s)),
            wait_for_workers=False,
        )
    except Exception as error:  # torch raises DistNetworkError, older versions raise RuntimeError
        raise StoreLost(first_line(error)) from error


def store_below(identity: RankIdentity, prefix: str, timeout_s: float) -> Store:
    """A new client of the store for the child that makes a process group. It sees the keys below `prefix`."""
    return PrefixStore(prefix, connect(identity, timeout_s))


class StoreRendezvous:
    """One rank's access to the meeting. Every method may raise StoreLost."""

    def __init__(self, store: Any, prefix: str, rank: int, world_size: int, key: str = "") -> None:
        """`key` seals reports and conclusions; without one they are as anybody may have written them."""
        self._seal = WordSeal(key)
        self._base = store
        self._store = PrefixStore(prefix, store)
        self._prefix = prefix
        self._rank = rank
        self._world_size = world_size

    def meet(
        self,
        step: str,
        report: bytes,
        conclude: Callable[[MetReports], bytes],
        *,
        reports_s: float,
        conclusion_s: float,
        deputy_s: float,
        failed: bool = False,
    ) -> bytes:
        """Write this rank's report and return the conclusion. Raises NoConclusion if there is none in time.

        `failed`: this rank's own part of the step has failed.
        """
        try:
            if failed:
                self._store.compare_set(f"{step}/{FAILED}", "", str(self._rank))
            mine = f"{step}/{self._rank}"
            self._store.set(mine, self._seal.close(f"{self._prefix}/{mine}", report.decode()))
            if self._rank == LEADER:
                self._publish(step, conclude(self._gather(step, reports_s)))
            if not self._wait([f"{step}/conclusion"], conclusion_s):
                deputy = self._store.compare_set(f"{step}/deputy", "", str(self._rank)).decode()
                if deputy == str(self._rank):
                    found = self._gather(step, 0.0)
                    self._publish(step, conclude(replace(found, leader_failed=True)))
                elif not self._wait([f"{step}/conclusion"], deputy_s):
                    raise NoConclusion(step)
            conclusion = self._opened(f"{step}/conclusion", self._store.get(f"{step}/conclusion"))
            self._store.delete_key(mine)
            return conclusion
        except SealBroken as error:
            raise ForeignValue(str(error)) from error
        except (RuntimeError, OSError) as error:
            raise StoreLost(first_line(error)) from error

    def leave(self, steps: list[str], arrived: int) -> None:
        """Leave the meeting. The last of the `arrived` ranks deletes the keys of `steps`, the steps it has run.

        If ranks are missing, the first conclusion stays: a rank that arrives late finds in it that it was missed.
        """
        try:
            count = self._store.add("left", 1)
            if count < arrived:
                return
            late = [f"{steps[0]}/conclusion", "left"] if steps and count < self._world_size else []
            for key in self._keys(steps):
                if key not in late:
                    self._store.delete_key(key)
        except (RuntimeError, OSError) as error:
            raise StoreLost(first_line(error)) from error

    def _keys(self, steps: list[str]) -> list[str]:
        """All keys below our prefix, including those of process groups if torch can list keys (2.5 cannot)."""
        if not hasattr(self._base, "list_keys"):
            return [*(f"{step}/{name}" for step in steps for name in ("conclusion", "deputy", FAILED)), "left"]
        prefix = f"{self._prefix}/"
        keys = [key.removeprefix("/") for key in self._base.list_keys()]
        return [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]

    def _publish(self, step: str, conclusion: bytes) -> None:
        """Set the conclusion, unless there is one already."""
        name = f"{step}/conclusion"
        self._store.compare_set(name, "", self._seal.close(f"{self._prefix}/{name}", conclusion.decode()))

    def _opened(self, name: str, sealed: bytes) -> bytes:
        return self._seal.open(f"{self._prefix}/{name}", sealed)

    def _gather(self, step: str, timeout_s: float) -> MetReports:
        ranks = range(self._world_size)
        if not self._wait([f"{step}/{rank}" for rank in ranks], timeout_s):
            ranks = [rank for rank in ranks if self._store.check([f"{step}/{rank}"])]  # type: ignore[assignment]
        values = self._store.multi_get([f"{step}/{rank}" for rank in ranks]) if len(ranks) else []
        by_rank: dict[int, bytes] = {}
        foreign: dict[int, str] = {}
        for rank, value in zip(ranks, values, strict=True):
            try:
                by_rank[rank] = self._opened(f"{step}/{rank}", value)
            except SealBroken as error:
                foreign[rank] = str(error)
        silent = [rank for rank in range(self._world_size) if rank not in by_rank and rank not in foreign]
        return MetReports(by_rank, silent, foreign=foreign)

    def _wait(self, keys: list[str], timeout_s: float) -> bool:
        """Whether all keys exist in time. The store does the waiting, without polling."""
        deadline = time.monotonic() + timeout_s
        try:
            self._store.wait(keys, timedelta(seconds=max(0.05, timeout_s)))
        except RuntimeError as error:  # torch raises its subclass DistStoreError
            if "imeout" not in str(error) and time.monotonic() < deadline:
                raise
            return False
        return True
