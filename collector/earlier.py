"""How the earlier lives of a requeued job ended. Each has a run of its own, and the last report lists them."""

from __future__ import annotations

import msgspec

from ..core.text.job_runs import job_run, runs_of_job
from ..core.wire.regular_file import read_regular
from .paths import RunPaths
from .report.model import EarlierLife
from .report_file import MOST_REPORT_BYTES


class _Verdict(msgspec.Struct):
    kind: str
    statement: str


class _Report(msgspec.Struct):
    verdict: _Verdict


def earlier_lives(paths: RunPaths) -> list[EarlierLife]:
    """The earlier lives of this run's job, the first one first; [] for a run without a job."""
    run = job_run(paths.run_id)
    if run is None or not run.restart:
        return []
    runs = runs_of_job((path.name for path in paths.folder.parent.iterdir()), run.job)
    return [_life(RunPaths(paths.folder.parent / other.name)) for other in runs if other.restart < run.restart]


def _life(paths: RunPaths) -> EarlierLife:
    try:
        verdict = msgspec.json.decode(read_regular(paths.report_json, MOST_REPORT_BYTES), type=_Report).verdict
    except (OSError, msgspec.DecodeError):
        return EarlierLife(
            paths.run_id, "", f"It has left no report; to make one: gpuwatch report --again {paths.run_id}"
        )
    return EarlierLife(paths.run_id, verdict.kind, verdict.statement)
