"""Starts a scenario under the real command, and says whether the verdict is the truth."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import psutil
from gpuwatch.collector.store import RunStore
from gpuwatch.core.events.alarms import Anomaly
from gpuwatch.core.wire.messages import EventMessage
from truths import ANY, Scenario

SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 600
WITNESS = "SCENARIO_WITNESS"
LATE_DEVICE = "GPUWATCH_LATE_DEVICE"
"""With a seed, ranks treat their CPU tensors as those of a device whose numbers come late."""
NAMES = ("kind", "rank", "module", "root", "concurrent")
"""What a verdict names: saying something else here is worse than saying nothing."""


class Grade(Enum):
    """What a verdict is worth, in points."""

    RIGHT = 1
    UNKNOWN = 0
    """It claims less than the truth, or names it and misses something beside it. Nothing that it names is wrong."""
    WRONG = -2


@dataclass
class Outcome:
    """One run of one scenario."""

    scenario: Scenario
    grade: Grade
    expected: str
    found: str
    seconds: float
    differences: list[str] = field(default_factory=list)
    log: str = ""
    over_sure: bool = False
    """It says `established` of a wrong answer, or of one that cannot be established."""
    kind: str = ""
    """The verdict's."""
    certainty: str = ""
    fault_to_report_s: float | None = None
    """From the first alarm's own time to the report with the verdict; None where there was no alarm."""

    @property
    def is_false_clean(self) -> bool:
        """An overflow, a crash or an open question was reported as clean."""
        return self.kind == "clean" and self.scenario.verdict["kind"] != "clean"

    @property
    def is_false_alarm(self) -> bool:
        """Nothing was wrong, and something else than clean was reported."""
        return self.kind != "clean" and self.scenario.verdict["kind"] == "clean"

    @property
    def can_be_established(self) -> bool:
        """Whether the truth is a fault that the evidence of a run can prove."""
        truth = self.scenario.verdict
        return truth["kind"] != "clean" and truth.get("certainty") not in ("supported", "unknown")


@dataclass
class Ended:
    """A command that has ended."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float


def run(scenario: Scenario) -> Outcome:
    """Under `gpuwatch launch`."""
    with tempfile.TemporaryDirectory(prefix="scenario-") as folder:
        ended = start_watched(scenario, folder)
        path = Path(folder) / "gpuwatch-runs" / "latest" / "report.json"
        report = json.loads(path.read_text()) if path.exists() else None
        outcome = judge(scenario, ended, report)
        outcome.fault_to_report_s = _fault_to_report_s(path)
    return outcome


def _fault_to_report_s(report: Path) -> float | None:
    """Both times are this host's."""
    if not report.exists():
        return None
    store = RunStore(report.with_name("run.sqlite"))
    try:
        alarms = [
            body.event.where.time_ns
            for _, _, body in store.messages()
            if isinstance(body, EventMessage) and isinstance(body.event, Anomaly)
        ]
    finally:
        store.close()
    return (report.stat().st_mtime_ns - min(alarms)) / 1e9 if alarms else None


def start_watched(scenario: Scenario, folder: str) -> Ended:
    """Under `gpuwatch launch` in a folder, which then holds its run."""
    options = [*scenario.options, *(() if scenario.preflight else ("--preflight", "off"))]
    return _start(
        ["gpuwatch.cli.main", "launch", "--standalone", "--nproc-per-node", str(scenario.nproc), *options],
        scenario,
        folder,
    )


def run_plain(scenario: Scenario) -> Outcome:
    """Under torchrun with the witness, to check the scenario itself: the fault is where the truth says."""
    with tempfile.TemporaryDirectory(prefix="scenario-") as folder:
        ended = _start(
            ["torch.distributed.run", "--standalone", "--nproc-per-node", str(scenario.nproc)],
            scenario,
            folder,
            {WITNESS: "" if scenario.script == "compiled.py" else "1"},  # the witness cannot be compiled
        )
    said = [line.partition(" ")[2] for line in ended.stdout.splitlines() if line.startswith("witness ")]
    expected = scenario.said_by_witness
    differences = [f"exit code {ended.code}"] if ended.code else []
    if expected == "":
        differences += said
    elif expected is not None and scenario.script != "compiled.py":
        batch = scenario.verdict.get("batch") if "batch=" not in expected else None
        wanted = f"{expected} batch={batch}" if batch is not None else expected
        if not any(line == wanted or line.startswith(f"{wanted} ") for line in said):
            differences.append("not said")
    grade = Grade.WRONG if differences else Grade.RIGHT
    shown = expected if expected is not None else "(asserted by the script)"
    return Outcome(scenario, grade, shown, "; ".join(said[:3]), ended.seconds, differences, _log(ended))


def judge(scenario: Scenario, ended: Ended, report: dict[str, Any] | None) -> Outcome:
    """Compare what was found with the truth."""
    expected = _text(scenario.verdict, scenario.together)
    if report is None:
        how = f"no report, exit code {ended.code}" if ended.code is not None else f"not ended after {TIMEOUT_S} s"
        return Outcome(scenario, Grade.WRONG, expected, how, ended.seconds, [how], _log(ended))
    verdict = report["verdict"]
    named = dict(_differing(scenario.verdict, verdict))
    found = {entry["rank"]: entry["module"] for entry in [verdict, *verdict["concurrent"]]}
    if found != (scenario.together or {verdict["rank"]: verdict["module"]}):
        named["concurrent"] = f"the origins are {found}"
    if "kind" in named:
        named = {"kind": named["kind"]}  # the rest follows from it
    beside = list(_differing_beside(scenario, ended, report))
    if not named and not beside:
        grade = Grade.RIGHT
    elif _says_less(scenario, verdict):
        grade = Grade.UNKNOWN
    else:
        grade = Grade.WRONG if any(name in NAMES for name in named) else Grade.UNKNOWN
    differences = [f"{name}: {text}" for name, text in named.items()] + beside
    open_question = scenario.verdict.get("certainty") in ("supported", "unknown")
    over_sure = verdict["certainty"] == "established" and (grade is Grade.WRONG or open_question)
    log = f"{verdict['statement']}\n{json.dumps(verdict, indent=1)}\n{_log(ended)}" if differences else ""
    return Outcome(
        scenario,
        grade,
        expected,
        _text(verdict, found),
        ended.seconds,
        differences,
        log,
        over_sure,
        kind=verdict["kind"],
        certainty=verdict["certainty"],
    )


def _says_less(scenario: Scenario, verdict: dict[str, Any]) -> bool:
    if scenario.verdict["kind"] == "clean":
        return False
    unknown = verdict["kind"] == "overflow" and verdict["certainty"] == "unknown" and verdict["rank"] is None
    return unknown or any(not list(_differing(weaker, verdict)) for weaker in scenario.weaker)


def _differing(wanted: dict[str, Any], verdict: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(field, the value found there and the one expected)."""
    for name, value in wanted.items():
        found = verdict[name]
        if name == "between" and value is not None and found is not None:
            same = all(left in (right, ANY) for left, right in zip(value, found, strict=True))
        else:
            same = found in value if isinstance(value, set) else found == value
        if not same:
            yield name, f"{found!r}, not {value!r}"
    if "certainty" not in wanted and wanted["kind"] == "overflow" and verdict["certainty"] == "unknown":
        yield "certainty", "unknown"


def _differing_beside(scenario: Scenario, ended: Ended, report: dict[str, Any]) -> Iterator[str]:
    if ended.code != scenario.code:
        yield f"exit code {ended.code}, not {scenario.code}"
    verdict, ranks = report["verdict"], {rank["rank"]: rank for rank in report["ranks"]}
    for what, pattern, text in (
        ("evidence", scenario.evidence, "\n".join(verdict["evidence"])),
        ("statement", scenario.statement, verdict["statement"]),
        ("stdout", scenario.stdout, ended.stdout),
    ):
        if pattern and not re.search(pattern, text):
            yield f"nothing like {pattern!r} in the {what}"
    if scenario.stdout_without and re.search(scenario.stdout_without, ended.stdout):
        yield f"{scenario.stdout_without!r} in the stdout"
    for rank, kind, module, role in scenario.warnings:
        found = [(entry["kind"], entry["module"], entry["role"]) for entry in ranks[rank].get("warnings", [])]
        if (kind, module, role) not in found:
            yield f"rank {rank}: no warning of {kind} in {role} of {module}"
    for rank, counts in scenario.counts.items():
        for name, number in counts.items():
            counted = ranks[rank].get(name, 0)
            if counted != number and not (number < 0 < counted):
                yield f"rank {rank}: {name} is {counted}"
    faults = [f"rank {rank}: gpuwatch's own fault: {fault}" for rank, e in ranks.items() for fault in e["faults"]]
    if len(faults) != scenario.own_faults:
        yield from faults or ["gpuwatch has recorded no fault of its own"]


def _text(verdict: dict[str, Any], origins: dict[int, str]) -> str:
    """A verdict in one short line: `rank 1 backward length grad input[0] nan, batch 2`."""
    if verdict["kind"] != "overflow":
        return str(verdict["kind"])
    who = " and ".join(f"rank {rank} {module or 'root'}" for rank, module in sorted(origins.items(), key=str))
    who = who or f"rank {verdict.get('rank')} {verdict.get('module') or 'root'}"
    parts = [who.replace("rank None", "no rank"), verdict.get("phase"), verdict.get("role"), verdict.get("value")]
    if verdict.get("between"):
        parts.append("between {} and {}".format(*verdict["between"]))
    if verdict.get("batch") is not None:
        parts.append(f"batch {verdict['batch']}")
    if verdict.get("certainty") == "unknown":
        parts.append("unknown")
    return ", ".join(part if isinstance(part, str) else " or ".join(sorted(part)) for part in parts if part)


def _start(command: list[str], scenario: Scenario, cwd: str, environment: dict[str, str] | None = None) -> Ended:
    clean = {
        k: v
        for k, v in os.environ.items()
        if k == LATE_DEVICE or not k.startswith(("GPUWATCH", "TORCHELASTIC", "PET_"))
    }
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", *command, str(SCRIPTS / scenario.script), *scenario.args],
        cwd=cwd,
        env={**clean, "OMP_NUM_THREADS": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    code: int | None
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        code = process.returncode
    except subprocess.TimeoutExpired:
        _kill(process)
        stdout, stderr = process.communicate()
        code = None
    except BaseException:
        _kill(process)
        raise
    return Ended(code, stdout, stderr, time.monotonic() - began)


def _kill(process: subprocess.Popen[str]) -> None:
    """The process and all that it started."""
    try:
        parent = psutil.Process(process.pid)
        family = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            pass


def _log(ended: Ended) -> str:
    return f"{ended.stdout[-3000:]}\n{ended.stderr[-6000:]}"
