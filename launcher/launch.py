"""`gpuwatch launch` from its options to its exit code."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType, TracebackType

import msgspec
import psutil
import zmq
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname
from torch.distributed.run import determine_local_world_size

from ..core import host
from ..core.errors import UsageError
from ..core.exits import ExitCode
from ..core.keys import JobKeys, derive_keys, random_secret, read_secret
from ..core.pipe import (
    AgentConfig,
    Bound,
    CannotBind,
    CollectorConfig,
    LaunchDone,
    Notice,
    StopRequest,
    Verdict,
    WorkersEnded,
    WorkersStarted,
    read_from_agent,
    read_from_collector,
    write_line,
)
from ..core.recorder.layout import Field, file_name
from ..core.recorder.reader import NotReady, RecorderReader
from ..core.settings import WorkerSettings
from .children import Child
from .elastic import run_torchrun
from .options import check_together, get_parser
from .plan import Plan, make_plan
from .scratch import make_scratch, remove_scratch

_VERDICT_WAIT_S = 420.0
_CHILD_END_S = 20.0
_BIND_WAIT_S = 30.0


def say(text: str) -> None:
    """One line for the user; the script's own stdout stays untouched."""
    print(f"gpuwatch: {text}", file=sys.stderr, flush=True)


def launch(arguments: list[str]) -> int:
    """Run a job. Returns the exit code; raises UsageError when the options cannot work."""
    args = get_parser().parse_args(arguments)
    plan = make_plan(args, _matches_machine_hostname)
    nproc = _check(args)
    keys = _keys(args, plan)
    command = ["gpuwatch", "launch", *arguments]
    with _signals_raise():
        return _Launch(args, plan, keys, nproc, command).run()


def _check(args: argparse.Namespace) -> int:
    """What torchrun would only find out later, said in one sentence. Returns the number of ranks of this node."""
    if args.no_python and args.module:
        raise UsageError("expected one of --no-python and -m/--module, found both; drop one of them")
    if not args.module and not args.no_python and not Path(args.training_script).exists():
        raise UsageError(f"expected a script to run, found no file {args.training_script!r} in {Path.cwd()}")
    check_together(args)
    if args.max_restarts < 0:
        raise UsageError(f"--max-restarts: expected 0 or more, found {args.max_restarts}")
    try:
        nproc = int(determine_local_world_size(args.nproc_per_node))
    except ValueError as error:
        raise UsageError(
            f"--nproc-per-node: expected a number, cpu, gpu or auto, found {args.nproc_per_node!r} ({error})"
        ) from error
    if nproc < 1:
        raise UsageError(f"--nproc-per-node: expected 1 or more, found {nproc}")
    return nproc


def _keys(args: argparse.Namespace, plan: Plan) -> JobKeys:
    secret = read_secret(args.secret_file)
    if secret is None and plan.local:
        secret = random_secret()
    elif secret is None:
        say(
            f"encrypting with keys derived from the rendezvous id {plan.job!r}; to keep others on this network out, "
            "give every node the same GPUWATCH_SECRET or --secret-file"
        )
        secret = f"rendezvous id {plan.job}"
    return derive_keys(secret, plan.job)


class _signals_raise:
    """Until torchrun installs its own handlers, SIGTERM and SIGHUP raise what torchrun's handlers raise."""

    def __enter__(self) -> None:
        self._before = {number: signal.signal(number, self._raise) for number in (signal.SIGTERM, signal.SIGHUP)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @staticmethod
    def _raise(number: int, frame: FrameType | None) -> None:
        raise SignalException(f"gpuwatch launch got {signal.Signals(number).name}", signal.Signals(number))


class _Launch:
    """One launch: its children, and what torchrun tells it (see elastic.Listener)."""

    def __init__(self, args: argparse.Namespace, plan: Plan, keys: JobKeys, nproc: int, command: list[str]) -> None:
        self._args = args
        self._plan = plan
        self._keys = keys
        self._nproc = nproc
        self._command = command
        self._collector: Child | None = None
        self._agent: Child | None = None
        self._verdict: Verdict | None = None
        self._stop = threading.Event()
        self._answered = threading.Event()
        self._any_started = False
        self._hurry = False
        self._ranks: list[psutil.Process] = []

    def run(self) -> int:
        """Children up, torchrun, children down, exit code."""
        self._scratch = make_scratch(self._nproc)
        self.settings = self._worker_settings()
        try:
            address = self._start_collector()
            self._start_agent(address)
            say(f"running under torchrun: {shlex.join([self._args.training_script, *self._args.training_script_args])}")
            outcome = self._run_torchrun()
            return self._finish(outcome)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)  # from here on it is a matter of seconds, and must be done
            self._kill_ranks()
            self._end_children()
            remove_scratch(self._scratch)

    def _worker_settings(self) -> WorkerSettings:
        args = self._args
        return WorkerSettings(
            recorder_dir=str(self._scratch),
            on_overflow=args.on_overflow,
            max_frames=args.max_frames,
            trace_batches=args.trace_batches,
            abort_after_batch=args.abort_after_batch,
            preflight=args.preflight,
            preflight_timeout_s=args.preflight_timeout,
            on_preflight_failure=args.on_preflight_failure,
            watch=args.watch,
            modules=args.modules,
            every=args.every,
            sync=args.sync,
            guard_optimizer=args.guard_optimizer,
            ignore=args.ignore,
            near_overflow=args.near_overflow,
            underflow_share=args.underflow_share,
            scaler_skips=args.scaler_skips,
            measure_cost=args.measure_cost,
        )

    # -- the children -------------------------------------------------------------------------------------------

    def _start_collector(self) -> str:
        """Start the collector if it is ours to start. Returns the address for the node agent."""
        plan = self._plan
        if not plan.hosts:
            return plan.connect
        config = CollectorConfig(
            bind=plan.bind,
            public_key=self._keys.collector.public.decode(),
            private_key=self._keys.collector.private.decode(),
            agent_public_key=self._keys.agent.public.decode(),
            runs_dir=str(Path(self._args.runs_dir).absolute()),
            rdzv_id=plan.job,
            max_frames=self._args.max_frames,
        )
        self._collector = Child("collector", config)
        answer = self._first_word(self._collector)
        if isinstance(answer, Bound):
            say(f"the report will be in {_relative(answer.run_dir)}")
            return plan.connect or answer.address
        if answer is None:
            say("the collector did not start; training on, and this node's own records will be kept")
        elif not answer.in_use:
            raise UsageError(
                f"expected to start a collector at {plan.bind}, found: {answer.reason}; "
                "pass another --runs-dir DIR or --collector-port PORT"
            )
        self._end_collector()
        if answer is not None and not (plan.may_join and self._is_our_collector(plan.connect)):
            raise UsageError(
                f"the port of {plan.bind.removeprefix('tcp://')} is in use by something that is not this run's "
                "collector; pass a free one with --collector-port PORT, the same on every node"
            )
        return plan.connect

    def _first_word(self, child: Child) -> Bound | CannotBind | None:
        """What the collector says first; None if it died or says nothing in time."""
        timer = threading.Timer(_BIND_WAIT_S, child.kill)
        timer.start()
        try:
            for line in child.stdout:
                message = read_from_collector(line)
                if isinstance(message, Notice):
                    say(message.text)
                else:
                    return message
            return None
        finally:
            timer.cancel()

    def _is_our_collector(self, address: str) -> bool:
        """Whether who listens at `address` has the private key of this job's collector: the handshake tells."""
        context = zmq.Context()
        probe = context.socket(zmq.DEALER)
        try:
            probe.linger = 0
            probe.curve_serverkey = self._keys.collector.public
            probe.curve_publickey, probe.curve_secretkey = self._keys.agent
            monitor = probe.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            probe.connect(address)
            return bool(monitor.poll(5000))
        finally:
            probe.disable_monitor()
            probe.close(linger=0)
            context.destroy(linger=0)

    def _start_agent(self, address: str) -> None:
        plan = self._plan
        config = AgentConfig(
            collector=address,
            server_key=self._keys.collector.public.decode(),
            public_key=self._keys.agent.public.decode(),
            private_key=self._keys.agent.private.decode(),
            recorder_dir=str(self._scratch),
            spool_dir=str(Path(self._args.runs_dir).absolute()),
            nproc=self._nproc,
            min_nodes=plan.min_nodes,
            max_nodes=plan.max_nodes,
            command=self._command,
            versions=host.versions(),
            rdzv_id=plan.job,
            trace_batches=self._args.trace_batches,
        )
        self._agent = Child("launcher.agent", config)
        threading.Thread(target=self._listen, args=(self._agent,), daemon=True, name="gpuwatch-listen").start()

    def _listen(self, agent: Child) -> None:
        """Read what the node agent says, until it ends."""
        for line in agent.stdout:
            try:
                message = read_from_agent(line)
            except msgspec.DecodeError:
                continue
            if isinstance(message, Notice):
                say(message.text)
            elif isinstance(message, StopRequest):
                say(f"stopping the ranks of this node: {message.reason}")
                self._stop.set()
            elif isinstance(message, Verdict):
                self._verdict = message
        self._answered.set()

    def _kill_ranks(self) -> None:
        """Only after a second signal has torn torchrun out of its own shutdown is there anything to do."""
        for rank in self._ranks:
            try:
                rank.kill()
            except psutil.Error:
                pass

    def _end_collector(self) -> None:
        if self._collector is not None:
            self._collector.end(0.0 if self._hurry else _CHILD_END_S)
            self._collector = None

    def _end_children(self) -> None:
        if self._agent is not None:
            self._agent.end(0.0 if self._hurry else _CHILD_END_S)
            self._agent = None
        self._end_collector()

    # -- torchrun -----------------------------------------------------------------------------------------------

    def _run_torchrun(self) -> LaunchDone:
        """Run it to its end; its errors are printed as it prints them."""
        try:
            run_torchrun(self._args, self)
        except SignalException as error:
            return LaunchDone("signal", int(error.sigval))
        except KeyboardInterrupt:
            return LaunchDone("signal", int(signal.SIGINT))
        except ChildFailedError as error:
            traceback.print_exception(type(error), error, _torch_frames(error.__traceback__))
            return LaunchDone("failed")
        except (ValueError, AssertionError) as error:
            if not self._any_started:
                raise UsageError(f"torchrun does not take these options: {error}") from error
            traceback.print_exc()
            return LaunchDone("failed")
        except Exception:
            traceback.print_exc()
            return LaunchDone("failed")
        return LaunchDone("ok")

    def started(self, attempt: int, pids: dict[int, int], local_ranks: dict[int, int]) -> None:
        """The ranks of this node run."""
        self._any_started = True
        for pid in pids.values():
            try:
                self._ranks.append(psutil.Process(pid))
            except psutil.Error:
                pass
        self._tell(WorkersStarted(attempt, pids, local_ranks))

    def ended(self, attempt: int, codes: dict[int, int | None], failed: list[int]) -> None:
        """The ranks of this node have ended."""
        self._tell(WorkersEnded(attempt, codes, failed))

    def notice(self, text: str) -> None:
        """One sentence for the user."""
        say(text)

    def stop_requested(self) -> bool:
        """The job cannot go on elsewhere."""
        return self._stop.is_set()

    def may_restart(self, attempt: int, ranks: list[int]) -> bool:
        """Not after an abort: the same overflow, or the same bad GPU, would only be met again."""
        return not any(_aborted(self._scratch / file_name(rank, attempt)) for rank in ranks)

    def _tell(self, message: msgspec.Struct) -> None:
        if self._agent is not None:
            write_line(self._agent.stdin, message)

    # -- the end ------------------------------------------------------------------------------------------------

    def _finish(self, done: LaunchDone) -> int:
        """Wait for the verdict, print it, and say what to exit with."""
        if done.outcome == "signal":
            say(f"got {signal.Signals(done.signal).name}; writing the report (once more: leave at once)")
        self._tell(done)
        fallback = {"ok": int(ExitCode.CLEAN), "failed": int(ExitCode.SCRIPT_FAILED)}.get(
            done.outcome, int(ExitCode.SIGNAL) + done.signal
        )
        try:
            self._answered.wait(_VERDICT_WAIT_S)
        except (SignalException, KeyboardInterrupt):
            self._hurry = True
            return fallback
        verdict = self._verdict
        if verdict is None:
            say("no verdict: the node agent ended without one")
            return fallback
        print(verdict.text, file=sys.stderr, flush=True)
        return verdict.exit_code


def _aborted(recorder: Path) -> bool:
    try:
        reader = RecorderReader(recorder)
    except (OSError, NotReady):
        return False
    code = reader[Field.ABORT]
    reader.close()
    return code != 0


def _relative(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def _torch_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from torch's first frame on: what torchrun itself would print."""
    first = trace
    while first is not None and "torch" not in first.tb_frame.f_globals.get("__name__", "").split("."):
        first = first.tb_next
    return first or trace
