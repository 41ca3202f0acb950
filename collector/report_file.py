"""The report as it was written. To read one needs nothing of what makes one, so that it is on the screen at once."""

from __future__ import annotations

import signal

import msgspec

from ..core.errors import ExitCode, GpuwatchError
from ..core.own_files import read_regular
from ..core.recorder.run_folder import job_run, runs_of_job
from ..core.text import shown_name
from .report.model import EarlierLife, RunReport
from .run_list import MOST_REPORT_BYTES, RunPaths


def read_report(paths: RunPaths) -> RunReport:
    """report.json, or what the store holds where there is none. Raises GpuwatchError when there is neither."""
    try:
        return msgspec.json.decode(read_regular(paths.report_json, MOST_REPORT_BYTES), type=RunReport)
    except FileNotFoundError:
        from .finish import report_from_store

        return report_from_store(paths)
    except OSError as error:
        raise GpuwatchError(f"expected a report in {paths.report_json}, it cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise GpuwatchError(
            f"expected a report of schema 1, found something else in {paths.report_json}: {shown_name(str(error))}; "
            f"to make it again from the store: gpuwatch report --again {paths.run_id}"
        ) from error


# From a verdict to the number that the launches exit with.


def exit_code(report: RunReport) -> int:
    """The exit code that a verdict stands for."""
    verdict = report.verdict
    code = verdict.kind.exit_code
    if code is ExitCode.SIGNAL and verdict.signal is not None:
        number = verdict.signal.removeprefix("signal ")  # one without a name
        return int(code) + (int(number) if number.isdigit() else int(signal.Signals[verdict.signal]))
    if report.run.check_only and code is not ExitCode.CLEAN:  # there is no script that could have failed by itself
        code = ExitCode.PREFLIGHT_FAILED
    return int(code)


# How the earlier lives of a requeued job ended. Each has a run of its own, and the last report lists them.


class _VerdictPart(msgspec.Struct):
    kind: str
    statement: str


class _ReportPart(msgspec.Struct):
    verdict: _VerdictPart


def earlier_lives(paths: RunPaths) -> list[EarlierLife]:
    """The earlier lives of this run's job, the first one first; [] for a run without a job."""
    run = job_run(paths.run_id)
    if run is None or not run.restart:
        return []
    runs = runs_of_job((path.name for path in paths.folder.parent.iterdir()), run.job)
    return [_life(RunPaths(paths.folder.parent / other.name)) for other in runs if other.restart < run.restart]


def _life(paths: RunPaths) -> EarlierLife:
    try:
        verdict = msgspec.json.decode(read_regular(paths.report_json, MOST_REPORT_BYTES), type=_ReportPart).verdict
    except (OSError, msgspec.DecodeError):
        return EarlierLife(
            paths.run_id, "", f"It has left no report; to make one: gpuwatch report --again {paths.run_id}"
        )
    return EarlierLife(paths.run_id, verdict.kind, verdict.statement)
