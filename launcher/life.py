"""The life of a node's part of a job: scratch folder, helpers, ranks, verdict, exit code, clean-up. Imports no torch.

`gpuwatch launch` and `check` (launch_job.py), `gpuwatch run` (run_job.py) and a host that joins a run (join.py) differ
in who starts the ranks, and how the user is heard meanwhile: that is a `RankStarter`.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

import msgspec

from ..core import host
from ..core.codes import Code, ExitCode, coded
from ..core.errors import UsageError
from ..core.guest.tell import say
from ..core.recorder.run_folder import RESCUED, keep_rescued, make_scratch, remove_scratch, write_meeting_key
from ..core.secrets import masked_command
from ..core.text import plain_text
from ..core.torch_names import notes_on
from ..core.wire import pipe
from ..core.wire.keys import JobKeys
from ..core.wire.messages import AgentHello
from .agent.process_ends import SeenOverflows, where_it_is
from .head_collector import HeadCollector, answers
from .helper_processes import NodeAgent
from .last_run import remember_run
from .option_types import without_addresses
from .plan import CollectorPlan
from .scheduler_job import SchedulerFacts

_CHILD_END_S = 20.0
_LAST_LINE_S = 2.0
"""How long to wait for the collector's last line, which it wrote before it sent the verdict."""
WITHOUT_C = (
    "gpuwatch was installed without its C extension, so Python does that work: each module call takes about four "
    "times as much processor time (docs/cost.md); to build it, install gpuwatch again where there is a C compiler"
)


_FREE_THREADED = (
    "gpuwatch has no C extension for a Python without the GIL, which it would turn on again, so Python does that work: "
    "each module call takes about four times as much processor time (docs/cost.md)"
)
_WITHOUT_RECURSION = (
    "worker/native/recursion.c of gpuwatch was not built for this Python, so its hooks take frames of a script's "
    "recursion limit: about 190 nested modules fit into a limit of 1000, instead of 248 (docs/limits.md)"
)


_WITHOUT_SIGNALS = (
    "worker/native/signals.c of gpuwatch was not built for this Python, so a job whose ranks alone are sent a signal, "
    "and leave with an exit code of their own, is told as a crash (docs/verdicts/interrupted.md)"
)


def without_c() -> str:
    """What this Python lacks of the part in C; "" if it lacks nothing."""
    if not host.has_part_in_c():
        return _FREE_THREADED if sysconfig.get_config_var("Py_GIL_DISABLED") else WITHOUT_C
    if not host.has_part_in_c("recursion"):
        return _WITHOUT_RECURSION
    return "" if host.has_part_in_c("signals") else _WITHOUT_SIGNALS


def say_signal(number: int) -> None:
    """The ranks have ended because of it."""
    say(f"got {Signals(number).name}; writing the report (Ctrl-C: leave at once)")


def tell_of_torch() -> None:
    """Print what gpuwatch cannot see with the installed torch, a line for each; nothing if it sees everything."""
    for note in notes_on(host.installed_torch()):
        say(coded(note, Code.TORCH_UNSEEN))


@dataclass(frozen=True)
class JobTerms:
    """What the helpers of one node get to know of their job."""

    args: argparse.Namespace
    plan: CollectorPlan
    keys: JobKeys
    command: list[str]
    """What the user has typed."""
    job: SchedulerFacts | None
    """What this is part of."""
    nproc: int = 0
    """How many ranks this node has; 0: not known yet."""
    starter: str = "torchrun"
    """What starts them, for a sentence."""

    def collector_config(self, scratch: Path) -> pipe.CollectorConfig:
        """First line to the collector."""
        args, keys = self.args, self.keys
        return pipe.CollectorConfig(
            bind=self.plan.bind,
            public_key=keys.collector.public.decode(),
            private_key=keys.collector.private.decode(),
            agent_public_key=keys.agent.public.decode(),
            viewer_public_key=keys.viewer.public.decode(),
            runs_dir=str(Path(args.runs_dir).absolute()),
            rdzv_id=self.plan.job,
            max_frames=args.max_frames,
            run_name=args.run_name or (self.job.new_run_name if self.job is not None else ""),
            on_hang=args.on_hang,
            ends_at_overflow=getattr(args, "on_overflow", "") == "abort",
            fallback=str(scratch / RESCUED),
            viewer_private_key=keys.viewer.private.decode(),
            metrics=args.metrics_port or "",
            notify=tuple(args.notify or ()),
        )

    def _shown_command(self) -> list[str]:
        return masked_command(without_addresses(self.command, self.args.notify or []))

    def agent_config(self, address: str, scratch: Path) -> pipe.AgentConfig:
        """First line to the node agent; `address` is the collector's."""
        args, plan, keys = self.args, self.plan, self.keys
        return pipe.AgentConfig(
            collector=address,
            server_key=keys.collector.public.decode(),
            public_key=keys.agent.public.decode(),
            private_key=keys.agent.private.decode(),
            recorder_dir=str(scratch),
            spool_dir=str(Path(args.runs_dir).absolute()),
            hello=AgentHello(
                agent="",
                host="",
                nproc=self.nproc,
                min_nodes=plan.min_nodes,
                max_nodes=plan.max_nodes,
                command=[plain_text(word) for word in self._shown_command()],
                versions=host.versions(),
                rdzv_id=plan.job,
                trace_batches=args.trace_batches,
                check_only=args.check_only,
                job=self.job.on_the_wire if self.job is not None else None,
                starter=self.starter,
                starts_all=plan.starts_all,
            ),
            hang_timeout_s=args.hang_timeout,
            ends_ranks=self.starter != "torchrun",
            telemetry_s=args.telemetry,
        )


class RankStarter:
    """Starts the ranks of this node, and hears the user."""

    recorders = 8
    """How many recorders need room: a usual number where nobody says how many ranks there will be."""
    signals_first = False
    """An exit code that a signal has made says more than what a rank has seen."""

    def run(self, life: JobLife) -> pipe.LaunchDone:
        """Start the helpers, then the ranks, and wait for the end of all ranks."""
        raise NotImplementedError

    def settle(self, done: pipe.LaunchDone) -> pipe.LaunchDone:
        """The ranks have ended: tell the user if needed. Returns the message for the agent."""
        return done

    def wait(self, life: JobLife) -> bool:
        """Wait for the verdict. False if the user would not, and there is none."""
        life.wait()
        return True

    def conclude(self, verdict: pipe.JobResult | None) -> None:
        """It is there, or never will be: print it."""

    def exit_code(self, done: pipe.LaunchDone, verdict: pipe.JobResult | None, left: bool) -> int:
        """What to exit with. `left`: the user would not wait for the verdict."""
        return 0

    def close(self) -> None:
        """No rank stays behind."""


class JobLife:
    """The helpers of one node, and its ranks. `say` takes sentences for the user.

    The ranks seal the values of their preflight with `meeting_key`.
    """

    scratch: Path
    overflows: SeenOverflows

    def __init__(self, ranks: RankStarter, meeting_key: str, say: Callable[[str], object] = say) -> None:
        self._ranks = ranks
        self._meeting_key = meeting_key
        self._say = say
        self._collector: HeadCollector | None = None
        self.agent: NodeAgent | None = None
        self.run_dir: Path | None = None
        """Where the report will be, if the collector is of this node."""
        self.hurry = False
        """Do not wait for the helpers at the end."""
        self.finishing = threading.Lock()

    def run(self) -> int:
        """Helpers up, ranks, helpers down. Returns the exit code."""
        self.scratch = make_scratch(self._ranks.recorders, self._say)
        self.overflows = SeenOverflows(self.scratch)
        try:
            try:
                done = self._ranks.run(self)
            except UsageError as error:
                done = pipe.LaunchDone("failed", error=error.text)
                self.send(done)
                raise
            with self.finishing:
                return self.finish(done)
        finally:
            self.clear_up()

    def start_agent(self, config: pipe.AgentConfig, stop: Callable[[str, bool], object]) -> NodeAgent:
        """Start the node agent. Call it once the ranks' settings are known.

        `stop` gets the reason why the ranks of this node must end, and whether torchrun may start them again.
        """
        with suppress(OSError):  # the ranks meet, and seal nothing
            write_meeting_key(self.scratch, self._meeting_key)
        self.agent = NodeAgent(config, self._say, stop)
        return self.agent

    @property
    def verdict(self) -> pipe.JobResult | None:
        """None as long as there is none."""
        return self.agent.verdict if self.agent is not None else None

    def send(self, message: msgspec.Struct) -> None:
        """Tell the agent something."""
        if self.agent is not None:
            self.agent.send(message)

    def wait(self) -> None:
        """Wait until the agent has a verdict or is given up, and the collector has printed its last line."""
        if self.agent is not None:
            self.agent.wait()
        if self._collector is not None:
            self._collector.wait(_LAST_LINE_S)

    def _end_collector(self) -> None:
        if self._collector is not None:
            self._collector.end(0.0 if self.hurry else _CHILD_END_S)
            self._collector = None

    def start_collector(self, terms: JobTerms, show: Callable[[pipe.StageLine | pipe.PreflightOver], object]) -> str:
        """Start the collector if it is ours to start. Returns the address for the node agent."""
        plan = terms.plan
        if not plan.hosts:
            return plan.connect
        if not terms.args.check_only and (lack := without_c()):
            self._say(coded(lack, Code.NO_C_PART))
        self._collector = HeadCollector(terms.collector_config(self.scratch), self._say, show)
        answer = self._collector.answer
        if isinstance(answer, pipe.CollectorBound):
            self.run_dir = Path(answer.run_dir)
            remember_run(self.run_dir)
            relative = os.path.relpath(answer.run_dir)
            self._say(f"the report will be in {answer.run_dir if relative.startswith('..') else relative}")
            for note in terms.args.notes:
                self._say(note)
            if answer.metrics:
                self._say(f"Prometheus metrics are at {answer.metrics}")
            return plan.connect or answer.address
        if answer is not None and answer.code is not None:
            raise UsageError(answer.code, answer.reason)
        if answer is None or answer.may_pass:
            why = f": {answer.reason}" if answer is not None else ""
            text = f"the collector did not start{why}; the training goes on, and this node keeps its own records"
            self._say(coded(text, Code.COLLECTOR_ENDED))
        elif not answer.in_use:
            raise UsageError(
                Code.NOT_WRITABLE,
                f"expected to start a collector at {plan.bind}, found: {answer.reason}; "
                "pass another --runs-dir DIR or --collector-port PORT",
            )
        self._end_collector()
        if answer is not None and answer.in_use and not (plan.may_join and answers(plan.connect, terms.keys)):
            raise UsageError(
                Code.ADDRESS_IN_USE,
                f"the port of {plan.bind.removeprefix('tcp://')} is in use by something that is not this run's "
                "collector; pass a free one with --collector-port PORT, the same on every node",
            )
        return plan.connect

    @property
    def logs(self) -> Path:
        """Folder for the files of `--nccl-debug`, once the collector is up."""
        return self.run_dir / "logs" if self.run_dir is not None else self.scratch

    def finish(self, done: pipe.LaunchDone) -> int:
        """The ranks have ended: wait for the verdict, have it printed, and say what to exit with."""
        done = self._ranks.settle(done)
        self.send(done)
        if not self._ranks.wait(self):
            self.hurry = True
            return self._exit_code(done, None, left=True)
        self._ranks.conclude(verdict := self.verdict)
        if verdict is None:
            self._say(coded("no verdict: the node agent ended without one", Code.VERDICT_LATE))
        return self._exit_code(done, verdict, left=False)

    def _exit_code(self, done: pipe.LaunchDone, verdict: pipe.JobResult | None, *, left: bool) -> int:
        """What a rank has said itself counts more than a verdict that knows nothing of it."""
        code, overflow = self._ranks.exit_code(done, verdict, left), self.overflows.sentence
        if not overflow or (verdict is not None and verdict.kind.outranks):
            return code
        if self._ranks.signals_first and code >= ExitCode.SIGNAL:
            return code
        self._say(coded(f"{overflow}; {where_it_is(self.verdict)}", Code.VERDICT_LATE))
        return int(ExitCode.OVERFLOW)

    def clear_up(self) -> None:
        """Nothing of this node's part stays behind. Twice does no harm."""
        self._ranks.close()
        if self.agent is not None:
            self.agent.end(0.0 if self.hurry else _CHILD_END_S)
            self.agent = None
        self._end_collector()
        for left in self.run_dir.glob(".overflow-*") if self.run_dir is not None else ():
            with suppress(OSError):  # its rank was killed as it wrote this for --capture
                left.unlink()
        keep_rescued(self.scratch, self._say)
        remove_scratch(self.scratch)
