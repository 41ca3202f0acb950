"""The files of a run: their paths, the report as it was written, and the list of all runs with their verdicts.

Reading a report imports nothing that makes one, so that it is on the screen at once.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import secrets
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from ..core.codes import ExitCode, VerdictKind
from ..core.guest.own_files import read_regular
from ..core.recorder.run_folder import job_run, runs_of_job
from ..core.text import command_for
from .report.model import EarlierLife, RunReport
from .report.verdict import Verdict

LATEST = "latest"
MOST_REPORT_BYTES = 1 << 30


class RunPaths:
    """The folder of one run, and every path that a run writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_id = folder.name
        """Its start (local time) and four random hex digits, or the name that the user chose."""
        self.store = folder / "run.sqlite"
        """Everything that was received."""
        self.report_json = folder / "report.json"
        self.report_text = folder / "report.txt"
        """The whole report as text."""
        self.report_html = folder / "report.html"
        self.verdict_json = folder / "verdict.json"
        """How the run ended, in few words."""
        self.exit_code = folder / "exit-code"
        """The exit code of the launches as a number, for scripts."""
        self.logs = folder / "logs"
        """The logs of gpuwatch's own processes."""


def new_run(runs_dir: Path, name: str = "") -> RunPaths:
    """Make the private folder of a new run and point `latest` at it. Raises OSError when it cannot be made.

    A name that is taken gets a number: `pretrain`, `pretrain-2`.
    """
    for number in itertools.count(1):
        chosen = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        if name:
            chosen = name if number == 1 else f"{name}-{number}"
        paths = RunPaths(runs_dir / chosen)
        try:
            runs_dir.mkdir(parents=True, exist_ok=True)
            paths.folder.mkdir(mode=0o700)  # never one that is there: somebody may have put links into it
        except FileExistsError:
            if not runs_dir.is_dir():
                raise
            continue
        try:
            paths.logs.mkdir()
        except OSError:
            paths.folder.rmdir()
            raise
        break
    link = runs_dir / f".{LATEST}-{os.getpid()}"
    try:
        link.symlink_to(paths.run_id)
        link.replace(runs_dir / LATEST)
    except OSError:  # a file system without links
        link.unlink(missing_ok=True)
    return paths


def exit_code(report: RunReport) -> int:
    """The exit code of a report's verdict, with which the launches exit."""
    code = verdict_code(report.verdict)
    if report.run.check_only and code != ExitCode.CLEAN and code <= ExitCode.SIGNAL:  # no script could have failed
        return int(ExitCode.PREFLIGHT_FAILED)
    return code


def verdict_code(verdict: Verdict) -> int:
    """The exit code of a verdict; of a signal's, 128 and its number."""
    code = verdict.kind.exit_code
    if code is ExitCode.SIGNAL and verdict.signal is not None:
        number = verdict.signal.removeprefix("signal ")  # one without a name
        return int(code) + (int(number) if number.isdigit() else int(signal.Signals[verdict.signal]))
    return int(code)


# The list of runs, newest last. Only these fields of each report are read.


MOST_COMPARED = 50
"""Earlier runs of a folder that a run is compared with."""
_MOST_OUTCOME_BYTES = 1 << 20


def read_outcome(paths: RunPaths) -> RunOutcome | None:
    """verdict.json; None where it is missing or damaged."""
    with suppress(OSError, msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return msgspec.json.decode(read_regular(paths.verdict_json, _MOST_OUTCOME_BYTES), type=RunOutcome)
    return None


def earlier_outcomes(paths: RunPaths) -> list[RunOutcome]:
    """How the last runs before this one ended, the latest first."""
    found = []
    with suppress(OSError):
        for path in paths.folder.parent.glob(f"*/{paths.verdict_json.name}"):
            if path.parent != paths.folder and not path.parent.is_symlink():
                found.append((path.stat().st_mtime, path.parent))
    outcomes = (read_outcome(RunPaths(folder)) for _, folder in sorted(found, reverse=True)[:MOST_COMPARED])
    return [outcome for outcome in outcomes if outcome is not None]


class ListedVerdict(msgspec.Struct, frozen=True):
    """The fields of a verdict that a list shows."""

    kind: str
    certainty: str
    statement: str


class ListedInfo(msgspec.Struct, frozen=True):
    """The fields of a job that a list shows."""

    world_size: int
    nnodes: int
    started: str | None
    ended: str | None


class ListedRun(msgspec.Struct, frozen=True):
    """One run. `run` and `verdict` are None where it has no report (yet). verdict.json has a verdict alone."""

    id: str = ""
    run: ListedInfo | None = None
    verdict: ListedVerdict | None = None


def list_runs(runs_dir: Path) -> list[ListedRun]:
    """All runs, by the time of their beginning; [] if `runs_dir` does not exist."""
    return [_listed(paths) for paths in runs_by_time(runs_dir)]


def runs_by_time(runs_dir: Path) -> list[RunPaths]:
    """As `list_runs`, without a look into their reports."""
    found = []
    for path in runs_dir.glob("*"):
        paths = RunPaths(path)
        with suppress(PermissionError):  # another user's
            if path.is_dir() and not path.is_symlink() and (paths.store.exists() or paths.report_json.exists()):
                found.append((_began(paths), paths.run_id, paths))
    return [paths for *_, paths in sorted(found)]


def _began(paths: RunPaths) -> float:
    """A run makes its logs as it begins. Whoever reads its store changes the time of its folder."""
    try:
        return paths.logs.stat().st_mtime
    except OSError:
        return paths.folder.stat().st_ctime


def _listed(paths: RunPaths) -> ListedRun:
    try:
        listed = msgspec.json.decode(read_regular(paths.report_json, MOST_REPORT_BYTES), type=ListedRun)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        told = read_outcome(paths)
        known = ListedVerdict(told.kind, told.certainty, told.statement) if told is not None else None
        return ListedRun(paths.run_id, verdict=known)
    return msgspec.structs.replace(listed, id=paths.run_id)


def earlier_lives(paths: RunPaths) -> list[EarlierLife]:
    """The earlier lives of this run's requeued job, the first one first; [] for a run without a job.

    Each has a run of its own, and the last report lists them.
    """
    run = job_run(paths.run_id)
    if run is None or not run.restart:
        return []
    runs = runs_of_job((path.name for path in paths.folder.parent.iterdir()), run.job)
    folders = [paths.folder.parent / other.name for other in runs if other.restart < run.restart]
    return [
        EarlierLife(life.id, life.verdict.kind, life.verdict.statement)
        if life.verdict is not None
        else EarlierLife(life.id, "", f"It left no report; to make one: {command_for(folder, does='report --again')}")
        for folder in folders
        for life in [_listed(RunPaths(folder))]
    ]


# Whether earlier runs of the folder ended as this one, or named the same GPU or node. Pure.

_NOTHING_TO_COMPARE = frozenset({VerdictKind.CLEAN, VerdictKind.INTERRUPTED, VerdictKind.UNKNOWN})
_ORDINALS = ("second", "third", "fourth", "fifth")
_MOST_NAMED = 3
_PLACE_IN_SCRIPT = ".py:"
_CALL = re.compile(r'^ *File "(?:.*/)?(.*)", line \d+, in (.*)(?:\n +(.*))?', re.MULTILINE)
"""A call of a traceback: the file's name, the function, the source."""


class RunOutcome(msgspec.Struct, frozen=True):
    """How a run ended, in few words: `verdict.json` of its folder."""

    run: str
    ended: str | None
    exit_code: int
    kind: VerdictKind
    certainty: str
    statement: str
    rank: int | None = None
    host: str | None = None
    gpu: str | None = None
    module: str | None = None
    phase: str | None = None
    fingerprint: str = ""
    """What runs with the same fault have in common, 8 hexadecimal digits; "" where nothing is wrong or known."""
    nodes: int = 1
    bad_nodes: list[str] = []
    """The nodes that the verdict blames, by the scheduler's names."""

    @property
    def device(self) -> str:
        """`GPU-1234 of gpu-2`, or the node among several; "" is unknown."""
        return f"{self.gpu} of {self.host}" if self.gpu else (self.host or "") if self.nodes > 1 else ""


def outcome_of(report: RunReport, exit_code: int) -> RunOutcome:
    """`exit_code` is that of the launches."""
    run, verdict = report.run, report.verdict
    said = (verdict.kind, verdict.certainty, verdict.statement, verdict.rank, verdict.host, verdict.gpu)
    place = (verdict.module, verdict.phase, fingerprint_of(report), run.nnodes, verdict.bad_nodes)
    return RunOutcome(run.id, run.ended, exit_code, *said, *place)


def fingerprint_of(report: RunReport) -> str:
    """From the kind and the place of the verdict, without ranks, batches and other numbers.

    The place is the model, module, phase and role; of an overflow without a module the script, with the operation or
    with what the statement says; of an exception its type and the line that raised it; else it is the statement.
    """
    verdict = report.verdict
    if verdict.kind in _NOTHING_TO_COMPARE:
        return ""
    place = [verdict.root, verdict.module, verdict.phase, verdict.role]
    if verdict.module is None and verdict.kind is VerdictKind.OVERFLOW:
        if verdict.operation is None and _PLACE_IN_SCRIPT not in verdict.statement:
            return ""  # only the model is known: nothing says that it is the same place
        script = next((Path(word).name for word in report.run.command if word.endswith(".py")), None)
        made = verdict.operation.op if verdict.operation is not None else None
        place += [script, made, _without_numbers(verdict)]
    elif verdict.module is None:
        errors = (rank.error for rank in report.everyone if rank.rank == report.named and rank.error)
        error = next(errors, None)
        calls = _CALL.findall(str(error.get("traceback", ""))) if error is not None else []
        raised = [str(error.get("type", "")), *(calls[-1] if calls else ())] if error is not None else []
        place = [*(raised or [_without_numbers(verdict)]), verdict.stage]
    return hashlib.sha256("\0".join(part or "" for part in (verdict.kind, *place)).encode()).hexdigest()[:8]


def _without_numbers(verdict: Verdict) -> str:
    """The statement without the numbers and the host in it."""
    return re.sub(r"[0-9][0-9., -]*", "#", verdict.statement.replace(verdict.host or "\0", "#"))


def seen_before(outcome: RunOutcome, earlier: Sequence[RunOutcome], like: str) -> list[str]:
    """Sentences; `earlier` are runs of the same folder, the latest first. `like` lists those with the same fault."""
    lines = []
    alike = [other for other in earlier if outcome.fingerprint and other.fingerprint == outcome.fingerprint]
    if alike:
        where = f"{_times(alike)} at the same place, as in {_named(alike)}"
        lines.append(f"{where}. All of them: {like}")
    there = [other for other in earlier if outcome.device and other.device == outcome.device and other.fingerprint]
    if outcome.fingerprint and there:
        lines.append(f"{_times(there)} on {outcome.device}, as in {_named(there)}")
    return lines


def blamed_in(earlier: Sequence[RunOutcome]) -> Counter[str]:
    """How many of these runs blame each node."""
    return Counter(node for other in earlier for node in other.bad_nodes)


def _times(others: Sequence[RunOutcome]) -> str:
    number = len(others)
    return f"For the {_ORDINALS[number - 1]} time" if number <= len(_ORDINALS) else f"For the {number + 1}th time"


def _named(others: Sequence[RunOutcome]) -> str:
    names = [f"run {other.run}" + (f" ({other.ended[:10]})" if other.ended else "") for other in others[:_MOST_NAMED]]
    return ", ".join(names) + (f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else "")
