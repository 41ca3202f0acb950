"""What one rank does by itself in each step: a test in a child of its own, and what came of it as a report."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from ...core.amount import parse_amount
from ...core.gpu_health.whose import gpu_of_rank
from ...core.preflight import Finding, Grade, InventoryFacts
from ...core.settings import WorkerSettings
from ..identity import Identity
from ..peer_failures import is_peer_failure
from .deadlines import Deadlines
from .decide.nccl_log import explain
from .meeting import group_store
from .reports import Report
from .stages.allocation import allocate
from .stages.bandwidth import Measured, measure
from .stages.compute import ComputeResult, compute
from .stages.device_facts import DeviceFacts, gather_device, with_device
from .stages.forked import Ending, Say, run_forked
from .stages.group import check_group
from .stages.health import HealthResult, check_health, cuda_load
from .stages.inventory import gather
from .steps import stage_of

_HEALTH_SHARE = 0.8
"""Of the stage's deadline is for NVML's answer; the rest is to start and to say that there was none."""
_LOG_TAIL = 200_000


@dataclass
class Parts:
    """The tests of one rank. `facts` are known after the inventory."""

    identity: Identity
    settings: WorkerSettings
    deadlines: Deadlines
    prefix: str
    script: str
    facts: InventoryFacts = field(default_factory=InventoryFacts)

    def inventory(self) -> Report:
        """What this rank runs on. A GPU at which a process hangs or dies is a bad one; other trouble is unknown."""
        facts = gather(self.identity, self.script)
        self.facts = replace(facts, device=facts.device or "cpu")
        if facts.device == "cpu":
            return Report(facts=facts)
        ending = run_forked(lambda say: gather_device(self.identity.local_rank), self.deadlines.work("inventory"))
        if ending.kind != "ok":
            grade: Grade = "unknown" if ending.kind == "raised" else "fail"
            sentence = f"rank {self.identity.rank} ({facts.host}) could not look at its GPU: {ending.detail}"
            next_ = f"Run nvidia-smi on {facts.host}: if it hangs, too, the node needs a reset."
            finding = Finding("inventory", grade, "rank", [self.identity.rank], [facts.host], sentence, next_)
            self.facts = replace(self.facts, device_error=ending.detail)
            return Report(facts=self.facts, findings=[finding])
        self.facts = with_device(facts, msgspec.json.decode(ending.value, type=DeviceFacts))
        return Report(facts=self.facts)

    @property
    def device(self) -> torch.device:
        """This rank's own."""
        return torch.device(self.facts.device)

    def health(self) -> Report:
        """What the driver says of this rank's GPU. What cannot be read is unknown."""
        me, deadline_s = self.identity, self.deadlines.work("health")
        uuid = gpu_of_rank(self.facts.uuid, me.local_rank, os.environ)
        if not uuid and self.facts.device == "cpu":
            return Report(detail="no GPU in use")

        def call(say: Say) -> HealthResult:
            load = cuda_load(self.device.index) if self.device.type == "cuda" else None
            thresholds = self.settings.health_thresholds
            return check_health(uuid, me.rank, self.facts.host, thresholds, deadline_s * _HEALTH_SHARE, load)

        ending = run_forked(call, deadline_s)
        if ending.kind == "ok":
            result = msgspec.json.decode(ending.value, type=HealthResult)
            return Report(findings=result.findings, detail=result.detail)
        sentence = f"the health of the GPU of rank {me.rank} ({self.facts.host}) could not be read: {ending.detail}"
        return Report(findings=[Finding("health", "unknown", "rank", [me.rank], [self.facts.host], sentence)])

    def allocation(self) -> Report:
        """Memory."""
        amount = parse_amount(self.settings.alloc) if self.settings.alloc else None
        quick = self.settings.preflight == "quick"
        sharers = 1 if self.device.type == "cuda" else self.identity.local_world_size
        ending = run_forked(
            lambda say: allocate(self.device, amount, quick=quick, sharers=sharers), self.deadlines.work("allocation")
        )
        return self._report(ending, own=True, detail=_text(ending))

    def compute(self) -> Report:
        """A matmul."""
        ending = run_forked(lambda say: compute(self.device), self.deadlines.work("compute"))
        if ending.kind != "ok":
            return self._report(ending, own=True)
        computed = msgspec.json.decode(ending.value, type=ComputeResult)
        return Report(computed=computed, detail=f"{computed.milliseconds:.3g} ms, {computed.digest}")

    def group(self, step: str, ranks: Sequence[int], backend: str, on_step: Say) -> Report:
        """A process group of `ranks`, which are more than one."""
        return self._in_group(check_group, step, ranks, backend, on_step, lambda ending: Report(detail=_text(ending)))

    def bandwidth(self, step: str, ranks: Sequence[int], backend: str, on_step: Say) -> Report:
        """How fast all_reduce is."""
        call = partial(measure, largest_bytes=self.settings.bandwidth_size)

        def report(ending: Ending) -> Report:
            measured = msgspec.json.decode(ending.value, type=Measured)
            best = max(measured.rows, key=lambda row: row.size_bytes, default=None)
            detail = f"{best.busbw_gbs:.3g} GB/s bus bandwidth at {best.size_bytes >> 10} KiB" if best else ""
            return Report(measured=measured, detail=detail)

        return self._in_group(call, step, ranks, backend, on_step, report)

    def _in_group(
        self,
        test: Callable[..., Any],
        step: str,
        ranks: Sequence[int],
        backend: str,
        on_step: Say,
        report: Callable[[Ending], Report],
    ) -> Report:
        stage = stage_of(step)
        rank = self.identity.rank
        device = self.device if backend == "nccl" else torch.device("cpu")
        timeout_s = self.deadlines.inside_group(stage)
        log = Path(self.settings.nccl_debug) / f"nccl-rank{rank}.log" if self.settings.nccl_debug else None
        name = f"{step} {ranks[0]}"  # the groups of one step have no rank in common

        def call(say: Say) -> Any:
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=str(log))
            store = group_store(self.identity, self.prefix, name, timeout_s)
            return test(store, device, backend, ranks, rank, timeout_s, say)

        ending = run_forked(call, self.deadlines.work(stage), on_step)
        if ending.kind == "ok":
            return report(ending)
        return self._report(ending, log=log)

    def _report(self, ending: Ending, *, own: bool | None = None, detail: str = "", log: Path | None = None) -> Report:
        """How it went, with what is known of the words that torch and NCCL have left."""
        if ending.kind == "ok":
            return Report(detail=detail)
        if ending.kind == "raised" and ending.ours:
            return Report("fault", ending.detail, said=ending.said)
        if ending.kind == "raised" and ending.failure is not None:
            failure = ending.failure
            own = failure.peers is None
            return Report("raised", failure.detail, own, failure.peers or [], failure.next, ending.said)
        causes = explain(f"{ending.detail}\n{ending.output}\n{_tail(log)}")
        if causes:
            cause = causes[0]
            text = f"{ending.detail} ({cause.sentence})" if ending.kind == "hung" else f"{cause.sentence}: {cause.line}"
            if own is None and ending.kind != "hung":
                own = cause.own
            return Report(ending.kind, text, own, next=cause.next, said=ending.said)
        if own is None and ending.kind != "hung":
            own = not is_peer_failure(f"{ending.detail}\n{ending.output}")
        return Report(ending.kind, ending.detail, own, said=ending.said)


def _text(ending: Ending) -> str:
    return msgspec.json.decode(ending.value, type=str) if ending.kind == "ok" else ""


def _tail(log: Path | None) -> str:
    try:
        return log.read_text(errors="replace")[-_LOG_TAIL:] if log is not None else ""
    except OSError:
        return ""
