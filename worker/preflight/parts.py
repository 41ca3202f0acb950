"""One rank's own part in each step: a test in the rank's child process, and its result as a report.

A rank has one child, and so one CUDA context, for all its tests up to its first process group. After each group it has
a new child: a group cannot be destroyed safely when one of its ranks may have ended.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from ...core.codes import Code
from ...core.gpu.counters import gpu_of_rank
from ...core.identity import RankIdentity, is_peer_failure
from ...core.known_errors import explain
from ...core.preflight import Grade, InventoryFacts, PreflightFinding
from ...core.settings import WorkerSettings
from ...core.text import parse_amount
from ..device.accelerator import gpu_in_use, gpu_of
from .bandwidth import measure
from .device_tests import AllocationResult, allocate, compute
from .group_collectives import check_group, join
from .inventory import HealthResult, check_health, gather, gather_device
from .meeting import FAILED, StoreLost, store_below
from .probe_child import Answer, ProbeFailure, RankChild, Say, TestEnding
from .steps import ComputeResult, RankMeasurements, RankStepReport, StageDeadlines, stage_of

_HEALTH_SHARE = 0.8
"""The share of the stage's deadline for NVML's answer. The rest is for the start, and to report a missing answer."""
_LOG_TAIL = 200_000
_GRACE_SHARE = 0.05
"""The share of a group's time in which a rank may still report itself, once another rank has told that it failed."""


def perform(test: Callable[..., Any], answer: Answer) -> Any:
    """Run a test, in the child. Empties torch's cache: the next test or another rank may need the memory."""
    result = test(answer) if isinstance(test, GroupTest) else test()
    gpu = gpu_in_use()
    if gpu is not None:
        gpu.release_cache()
    return result


@dataclass(frozen=True)
class GroupTest:
    """A test of a process group of `ranks` in a step. Its keys are below `prefix`. The child must end after it."""

    identity: RankIdentity
    prefix: str
    step: str
    device: torch.device
    backend: str
    ranks: list[int]
    timeout_s: float
    log: Path | None = None
    """NCCL's log."""
    bandwidth_bytes: int | None = None
    """The largest size of the bandwidth test, 0 for the default; None to test the collectives instead."""

    def __call__(self, answer: Answer) -> str | RankMeasurements:
        """Run the collectives, or measure their bandwidth."""
        if self.log is not None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=str(self.log))
        heeding = threading.Timer(self._grace_s, self._end_with_another, [answer])  # most groups end before that
        heeding.daemon = True
        heeding.start()
        name = f"group {self.step} {self.ranks[0]}"  # the groups of one step have no rank in common
        store = store_below(self.identity, f"{self.prefix}/{name}", self.timeout_s)
        group = join(store, self.device, self.backend, self.ranks, self.identity.rank, self.timeout_s, answer)
        return check_group(group) if self.bandwidth_bytes is None else measure(group, self.bandwidth_bytes)

    @property
    def _grace_s(self) -> float:
        return self.timeout_s * _GRACE_SHARE

    def _end_with_another(self, answer: Answer) -> None:
        """End this process once another rank of the group has told that it failed: no wait for it need end."""
        with suppress(StoreLost, RuntimeError):  # no rank has told in time
            store = store_below(self.identity, f"{self.prefix}/{self.step}", self.timeout_s)
            store.wait([FAILED], timedelta(seconds=self.timeout_s))
            rank = store.get(FAILED).decode()
            if rank not in map(str, self.ranks):
                return
            time.sleep(self._grace_s)
            answer(TestEnding("raised", failure=ProbeFailure(f"it stopped, as rank {rank} had failed", peers=[])))
            os._exit(0)


@dataclass
class RankTests:
    """The tests of one rank. `facts` are complete after the inventory."""

    identity: RankIdentity
    settings: WorkerSettings
    deadlines: StageDeadlines
    prefix: str
    script: str
    facts: InventoryFacts = field(default_factory=InventoryFacts)
    child: RankChild = field(default_factory=lambda: RankChild(perform))

    def inventory(self) -> RankStepReport:
        """The rank's inventory. Fails if the child hangs or dies when it reads the GPU; other errors are unknown."""
        facts = gather(self.identity, self.script)
        self.facts = replace(facts, device=facts.device or "cpu")
        if facts.device == "cpu":
            return RankStepReport(facts=facts)
        me = self.identity
        index = me.local_rank if me.device is None else me.device
        ending = self.child.run(partial(gather_device, facts, index), self.deadlines.work("inventory"))
        if ending.kind != "ok":
            grade: Grade = "unknown" if ending.kind == "raised" else "fail"
            sentence = f"rank {me.rank} ({facts.host}) could not inspect its GPU: {ending.detail}"
            next_ = f"Run nvidia-smi on {facts.host}: if it hangs, too, the node needs a reset."
            finding = PreflightFinding(
                "inventory", grade, "rank", [me.rank], [facts.host], sentence, next_, code=Code.GPU_NOT_INSPECTED
            )
            self.facts = replace(self.facts, device_error=ending.detail)
            return RankStepReport(facts=self.facts, findings=[finding])
        self.facts = ending.value
        return RankStepReport(facts=self.facts)

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return torch.device(self.facts.device)

    def health(self) -> RankStepReport:
        """The driver's report of this rank's GPU. Values that cannot be read are unknown."""
        me, deadline_s = self.identity, self.deadlines.work("health")
        uuid = gpu_of_rank(self.facts.uuid, me.local_rank, os.environ)
        if not uuid and self.facts.device == "cpu":
            return RankStepReport(detail="no GPU in use")

        thresholds, share_s = self.settings.health_thresholds, deadline_s * _HEALTH_SHARE
        gpu = gpu_of(self.device)
        load = partial(gpu.load, self.device.index) if gpu is not None else None
        test = partial(check_health, uuid, me.rank, self.facts.host, thresholds, share_s, load)
        ending = self.child.run(test, deadline_s)
        if ending.kind == "ok":
            result: HealthResult = ending.value
            if result.load_hangs:
                self.child.close()
            return RankStepReport(findings=result.findings, detail=result.detail)
        sentence = f"the health of the GPU of rank {me.rank} ({self.facts.host}) could not be read: {ending.detail}"
        unread = PreflightFinding(
            "health", "unknown", "rank", [me.rank], [self.facts.host], sentence, code=Code.HEALTH_UNKNOWN
        )
        return RankStepReport(findings=[unread])

    def allocation(self, gpus: Sequence[str]) -> RankStepReport:
        """The memory test. `gpus` are the UUIDs of all ranks' GPUs: ranks that share a GPU share its memory."""
        amount = parse_amount(self.settings.alloc) if self.settings.alloc else None
        quick = self.settings.preflight == "quick"
        on_gpu, uuid = self.facts.has_gpu, self.facts.uuid
        sharers = max(1, gpus.count(uuid) if uuid else 1) if on_gpu else self.identity.local_world_size
        test = partial(allocate, self.device, amount, quick=quick, sharers=sharers)
        ending = self.child.run(test, self.deadlines.work("allocation"))
        if ending.kind != "ok":
            return self._report(ending, own=True)
        allocated: AllocationResult = ending.value
        if not allocated.scarce:
            return RankStepReport(detail=allocated.detail)
        me, host = self.identity.rank, self.facts.host
        sentence = f"rank {me} ({host}) finds {allocated.scarce}"
        scarce = PreflightFinding(
            "allocation", "warn", "gpu", [me], [host], sentence, allocated.next, uuid, code=Code.MEMORY_SCARCE
        )
        return RankStepReport(detail=allocated.detail, findings=[scarce])

    def compute(self) -> RankStepReport:
        """The matmul test."""
        ending = self.child.run(partial(compute, self.device), self.deadlines.work("compute"))
        if ending.kind != "ok":
            return self._report(ending, own=True)
        computed: ComputeResult = ending.value
        return RankStepReport(computed=computed, detail=f"{computed.milliseconds:.3g} ms, {computed.digest}")

    def in_group(self, step: str, ranks: Sequence[int], backend: str, on_step: Say) -> RankStepReport:
        """The test of a process group of `ranks`, at least two; in step `bandwidth`, how fast its all_reduce is."""
        stage, settings = stage_of(step), self.settings
        log = Path(settings.nccl_debug) / f"nccl-rank{self.identity.rank}.log" if settings.nccl_debug else None
        test = GroupTest(
            self.identity,
            self.prefix,
            step=step,
            device=self.device if backend == "nccl" else torch.device("cpu"),
            backend=backend,
            ranks=list(ranks),
            timeout_s=self.deadlines.inside_group(stage),
            log=log,
            bandwidth_bytes=settings.bandwidth_size if step == "bandwidth" else None,
        )
        try:
            ending = self.child.run(test, self.deadlines.work(stage), on_step)
        finally:
            self.child.close()
        if ending.kind != "ok":
            return self._report(ending, log=log)
        if isinstance(ending.value, str):
            return RankStepReport(detail=ending.value)
        measured: RankMeasurements = ending.value
        best = max(measured.rows, key=lambda row: row.size_bytes, default=None)
        detail = f"{best.busbw_gbs:.3g} GB/s bus bandwidth at {best.size_bytes >> 10} KiB" if best else ""
        return RankStepReport(measured=measured, detail=detail)

    def _report(self, ending: TestEnding, *, own: bool | None = None, log: Path | None = None) -> RankStepReport:
        """The report of a failed test, with the cause if torch's or NCCL's messages name a known one."""
        if ending.kind == "raised" and ending.ours:
            return RankStepReport("fault", ending.detail, said=ending.said)
        if ending.kind == "raised" and ending.failure is not None:
            failure = ending.failure
            own = failure.peers is None
            return RankStepReport("raised", failure.detail, own, failure.peers or [], failure.next, ending.said)
        cause = next(iter(explain(f"{ending.detail}\n{ending.output}\n{_tail(log)}")), None)
        if own is None and ending.kind != "hung":
            own = cause.own if cause else not is_peer_failure(f"{ending.detail}\n{ending.output}")
        if cause is None:
            return RankStepReport(ending.kind, ending.detail, own, said=ending.said)
        text = f"{ending.detail} ({cause.sentence})" if ending.kind == "hung" else f"{cause.sentence}: {cause.line}"
        return RankStepReport(ending.kind, text, own, next=cause.next, said=ending.said)


def _tail(log: Path | None) -> str:
    try:
        return log.read_text(errors="replace")[-_LOG_TAIL:] if log is not None else ""
    except OSError:
        return ""
