"""One rank's own part in each step: a test in the rank's child process, and its result as a report.

A rank has one child, and so one CUDA context, for all its tests up to its first process group. After each group it has
a new child: a group cannot be destroyed safely when one of its ranks may have ended.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from msgspec.structs import replace

from ...core.gpu.counters import gpu_of_rank
from ...core.identity import RankIdentity, is_peer_failure
from ...core.preflight import Grade, InventoryFacts, PreflightFinding
from ...core.settings import WorkerSettings
from ...core.text import parse_amount
from .allocation import AllocationResult
from .blame.known_errors import explain
from .health import HealthResult
from .inventory import DeviceFacts, gather, with_device
from .rank_child import RankChild, Say, TestEnding
from .requests import AllocationRequest, CheckHealth, ComputeRequest, InGroup, LookAtDevice, Request, perform
from .stage_messages import ComputeResult, RankMeasurements, RankStepReport
from .steps import StageDeadlines, stage_of

_HEALTH_SHARE = 0.8
"""The share of the stage's deadline for NVML's answer. The rest is for the start, and to report a missing answer."""
_LOG_TAIL = 200_000


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

    def close(self) -> None:
        """End the child. Its memory on the device is then free for the script."""
        self.child.close()

    def _ask(self, request: Request, deadline_s: float, on_step: Say = lambda step: None) -> TestEnding:
        return self.child.run(msgspec.json.encode(request), deadline_s, on_step)

    def inventory(self) -> RankStepReport:
        """What this rank runs on. Fails if the child hangs or dies when it reads the GPU; other errors are unknown."""
        facts = gather(self.identity, self.script)
        self.facts = replace(facts, device=facts.device or "cpu")
        if facts.device == "cpu":
            return RankStepReport(facts=facts)
        me = self.identity
        index = me.local_rank if me.device is None else me.device
        ending = self._ask(LookAtDevice(index), self.deadlines.work("inventory"))
        if ending.kind != "ok":
            grade: Grade = "unknown" if ending.kind == "raised" else "fail"
            sentence = f"rank {self.identity.rank} ({facts.host}) could not look at its GPU: {ending.detail}"
            next_ = f"Run nvidia-smi on {facts.host}: if it hangs, too, the node needs a reset."
            finding = PreflightFinding("inventory", grade, "rank", [self.identity.rank], [facts.host], sentence, next_)
            self.facts = replace(self.facts, device_error=ending.detail)
            return RankStepReport(facts=self.facts, findings=[finding])
        self.facts = with_device(facts, msgspec.json.decode(ending.value, type=DeviceFacts))
        return RankStepReport(facts=self.facts)

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return torch.device(self.facts.device)

    def health(self) -> RankStepReport:
        """What the driver reports of this rank's GPU. Values that cannot be read are unknown."""
        me, deadline_s = self.identity, self.deadlines.work("health")
        uuid = gpu_of_rank(self.facts.uuid, me.local_rank, os.environ)
        if not uuid and self.facts.device == "cpu":
            return RankStepReport(detail="no GPU in use")

        thresholds, share_s = self.settings.health_thresholds, deadline_s * _HEALTH_SHARE
        ending = self._ask(
            CheckHealth(uuid, me.rank, self.facts.host, thresholds, share_s, self.facts.device), deadline_s
        )
        if ending.kind == "ok":
            result = msgspec.json.decode(ending.value, type=HealthResult)
            if result.load_hangs:
                self.child.close()
            return RankStepReport(findings=result.findings, detail=result.detail)
        sentence = f"the health of the GPU of rank {me.rank} ({self.facts.host}) could not be read: {ending.detail}"
        return RankStepReport(
            findings=[PreflightFinding("health", "unknown", "rank", [me.rank], [self.facts.host], sentence)]
        )

    def allocation(self, gpus: Sequence[str]) -> RankStepReport:
        """The memory test. `gpus` are the UUIDs of all ranks' GPUs: ranks that share a GPU share its memory."""
        amount = parse_amount(self.settings.alloc) if self.settings.alloc else None
        quick = self.settings.preflight == "quick"
        on_cuda, uuid = self.device.type == "cuda", self.facts.uuid
        sharers = max(1, gpus.count(uuid) if uuid else 1) if on_cuda else self.identity.local_world_size
        ending = self._ask(
            AllocationRequest(self.facts.device, amount, quick, sharers), self.deadlines.work("allocation")
        )
        if ending.kind != "ok":
            return self._report(ending, own=True)
        allocated = msgspec.json.decode(ending.value, type=AllocationResult)
        return RankStepReport(detail=allocated.detail, findings=self._scarce(allocated))

    def _scarce(self, allocated: AllocationResult) -> list[PreflightFinding]:
        if not allocated.scarce:
            return []
        me, host = self.identity.rank, self.facts.host
        sentence = f"rank {me} ({host}) finds {allocated.scarce}"
        return [PreflightFinding("allocation", "warn", "gpu", [me], [host], sentence, allocated.next, self.facts.uuid)]

    def compute(self) -> RankStepReport:
        """The matmul test."""
        ending = self._ask(ComputeRequest(self.facts.device), self.deadlines.work("compute"))
        if ending.kind != "ok":
            return self._report(ending, own=True)
        computed = msgspec.json.decode(ending.value, type=ComputeResult)
        return RankStepReport(computed=computed, detail=f"{computed.milliseconds:.3g} ms, {computed.digest}")

    def group(self, step: str, ranks: Sequence[int], backend: str, on_step: Say) -> RankStepReport:
        """The test of a process group of `ranks`, at least two."""
        return self._in_group(step, ranks, backend, on_step, lambda ending: RankStepReport(detail=_text(ending)))

    def bandwidth(self, step: str, ranks: Sequence[int], backend: str, on_step: Say) -> RankStepReport:
        """The bandwidth test: how fast all_reduce is."""

        def report(ending: TestEnding) -> RankStepReport:
            measured = msgspec.json.decode(ending.value, type=RankMeasurements)
            best = max(measured.rows, key=lambda row: row.size_bytes, default=None)
            detail = f"{best.busbw_gbs:.3g} GB/s bus bandwidth at {best.size_bytes >> 10} KiB" if best else ""
            return RankStepReport(measured=measured, detail=detail)

        return self._in_group(step, ranks, backend, on_step, report)

    def _in_group(
        self,
        step: str,
        ranks: Sequence[int],
        backend: str,
        on_step: Say,
        report: Callable[[TestEnding], RankStepReport],
    ) -> RankStepReport:
        stage = stage_of(step)
        rank = self.identity.rank
        log = Path(self.settings.nccl_debug) / f"nccl-rank{rank}.log" if self.settings.nccl_debug else None
        request = InGroup(
            bandwidth=step == "bandwidth",
            identity=self.identity,
            prefix=self.prefix,
            name=f"{step} {ranks[0]}",  # the groups of one step have no rank in common
            device=self.facts.device if backend == "nccl" else "cpu",
            backend=backend,
            ranks=list(ranks),
            timeout_s=self.deadlines.inside_group(stage),
            log=str(log) if log is not None else "",
            largest_bytes=self.settings.bandwidth_size,
        )
        try:
            ending = self._ask(request, self.deadlines.work(stage), on_step)
        finally:
            self.child.close()
        if ending.kind == "ok":
            return report(ending)
        return self._report(ending, log=log)

    def _report(self, ending: TestEnding, *, own: bool | None = None, log: Path | None = None) -> RankStepReport:
        """The report of a failed test, with the cause if torch's or NCCL's messages name a known one."""
        if ending.kind == "raised" and ending.ours:
            return RankStepReport("fault", ending.detail, said=ending.said)
        if ending.kind == "raised" and ending.failure is not None:
            failure = ending.failure
            own = failure.peers is None
            return RankStepReport("raised", failure.detail, own, failure.peers or [], failure.next, ending.said)
        causes = explain(f"{ending.detail}\n{ending.output}\n{_tail(log)}")
        if causes:
            cause = causes[0]
            text = f"{ending.detail} ({cause.sentence})" if ending.kind == "hung" else f"{cause.sentence}: {cause.line}"
            if own is None and ending.kind != "hung":
                own = cause.own
            return RankStepReport(ending.kind, text, own, next=cause.next, said=ending.said)
        if own is None and ending.kind != "hung":
            own = not is_peer_failure(f"{ending.detail}\n{ending.output}")
        return RankStepReport(ending.kind, ending.detail, own, said=ending.said)


def _text(ending: TestEnding) -> str:
    return msgspec.json.decode(ending.value, type=str)


def _tail(log: Path | None) -> str:
    try:
        return log.read_text(errors="replace")[-_LOG_TAIL:] if log is not None else ""
    except OSError:
        return ""
