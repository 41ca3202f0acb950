"""From a run store to the report's files. `gpuwatch report` repeats this later, with the same result."""

from __future__ import annotations

import gc
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from ..core.codes import ExitCode, VerdictKind
from ..core.guest.own_files import write_whole
from ..core.text import command_for
from ..core.wire.messages import JobResult
from ..core.wire.spool import agent_of, read_spool
from .assemble.build import build_report
from .assemble.timeline import utc
from .facts.fold import FactFold, fold
from .left_spools import add_left_spools
from .report.model import EarlierLife, RunReport, to_json
from .report.one_screen import screen_text
from .report.text_report import render_text
from .run_files import (
    RunOutcome,
    RunPaths,
    blamed_in,
    earlier_lives,
    earlier_outcomes,
    exit_code,
    outcome_of,
    seen_before,
)
from .store import RunStore, Stored

T = TypeVar("T")


def report_from_store(paths: RunPaths, rank: int | None = None, batch: int | None = None) -> RunReport:
    """Make the report again; `rank` and `batch` select the rank whose frames are shown, and their batch.

    Raises GpuwatchError when there is no store to make it from.
    """
    with closing(RunStore(paths.store)) as store:
        return build(store, paths.run_id, fold_run(store, paths), rank=rank, batch=batch)


def fold_run(store: RunStore, paths: RunPaths) -> FactFold:
    """Fold all that is known of a run: its store, and what nodes have left beside it that the store lacks."""
    folded = fold_store(store)
    add_left_spools(folded, paths.folder.parent)
    return folded


def fold_store(store: RunStore) -> FactFold:
    """Fold all messages of a store; its pages stay there."""
    folded = FactFold(store.page, store.history)
    for agent, n, body in store.messages():
        folded.add(agent, n, body)
    return folded


def build(
    store: RunStore, run_id: str, folded: FactFold | None = None, rank: int | None = None, batch: int | None = None
) -> RunReport:
    """The report of an open store; `folded` is its fold, if that is in memory already.

    `rank` and `batch` select the rank whose frames are shown, and their batch.
    """
    folded = folded if folded is not None else fold_store(store)
    kept = {"unwritten": store.unwritten, "pages_not_kept": store.dropped}
    max_frames = store.get("max_frames") or ""
    before = stored_fact(store, "before", list[RunOutcome], [])
    facts = folded.facts(*(stored_fact(store, key, list[str], []) for key in ("lost_agents", "killed_agents")))
    facts.blamed_before = blamed_in(before)
    facts.report_command = command_for(store.path.parent)
    facts.has_ended = store.get("ended") is not None
    report = build_report(
        facts,
        run_id=run_id,
        started=store.get("started"),
        ended=store.get("ended"),
        max_frames=int(max_frames) if re.fullmatch(r"[0-9]{1,6}", max_frames) else 21,
        counters={**stored_fact(store, "counters", dict[str, int], {}), **kept},
        earlier=stored_fact(store, "earlier", list[EarlierLife], []),
        rank=rank,
        batch=batch,
    )
    like = command_for(store.path.parent, does="runs --like")
    seen = seen_before(outcome_of(report, exit_code(report)), before, like)
    return msgspec.structs.replace(report, seen_before=seen)


def stored_fact(store: RunStore, key: str, kind: type[T], default: T) -> T:
    """A fact of the store that was written as JSON; `default` if it is missing or damaged."""
    try:
        return msgspec.json.decode(store.get(key) or "", type=kind)
    except (msgspec.DecodeError, RecursionError):
        return default


def merged_report(paths: Sequence[Path], rank: int | None = None) -> RunReport:
    """One report from spool files, which hold messages that agents could not deliver, and from runs' folders.

    Raises GpuwatchError.
    """
    messages: list[Stored] = []
    folders = [path for path in paths if path.is_dir()]
    for path in paths:
        if path in folders:
            with closing(RunStore(RunPaths(path).store)) as store:
                messages += store.messages()
        else:
            spool = read_spool(path)
            name = agent_of(spool, path)
            messages += ((name, message.n, message.body) for message in spool)
    run_id = folders[0].name if folders else paths[0].stem
    facts = fold(messages)
    facts.report_command = command_for(*paths, does="report --merge")
    return build_report(facts, run_id=run_id, started=None, ended=None, rank=rank)


def write_report(paths: RunPaths, report: RunReport) -> str | None:
    """Write report.json, report.txt, verdict.json and exit-code, each whole or not at all.

    Returns the error as text, or None.
    """
    try:
        write_whole(paths.report_json, to_json(report), 0o666)
        write_whole(paths.report_text, (render_text(report) + "\n").encode(), 0o666)
        write_whole(paths.verdict_json, msgspec.json.encode(outcome_of(report, exit_code(report))), 0o666)
        write_whole(paths.exit_code, f"{exit_code(report)}\n".encode(), 0o666)
    except OSError as error:
        return f"the report could not be written: {error}"
    return None


def write_page(paths: RunPaths, report: RunReport) -> str | None:
    """Write report.html. Returns the error as text, or None; an error leaves the other files as they are."""
    try:
        from .report.html.page import render_html  # jinja2 is imported when a page is made, and only then

        write_whole(paths.report_html, render_html(report).encode(), 0o666)
    except Exception as error:  # whatever is wrong with it, the report is there as text and as JSON
        return f"the page {paths.report_html} could not be made: {type(error).__name__}: {error}"
    return None


def write_where_there_is_room(paths: RunPaths, store: RunStore, report: RunReport) -> tuple[RunPaths, str | None]:
    """`write_report` in the run's folder, else beside the store, else in a new temporary folder. Returns where."""
    trouble = write_report(paths, report)
    if trouble and store.path.parent != paths.folder:
        paths = RunPaths(store.path.parent)
        trouble = write_report(paths, report)
    if trouble:
        with suppress(OSError):
            last = RunPaths(Path(tempfile.mkdtemp(prefix="gpuwatch-report-")))
            if write_report(last, report) is None:
                return last, None
    return paths, trouble


def open_store(
    paths: RunPaths, max_frames: int, fallback: Path | None = None, say: Callable[[str], object] | None = None
) -> RunStore:
    """The run's store with the facts that no message carries; an existing store is continued."""
    store = RunStore(paths.store, create=True, fallback=fallback, say=say)
    if store.get("started") is None:
        stamp(store, "started")
        store.set("max_frames", str(max_frames))
        store.set("earlier", msgspec.json.encode(earlier_lives(paths)).decode())
    store.commit()
    return store


def stamp(store: RunStore, key: str) -> None:
    """Store the time, as the collector's clock has it."""
    store.set(key, utc(time.time()) or "")


def started_ns(store: RunStore) -> int:
    """When the run began; 0: not known."""
    with suppress(ValueError):
        return int(datetime.fromisoformat((store.get("started") or "").replace("Z", "+00:00")).timestamp() * 1e9)
    return 0


def make_report(paths: RunPaths, store: RunStore, folded: FactFold) -> tuple[RunReport, JobResult]:
    """Build and write the report of a finished job. Returns it, and the result for every agent.

    The fold of many pages is a million objects that stay alive, so the garbage collector skips them meanwhile. Not
    where others are frozen already: all thaw together, and those are to stay so.
    """
    freezes = not gc.get_freeze_count()
    if freezes:
        gc.freeze()
    try:
        store.set("before", msgspec.json.encode(earlier_outcomes(paths)).decode())
        store.commit()
        report = build(store, paths.run_id, folded)
        paths, last_words = write_where_there_is_room(paths, store, report)
        if not last_words:
            page = write_page(paths, report) or f"as a page: {paths.report_html}"
            last_words = f"report: {paths.report_json}\n{page}"
        text = screen_text(report, last_words=last_words)
        return report, JobResult(exit_code(report), report.verdict.kind, text, str(paths.report_json))
    finally:
        if freezes:
            gc.unfreeze()


def no_report(paths: RunPaths, error: BaseException) -> JobResult:
    """The result for every agent if `make_report` failed."""
    text = f"gpuwatch: the report could not be made ({type(error).__name__}: {error}); what was received is in "
    text += f"{paths.store}; to try again: {command_for(paths.folder, does='report --again')}"
    return JobResult(int(ExitCode.UNKNOWN), VerdictKind.UNKNOWN, text, str(paths.report_json))
