"""The worker's side of the preflight: start the coordinator, record its lines, kill it if it hangs, decide.

The coordinator has a deadline for everything that it does and announces it beforehand. The worker waits a little longer
than that. A coordinator that died or hung is replaced by a second one, which informs the other ranks at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from contextlib import suppress

from msgspec.structs import replace

from ...core.codes import Code, ExitCode, coded
from ...core.events.own_limits import OwnFault
from ...core.events.preflight_events import PreflightBegan, PreflightResult, RankOutcome
from ...core.guest.own_imports import own_command
from ...core.guest.tell import say
from ...core.host import host_name, lines_until
from ...core.identity import RankIdentity
from ...core.preflight import PreflightFinding
from ...core.recorder.layout import HeadField, RankPhase, seal
from ...core.settings import VARIABLE
from ...core.text import messages_among
from ..session import WorkerSession
from .probe_child import exit_text
from .steps import LINES, Line, PreflightEnd, StageDeadlines, StageProgress

_MARGIN_S = 5.0
"""Time for a coordinator to detect that one of its tests hangs, and to kill it."""
_TELLER_S = 30.0
"""Time for a second coordinator to import torch and to connect to the store."""
MOST_WRITTEN = 100
"""Most findings, and most other ranks, that a rank records: every rank records them, and there may be many ranks."""


class CoordinatorRun:
    """One coordinator process and its progress."""

    def __init__(self, session: WorkerSession, identity: RankIdentity, arguments: list[str], limit_s: float) -> None:
        self.stage = "inventory"
        self.at = StageProgress("arrive")
        self.hung_s: float | None = None
        self.exit_code: int | None = None
        self._concluded: PreflightEnd | None = None
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by how_it_fell
        self._process = subprocess.Popen(
            own_command(f"{__package__}.coordinator", "--parent", str(os.getpid()), *arguments),
            env={**os.environ, **identity.to_environment(), VARIABLE: session.settings.to_json()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )

    def follow(self, session: WorkerSession) -> PreflightEnd | None:
        """Record the events of the coordinator, until it ends or is killed at its deadline. Returns the conclusion."""
        pipe = self._process.stdout
        assert pipe is not None
        try:
            for line in messages_among(lines_until(pipe.fileno(), lambda: self._deadline), LINES):
                self._note(line)
                if not isinstance(line, StageProgress | PreflightEnd):
                    session.recorder.append(replace(line, where=session.where()))
        except TimeoutError:
            self.hung_s = self._limit_s
        # the kernel ends its tests with it (`die_with_parent`)
        if self.hung_s is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self.exit_code = self._process.wait()
        pipe.close()
        return self._concluded

    def _note(self, line: Line) -> None:
        if isinstance(line, PreflightBegan):
            self.stage, self.at = line.stage, StageProgress(self.at.step)
            self._allow(line.limit_s + _MARGIN_S)
        elif isinstance(line, StageProgress):
            self.at = line
            if line.limit_s:
                self._allow(line.limit_s + _MARGIN_S)
        elif isinstance(line, PreflightEnd):
            self._concluded = line
            self._allow(_MARGIN_S)

    def _allow(self, seconds: float) -> None:
        self._limit_s = seconds
        self._deadline = time.monotonic() + seconds

    def how_it_fell(self) -> str:
        """Why there is no conclusion, as the predicate of a sentence whose subject is the rank."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        self._errors.close()
        last_words = f": {lines[-1][:500]}" if lines else ""
        at = f" at {self.at.doing}" if self.at.doing else ""
        if self.hung_s is not None and self.at.waits:
            return f"heard nothing from the store for {self.hung_s:.0f} s in stage {self.stage}"
        if self.hung_s is not None:
            return f"hung in stage {self.stage}{at} for {self.hung_s:.0f} s"
        return f"died in stage {self.stage}{at}: {exit_text(self.exit_code)}{last_words}"


def preflight_or_exit(session: WorkerSession, identity: RankIdentity, script: str) -> None:
    """Test this rank. Ends the process if the training should not start. Raises SystemExit alone."""
    session.enter(RankPhase.PREFLIGHT)
    try:
        sentence = run_preflight(session, identity, script)
    except Exception as error:
        session.recorder.append(OwnFault(session.where(), "preflight", f"{type(error).__name__}: {error}"))
        return
    if sentence is not None:
        session.recorder.fields[HeadField.ABORT] = seal(ExitCode.PREFLIGHT_FAILED)
        if identity.local_rank == 0:  # all ranks have the same sentence
            say(coded(sentence, Code.PREFLIGHT))
        raise SystemExit(ExitCode.PREFLIGHT_FAILED)


def run_preflight(session: WorkerSession, identity: RankIdentity, script: str = "") -> str | None:
    """Test this rank. Returns None if the rank may go on, else the sentence with which it stops."""
    settings, recorder = session.settings, session.recorder
    if not identity.agent_store:
        detail = "torchrun's agent hosts no store here (TORCHELASTIC_USE_AGENT_STORE is not True)"
        recorder.append(PreflightResult(session.where(), "skipped", detail=detail, stops=settings.check_only))
        return f"nothing was checked: {detail}" if settings.check_only else None
    limit_s = StageDeadlines(settings.preflight_timeout_s).work("inventory") + _MARGIN_S
    try:
        coordinator = CoordinatorRun(session, identity, ["--script", script], limit_s)
    except OSError as error:  # out of memory or processes: the script would fail, too
        return _decide(session, identity, _unheard(identity, "inventory", f"could not start its preflight: {error}"))
    concluded = coordinator.follow(session) or _tell_others(session, identity, coordinator)
    return _decide(session, identity, concluded)


def _tell_others(session: WorkerSession, identity: RankIdentity, fell: CoordinatorRun) -> PreflightEnd:
    """Report in the store that this rank's coordinator failed. Returns the conclusion."""
    detail = fell.how_it_fell()
    arguments = ["--fallen", fell.at.step, "--stage", fell.stage, "--detail", detail]
    try:
        teller = CoordinatorRun(session, identity, arguments, _TELLER_S)
    except OSError:
        return _unheard(identity, fell.stage, detail)
    return teller.follow(session) or _unheard(identity, fell.stage, detail)


def _unheard(identity: RankIdentity, stage: str, detail: str) -> PreflightEnd:
    """The conclusion of a rank that cannot inform the others: they only find that it is missing."""
    host = host_name()
    sentence = f"rank {identity.rank} ({host}) {detail}; it could not report this to the others"
    finding = PreflightFinding(stage, "fail", "rank", [identity.rank], [host], sentence, code=Code.RANK_SILENT)
    return PreflightEnd([finding], [RankOutcome(identity.rank, "failed", stage, detail)])


def _decide(session: WorkerSession, identity: RankIdentity, concluded: PreflightEnd) -> str | None:
    rank = identity.rank
    failures = [finding for finding in concluded.findings if finding.grade == "fail"]
    stops = bool(failures) and session.settings.on_preflight_failure == "stop"
    mine = next((one for one in concluded.outcomes if one.rank == rank), RankOutcome(rank, "ok"))
    peers = sorted((o for o in concluded.outcomes if o.rank != rank), key=lambda o: o.outcome)  # failed, then victims
    session.recorder.append(
        PreflightResult(
            session.where(),
            mine.outcome,
            mine.stage,
            mine.detail,
            stops,
            concluded.backend,
            concluded.device,
            peers[:MOST_WRITTEN],
            concluded.findings[:MOST_WRITTEN],
        )
    )
    if not stops:
        return None
    first = failures[0]
    more = f" (and {len(failures) - 1} more)" if failures[1:] else ""
    sentence = f"preflight failed in stage {first.stage}: {first.sentence}{more}."
    if session.settings.check_only:
        return sentence
    return (
        f"{sentence} To start the training anyway: --on-preflight-failure continue; without the test: --preflight off"
    )
