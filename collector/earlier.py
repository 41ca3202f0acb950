"""What the earlier lives of a requeued job came to: each has a run of its own, and the last one's report lists them."""

from __future__ import annotations

import msgspec

from ..core.job_runs import job_run, runs_of_job
from .paths import RunPaths


class EarlierLife(msgspec.Struct, frozen=True):
    """One life of the job, before the one that the report is about."""

    run: str
    kind: str
    """"" where it has left no report."""
    statement: str


class _Verdict(msgspec.Struct):
    kind: str
    statement: str


class _Report(msgspec.Struct):
    verdict: _Verdict


def earlier_lives(paths: RunPaths) -> list[EarlierLife]:
    """Of the job of this run, the first life first; [] for a run of no job."""
    run = job_run(paths.run_id)
    if run is None or not run.restart:
        return []
    runs = runs_of_job((path.name for path in paths.folder.parent.iterdir()), run.job)
    return [_life(RunPaths(paths.folder.parent / other.name)) for other in runs if other.restart < run.restart]


def _life(paths: RunPaths) -> EarlierLife:
    try:
        verdict = msgspec.json.decode(paths.report_json.read_bytes(), type=_Report).verdict
    except (OSError, msgspec.DecodeError):
        return EarlierLife(
            paths.run_id, "", f"It has left no report; to make one: gpuwatch report --again {paths.run_id}"
        )
    return EarlierLife(paths.run_id, verdict.kind, verdict.statement)
