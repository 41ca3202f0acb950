"""The collector and the node agent that stand beside a job: started, told, waited for and ended. Imports no torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq

from ..core import host
from ..core.any_text import plain_text
from ..core.errors import UsageError
from ..core.recorder.scratch import RESCUED
from ..core.wire.keys import JobKeys
from ..core.wire.pipe import AgentConfig, CollectorBound, CollectorConfig, JobResult, PreflightOver, StageLine
from .helper_processes import HeadCollector, NodeAgent
from .plan import CollectorPlan
from .say import say
from .schedulers.job import SchedulerFacts

# Where the collector of a job is: the handshake of its encryption tells it from any other.

_PATIENCE_MS = 5000


def first_that_answers(addresses: Sequence[str], server_key: str, public_key: str, private_key: str) -> str | None:
    """Where somebody has the private half of `server_key`: the first to answer. Waits some seconds at most."""
    context = zmq.Context()
    poller, probes = zmq.Poller(), {}
    try:
        for address in addresses:
            probe = context.socket(zmq.DEALER)
            probe.linger = 0
            probe.ipv6 = True
            probe.curve_serverkey = server_key.encode()
            probe.curve_publickey, probe.curve_secretkey = public_key.encode(), private_key.encode()
            monitor = probe.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            probes[monitor] = probe, address
            poller.register(monitor, zmq.POLLIN)
            probe.connect(address)
        ready = [monitor for monitor, _ in poller.poll(_PATIENCE_MS)]
        return next((address for monitor, (_, address) in probes.items() if monitor in ready), None)
    finally:
        for probe, _ in probes.values():
            probe.disable_monitor()
            probe.close(linger=0)
        context.destroy(linger=0)


_CHILD_END_S = 20.0
_LAST_LINE_S = 2.0
"""For the collector's last line, which was written before the verdict was sent."""
WITHOUT_C = (
    "gpuwatch was installed without its part in C, and Python does the same: that takes about four times as much of "
    "the processor for each module call (docs/cost.md); to have it, install gpuwatch again where there is a C compiler"
)


class JobServices:
    """Of one node. `nproc` is how many ranks it has; 0: not known yet. `starter` is who starts them."""

    def __init__(
        self,
        args: argparse.Namespace,
        plan: CollectorPlan,
        keys: JobKeys,
        nproc: int,
        command: list[str],
        job: SchedulerFacts | None,
        starter: str = "torchrun",
    ) -> None:
        self._args = args
        self._plan = plan
        self._keys = keys
        self._nproc = nproc
        self._command = command
        self._job = job
        self._starter = starter
        self._collector: HeadCollector | None = None
        self._agent: NodeAgent | None = None
        self.run_dir: Path | None = None
        """Where the report will be, if the collector is of this node."""
        self.hurry = False
        """Do not wait for them at the end."""

    @property
    def verdict(self) -> JobResult | None:
        """None as long as there is none."""
        return self._agent.verdict if self._agent is not None else None

    @property
    def agent_started(self) -> bool:
        """Whether there is an agent."""
        return self._agent is not None

    def tell(self, message: msgspec.Struct) -> None:
        """Tell the agent something."""
        if self._agent is not None:
            self._agent.tell(message)

    def wait(self) -> None:
        """Until the agent has a verdict or is given up, and the collector has said its last line."""
        if self._agent is not None:
            self._agent.wait()
        if self._collector is not None:
            self._collector.told_all.wait(_LAST_LINE_S)

    def end(self) -> None:
        """Both have nothing more to do. Twice does no harm."""
        if self._agent is not None:
            self._agent.end(0.0 if self.hurry else _CHILD_END_S)
            self._agent = None
        self._end_collector()

    def _end_collector(self) -> None:
        if self._collector is not None:
            self._collector.end(0.0 if self.hurry else _CHILD_END_S)
            self._collector = None

    def start_collector(self, scratch: Path, show: Callable[[StageLine | PreflightOver], object]) -> str:
        """Start the collector if it is ours to start. Returns the address for the node agent."""
        plan = self._plan
        if not plan.hosts:
            return plan.connect
        if not self._args.check_only and not host.has_part_in_c():
            say(WITHOUT_C)
        config = CollectorConfig(
            bind=plan.bind,
            public_key=self._keys.collector.public.decode(),
            private_key=self._keys.collector.private.decode(),
            agent_public_key=self._keys.agent.public.decode(),
            viewer_public_key=self._keys.viewer.public.decode(),
            runs_dir=str(Path(self._args.runs_dir).absolute()),
            rdzv_id=plan.job,
            max_frames=self._args.max_frames,
            run_name=self._args.run_name or "",
            on_hang=self._args.on_hang,
            fallback=str(scratch / RESCUED),
            viewer_private_key=self._keys.viewer.private.decode(),
            metrics=self._args.metrics_port or "",
        )
        self._collector = HeadCollector(config, say, show)
        answer = self._collector.answer
        if isinstance(answer, CollectorBound):
            self.run_dir = Path(answer.run_dir)
            say(f"the report will be in {_relative(answer.run_dir)}")
            if answer.metrics:
                say(f"metrics for a Prometheus are at {answer.metrics}")
            return plan.connect or answer.address
        if answer is not None and answer.is_told:
            raise UsageError(answer.reason)
        if answer is None or answer.may_pass:
            why = f": {answer.reason}" if answer is not None else ""
            say(f"the collector did not start{why}; training on, and this node's own records will be kept")
        elif not answer.in_use:
            raise UsageError(
                f"expected to start a collector at {plan.bind}, found: {answer.reason}; "
                "pass another --runs-dir DIR or --collector-port PORT"
            )
        self._end_collector()
        if answer is not None and answer.in_use and not (plan.may_join and self._answers(plan.connect)):
            raise UsageError(
                f"the port of {plan.bind.removeprefix('tcp://')} is in use by something that is not this run's "
                "collector; pass a free one with --collector-port PORT, the same on every node"
            )
        return plan.connect

    def _answers(self, address: str) -> bool:
        """Whether this job's own collector listens there."""
        keys = self._keys
        agent = keys.agent
        found = first_that_answers(
            [address], keys.collector.public.decode(), agent.public.decode(), agent.private.decode()
        )
        return found is not None

    def start_agent(self, address: str, scratch: Path, stop: Callable[[str, bool], object]) -> None:
        """`stop` is told why the ranks of this node are to end, and whether torchrun may start them again."""
        self._agent = NodeAgent(self.agent_config(address, scratch), say, stop)

    def agent_config(self, address: str, scratch: Path) -> AgentConfig:
        """What this node's agent is told."""
        plan, job = self._plan, self._job
        return AgentConfig(
            collector=address,
            server_key=self._keys.collector.public.decode(),
            public_key=self._keys.agent.public.decode(),
            private_key=self._keys.agent.private.decode(),
            recorder_dir=str(scratch),
            spool_dir=str(Path(self._args.runs_dir).absolute()),
            nproc=self._nproc,
            min_nodes=plan.min_nodes,
            max_nodes=plan.max_nodes,
            command=[plain_text(word) for word in self._command],
            versions=host.versions(),
            rdzv_id=plan.job,
            trace_batches=self._args.trace_batches,
            check_only=self._args.check_only,
            job=job.on_the_wire if job is not None else None,
            hang_timeout_s=self._args.hang_timeout,
            starter=self._starter,
            ends_ranks=self._starter != "torchrun",
            telemetry_s=self._args.telemetry,
            starts_all=plan.starts_all,
        )


def _relative(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
