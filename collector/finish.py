"""From a run store to the report's files. What `gpuwatch report` does again later, with the same result."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from ..core.errors import GpuwatchError
from ..core.messages import AgentMessage
from .earlier import EarlierLife, earlier_lives
from .exit_code import exit_code
from .facts import fold
from .paths import RunPaths
from .report.model import Report, build_report, to_json
from .report.text import render_text
from .report.timeline import utc
from .store import RunStore


def report_from_store(paths: RunPaths) -> Report:
    """Make the report again. Raises GpuwatchError when there is no store to make it from."""
    store = RunStore(paths.store)
    try:
        return build(store, paths.run_id)
    finally:
        store.close()


def build(store: RunStore, run_id: str, extra_counters: dict[str, int] | None = None) -> Report:
    """The report of an open store."""
    lost = msgspec.json.decode(store.get("lost_agents") or "[]", type=list[str])
    counters = msgspec.json.decode(store.get("counters") or "{}", type=dict[str, int])
    return build_report(
        fold(store.messages(), lost),
        run_id=run_id,
        started=store.get("started"),
        ended=store.get("ended"),
        max_frames=int(store.get("max_frames") or 21),
        counters={**counters, **(extra_counters or {}), "unwritten": store.unwritten},
        earlier=msgspec.json.decode(store.get("earlier") or "[]", type=list[EarlierLife]),
    )


def report_from_messages(messages: Iterable[AgentMessage], run_id: str) -> Report:
    """The report of what one agent could not deliver."""
    return build_report(fold(("spool", m.n, m.body) for m in messages), run_id=run_id, started=None, ended=None)


def write_report(paths: RunPaths, report: Report) -> str | None:
    """Write report.json, report.txt, exit-code, each whole or not at all. Returns what went wrong, if something did."""
    try:
        for path, data in (
            (paths.report_json, to_json(report)),
            (paths.report_text, (render_text(report) + "\n").encode()),
            (paths.exit_code, f"{exit_code(report)}\n".encode()),
        ):
            part = path.with_suffix(path.suffix + ".part")
            part.write_bytes(data)
            part.replace(path)
    except OSError as error:
        return f"the report could not be written: {error}"
    return None


def open_store(paths: RunPaths, max_frames: int) -> RunStore:
    """A new store with the facts that no message brings."""
    store = RunStore(paths.store, create=True)
    stamp(store, "started")
    store.set("max_frames", str(max_frames))
    store.set("earlier", msgspec.json.encode(earlier_lives(paths)).decode())
    return store


def stamp(store: RunStore, key: str) -> None:
    """Store the time, as the collector's clock has it."""
    store.set(key, utc(time.time()) or "")


def read_report(paths: RunPaths) -> Report:
    """The report as it was written; made from the store when it was not. Raises GpuwatchError when there is neither."""
    try:
        return msgspec.json.decode(paths.report_json.read_bytes(), type=Report)
    except FileNotFoundError:
        return report_from_store(paths)
    except msgspec.DecodeError as error:
        raise GpuwatchError(
            f"expected a report of schema 1, found something else in {paths.report_json}: {error}"
        ) from error
