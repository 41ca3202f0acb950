"""The preflight's child process: can this rank allocate, reach the others, and do the sums come out right?

It runs beside no CUDA context of the training and can be killed when a collective hangs, which nothing can do from
inside a process. The process group lives on a prefix of its own in torchrun's store, so nothing of it is met by the
script's own init_process_group.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from .identity import Identity
from .probe_report import STAGES, AllOutcomes, Line, Outcome, RankOutcome, Runtime, StageBegan, StageEnded

CPU_BYTES = 64 << 20
CUDA_BYTES = 1 << 30
_FAILED = "failed"
"""In place of its backend: what a rank that failed early says on arrival."""

CUDA_SHARE = 0.1
"""A tenth of the free memory at most: quick, and never what the script would miss."""


class ProbeFailure(Exception):
    """A check of this rank did not hold; `peers` are the ranks that are to blame, if it is not this one."""

    def __init__(self, detail: str, peers: list[int] | None = None) -> None:
        super().__init__(detail)
        self.peers = peers


def say(line: Line) -> None:
    """One line for the worker."""
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


class Probe:
    """One run of the stages."""

    def __init__(self, identity: Identity, prefix: str, timeout_s: float) -> None:
        self.identity = identity
        self.prefix = prefix
        self.timeout_s = timeout_s
        self.stage = STAGES[0]
        self.store: Store | None = None
        self._began = time.monotonic()

    @contextmanager
    def in_stage(self, stage: str) -> Iterator[list[str]]:
        """Announce a stage here and, once there is one, in the store, where a waiting rank finds it."""
        self.stage = stage
        say(StageBegan(stage))
        if self.store is not None:
            self.store.set(f"stage/{self.identity.rank}", stage)
        began = time.monotonic()
        notes: list[str] = []
        yield notes
        say(StageEnded(stage, round(time.monotonic() - began, 4), "; ".join(notes)))

    # -- the stages ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All stages in order. Raises ProbeFailure, or whatever torch raises."""
        me = self.identity
        with self.in_stage("device"):
            device = self._device()
        with self.in_stage("allocation") as notes:
            notes.append(self._allocate(device))
        with self.in_stage("store"):
            self.store = connect(me, self.prefix, self.timeout_s / 4)
            self.store.set(f"stage/{me.rank}", "store")
        with self.in_stage("arrive"):
            backend = self._arrive("nccl" if device.type == "cuda" else "gloo")
            if backend == "gloo":
                device = torch.device("cpu")
            say(Runtime(backend, self._device_name(device), versions()))
        with self.in_stage("group"):
            dist.init_process_group(
                backend,
                store=PrefixStore("group", self.store),
                rank=me.rank,
                world_size=me.world_size,
                timeout=timedelta(seconds=self.timeout_s / 4),
            )
        with self.in_stage("all_gather"):
            self._check_gather(device)
        with self.in_stage("all_reduce"):
            self._check_sum(device)
        with self.in_stage("barrier"):
            dist.barrier(device_ids=[device.index]) if device.type == "cuda" else dist.barrier()
        self.stage = "done"

    def _device(self) -> torch.device:
        if not torch.cuda.is_available() or torch.cuda.device_count() < self.identity.local_world_size:
            return torch.device("cpu")
        device = torch.device("cuda", self.identity.local_rank)
        torch.cuda.set_device(device)
        return device

    @staticmethod
    def _device_name(device: torch.device) -> str:
        return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"

    @staticmethod
    def _allocate(device: torch.device) -> str:
        size = CPU_BYTES
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            size = min(CUDA_BYTES, int(free * CUDA_SHARE))
        count = size // 4
        pattern = torch.arange(count, dtype=torch.int32, device=device)
        pattern.bitwise_xor_(0x5A5A5A5A)
        wrong = int(
            (pattern.bitwise_xor(0x5A5A5A5A) != torch.arange(count, dtype=torch.int32, device=device)).sum().item()
        )
        if wrong:
            raise ProbeFailure(f"{wrong} of {count} words read back from {device} are not what was written")
        return f"{size >> 20} MiB written and read back on {device}"

    def _arrive(self, backend: str) -> str:
        """Wait for every rank; agree on NCCL only if every rank has a device of its own."""
        assert self.store is not None
        self.store.set(f"arrive/{self.identity.rank}", backend)
        missing, backends = self._collect("arrive", self.timeout_s / 2)
        failed = [rank for rank, found in backends.items() if found == _FAILED]
        if failed:
            raise ProbeFailure(f"{ranks_text(failed)} failed before the process group could be made", failed)
        if missing:
            raise ProbeFailure(f"{ranks_text(missing)} did not arrive within {self.timeout_s / 2:.0f} s", missing)
        return "gloo" if "gloo" in backends.values() else "nccl"

    def _check_gather(self, device: torch.device) -> None:
        """Every rank must be seen to hold its own values: a wrong one is named by all the others."""
        world = self.identity.world_size
        mine = values_of(self.identity.rank, device)
        gathered = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(gathered, mine)
        wrong = [rank for rank in range(world) if not torch.equal(gathered[rank], values_of(rank, device))]
        if wrong:
            raise ProbeFailure(f"all_gather brought wrong values from {ranks_text(wrong)}", self._others(wrong))

    def _check_sum(self, device: torch.device) -> None:
        world = self.identity.world_size
        total = values_of(self.identity.rank, device)
        dist.all_reduce(total)
        expected = torch.zeros_like(total)
        for rank in range(world):
            expected += values_of(rank, device)
        if not torch.equal(total, expected):
            first = int((total != expected).nonzero()[0].item())
            raise ProbeFailure(
                f"all_reduce over {world} ranks gave {total[first].item()} where {expected[first].item()} was due"
            )

    def _others(self, ranks: list[int]) -> list[int] | None:
        return None if self.identity.rank in ranks else ranks

    # -- telling each other -------------------------------------------------------------------------------------

    def _collect(self, kind: str, timeout_s: float) -> tuple[list[int], dict[int, str]]:
        """The ranks that have not set their key of `kind` in time, and the values of the others."""
        assert self.store is not None
        return collect(self.store, kind, self.identity.world_size, timeout_s)

    def conclude(self, error: BaseException | None) -> RankOutcome:
        """Whose fault it was: a rank that waits for others, which are still in an earlier stage, is a victim."""
        rank, host = self.identity.rank, socket.gethostname()
        if error is None:
            return RankOutcome(rank, "ok", "done", host=host)
        detail = f"{type(error).__name__}: {error}" if not isinstance(error, ProbeFailure) else str(error)
        outcome: Outcome = "failed"
        if isinstance(error, ProbeFailure):
            if error.peers is not None:
                outcome = "victim"
        elif self.stage in ("group", "all_gather", "all_reduce", "barrier") and self.store is not None:
            # torch raised inside a collective: the others went away, or never came
            _, stages = collect(self.store, "stage", self.identity.world_size, 0.5)
            behind = [r for r, stage in stages.items() if STAGES.index(stage) < STAGES.index(self.stage)]
            outcome = "victim"
            if behind:
                detail += f" (waited for {ranks_text(behind)}, still in stage {stages[behind[0]]})"
        return RankOutcome(rank, outcome, self.stage, detail.strip(), host)

    def exchange(self, outcome: RankOutcome) -> AllOutcomes:
        """Tell everybody, hear everybody: also those whose workers have to end a probe that hangs."""
        timeout_s = max(5.0, self.timeout_s - (time.monotonic() - self._began) + 10.0)
        if self.store is None:
            self.store = connect(self.identity, self.prefix, min(timeout_s, 10))
        if outcome.outcome == "failed":  # whoever waits for it to arrive need not wait on
            self.store.compare_set(f"arrive/{outcome.rank}", "", _FAILED)
        self.store.set(f"outcome/{outcome.rank}", msgspec.json.encode(outcome).decode())
        silent, found = self._collect("outcome", timeout_s)
        outcomes = [msgspec.json.decode(text, type=RankOutcome) for text in found.values()]
        # The store may live in rank 0's node: nobody leaves before all have read.
        self.store.set(f"read/{outcome.rank}", "1")
        self._collect("read", 5.0)
        return AllOutcomes(outcomes, silent)


def connect(identity: Identity, prefix: str, timeout_s: float) -> Store:
    """A client of torchrun's store, under our own prefix."""
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch re-exports it without saying so
        identity.master_addr,
        identity.master_port,
        world_size=None,
        is_master=False,
        timeout=timedelta(seconds=max(1.0, timeout_s)),
        wait_for_workers=False,
    )
    return PrefixStore(prefix, store)


def collect(store: Store, kind: str, world_size: int, timeout_s: float) -> tuple[list[int], dict[int, str]]:
    """(missing ranks, values by rank) of the keys `kind/<rank>`, waiting `timeout_s` for all of them together."""
    deadline = time.monotonic() + timeout_s
    try:
        store.wait([f"{kind}/{rank}" for rank in range(world_size)], timedelta(seconds=max(0.05, timeout_s)))
    except Exception as error:  # torch raises DistStoreError here, older releases a plain RuntimeError
        if "imeout" not in str(error) and time.monotonic() < deadline:
            raise
    found = {rank: rank_key for rank in range(world_size) if store.check([rank_key := f"{kind}/{rank}"])}
    values = {rank: store.get(key).decode() for rank, key in found.items()}
    return [rank for rank in range(world_size) if rank not in values], values


def values_of(rank: int, device: torch.device) -> torch.Tensor:
    """What a rank contributes: 4096 float32, small enough for sums that are exact over 1,600 ranks and more."""
    return (torch.arange(4096, dtype=torch.float32, device=device) % 61) + rank % 9973 + 1


def versions() -> dict[str, str]:
    """Versions of what the rank runs on."""
    found = {"torch": str(torch.__version__), "python": platform.python_version()}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        if torch.cuda.is_available():
            nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # torch.cuda.nccl has no annotations
            found["nccl"] = ".".join(map(str, nccl))
    return found


def ranks_text(ranks: list[int]) -> str:
    """`rank 3` or `ranks 0, 1, 2`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def main() -> int:
    """Entry of `python -m gpuwatch.worker.probe`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("--failed-stage", help="only tell the others that this rank's probe died in this stage")
    parser.add_argument("--detail", default="")
    options = parser.parse_args()
    identity = Identity.from_environment(os.environ)
    probe = Probe(identity, options.prefix, options.timeout)
    if options.failed_stage is not None:
        outcome = RankOutcome(identity.rank, "failed", options.failed_stage, options.detail, socket.gethostname())
    else:
        error: BaseException | None = None
        try:
            probe.run()
        except Exception as raised:
            error = raised
        outcome = probe.conclude(error)
        say(outcome)
    say(probe.exchange(outcome))
    return 0


def end(code: int) -> NoReturn:
    """End without taking the process group down: with gloo that can hang, and the process's end does it, too."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        end(main())
    except BaseException:
        traceback.print_exc()
        end(1)
