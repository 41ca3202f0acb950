"""The preflight as the worker sees it: start the probe, watch its stages, enforce the deadline, decide.

worker (no torch yet) --starts--> probe child --JSON lines--> worker --events--> recorder
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time

from ..core.records import Inventory, PeerOutcome, PreflightResult, PreflightStage
from .identity import Identity
from .orphan import die_with_parent
from .probe_report import AllOutcomes, Line, RankOutcome, Runtime, StageBegan, StageEnded, parse
from .session import Session

_EXCHANGE_S = 20.0
"""How much longer than its own deadline a rank waits for the conclusions of the others."""


class ProbeRun:
    """One probe child and what it has said so far."""

    def __init__(self, arguments: list[str], deadline_s: float) -> None:
        self.stage = "start"
        self.runtime: Runtime | None = None
        self.mine: RankOutcome | None = None
        self.all: AllOutcomes | None = None
        self.hung = False
        self.exit_code: int | None = None
        self._deadline = time.monotonic() + deadline_s
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by last_words
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.probe", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            preexec_fn=die_with_parent,  # a worker has no threads yet
        )

    def lines(self) -> list[Line]:
        """Wait for the child to say something; an empty list once it has ended or was killed at its deadline."""
        pipe = self._process.stdout
        assert pipe is not None
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            ready = selector.select(max(0.0, self._deadline - time.monotonic()))
        if not ready:
            self.hung = True
            self._end()
            return []
        line = pipe.readline()
        if not line:
            self._end()
            return []
        parsed = parse(line)
        if isinstance(parsed, StageBegan):
            self.stage = parsed.stage
        elif isinstance(parsed, Runtime):
            self.runtime = parsed
        elif isinstance(parsed, RankOutcome):
            self.mine = parsed
            self._deadline += _EXCHANGE_S
        elif isinstance(parsed, AllOutcomes):
            self.all = parsed
        return [parsed] if parsed is not None else self.lines()

    def _end(self) -> None:
        if self.hung:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.exit_code = self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def last_words(self) -> str:
        """The end of what the child wrote to stderr."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        self._errors.close()
        return lines[-1][:500] if lines else ""


def run_preflight(session: Session, identity: Identity) -> str | None:
    """Probe this rank. Returns None to go on, or the sentence with which to stop."""
    settings, recorder = session.settings, session.recorder
    if not identity.agent_store:
        detail = "torchrun's agent hosts no store here (TORCHELASTIC_USE_AGENT_STORE is not True)"
        recorder.append(PreflightResult(session.where(), "skipped", detail=detail))
        return None
    prefix = f"gpuwatch/{settings.round}"
    probe = ProbeRun(["--prefix", prefix, "--timeout", str(settings.preflight_timeout_s)], settings.preflight_timeout_s)
    _follow(session, probe)
    mine = probe.mine
    everyone = probe.all
    if mine is None:
        detail = (
            f"hung in stage {probe.stage} for {settings.preflight_timeout_s:.0f} s"
            if probe.hung
            else f"died in stage {probe.stage} ({_exit_text(probe.exit_code)}): {probe.last_words()}".rstrip(": ")
        )
        mine = RankOutcome(identity.rank, "failed", probe.stage, detail)
        teller = ProbeRun(
            ["--prefix", prefix, "--timeout", "20", "--failed-stage", probe.stage, "--detail", detail], 40.0
        )
        _follow(session, teller)
        everyone = teller.all
    others = [o for o in everyone.outcomes if o.outcome != "ok"] if everyone else []
    failed = mine.outcome != "ok" or bool(others) or bool(everyone and everyone.silent)
    stops = failed and settings.on_preflight_failure == "stop"
    recorder.append(
        PreflightResult(
            session.where(),
            mine.outcome,
            mine.stage,
            mine.detail,
            stops,
            probe.runtime.backend if probe.runtime else "",
            probe.runtime.device if probe.runtime else "",
            _peers(identity.rank, everyone) if failed else [],
        )
    )
    if not stops:
        return None
    return _sentence(mine, others)


def _peers(rank: int, everyone: AllOutcomes | None) -> list[PeerOutcome]:
    if everyone is None:
        return []
    return [PeerOutcome(o.rank, o.outcome, o.stage, o.detail) for o in everyone.outcomes if o.rank != rank]


def _follow(session: Session, probe: ProbeRun) -> None:
    while lines := probe.lines():
        for line in lines:
            if isinstance(line, StageEnded):
                session.recorder.append(PreflightStage(session.where(), line.stage, True, line.seconds, line.detail))
            elif isinstance(line, Runtime):
                session.recorder.append(Inventory(session.where(), line.device, line.versions))


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _sentence(mine: RankOutcome, others: list[RankOutcome]) -> str:
    """What this rank prints: its own failure first, else the one that is to blame."""
    blamed = mine if mine.outcome == "failed" else next((o for o in others if o.outcome == "failed"), mine)
    host = f" on {blamed.host}" if blamed.host else ""
    return (
        f"preflight failed: rank {blamed.rank}{host} in stage {blamed.stage}: {blamed.detail}. "
        "To start the training all the same: --on-preflight-failure continue; without the test: --preflight off"
    )
