"""The process that runs the preflight of one rank. It imports torch once and forks a child for the tests.

    gpuwatch.worker.preflight.coordinator --parent PID [--script FILE]
    gpuwatch.worker.preflight.coordinator --parent PID --fallen STEP --stage STAGE --detail TEXT

The second form informs the other ranks that this rank's coordinator died or hung in STEP. The output is defined in
steps.py. A coordinator never uses CUDA and never computes with torch, since neither works after a fork. It joins no
process group.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from typing import NoReturn

import msgspec

from ...core.events.preflight_events import PreflightBegan
from ...core.events.run_position import RunPosition
from ...core.guest.own_imports import path_as_given
from ...core.host import die_with_parent
from ...core.identity import RankIdentity
from ...core.settings import WorkerSettings
from .steps import Line, RankStepReport, StageDeadlines


def say(line: Line) -> None:
    """Print one line for the worker."""
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


def main() -> NoReturn:
    """Entry. It leaves without Python's own end, which may wait for threads of torch's."""
    code = 1
    try:
        code = _coordinate()
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def _coordinate() -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True, help="the worker's process id: it ends with that")
    parser.add_argument("--script", default="", help="the file whose digest is to be the same on all ranks")
    parser.add_argument("--fallen", default="", help="only report to the others that this rank failed in this step")
    parser.add_argument("--stage", default="")
    parser.add_argument("--detail", default="")
    options = parser.parse_args()
    die_with_parent()
    if os.getppid() != options.parent:  # it has ended meanwhile
        return 1
    settings = WorkerSettings.from_environment()
    assert settings is not None
    identity = RankIdentity.from_environment(os.environ)
    if not options.fallen:
        where = RunPosition(identity.rank, settings.attempt)
        say(PreflightBegan(where, "inventory", StageDeadlines(settings.preflight_timeout_s).work("inventory")))
    path_as_given()
    from .course import PreflightRun  # imports torch

    run = PreflightRun(identity, settings, say, began, options.script)
    if options.fallen:
        run.run(options.fallen, RankStepReport("fallen", options.detail, said=options.stage))
    else:
        run.run()
    return 0
