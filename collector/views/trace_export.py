"""One trace of all ranks on the collector's clock, for ui.perfetto.dev and chrome://tracing.

A node is a process of the trace, a rank a thread. The format is the Trace Event Format of Chromium, JSON
(github.com/google/perfetto, docs/getting-started/other-formats.md). Times are microseconds after the first event.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import partial
from typing import IO, Any, NamedTuple

import msgspec

from ...core.events.node_events import GpuXid
from ...core.events.rank_standing import GroupState, IssuedOperation
from ...core.events.run_position import RunPosition
from ...core.frames import module_text
from ...core.recorder.layout import PARTS
from ...core.signal_errors import from_outside
from ...core.wire.columns import METRICS, unpack_starts, unpack_steps
from ..assemble.build import look_stack
from ..assemble.timeline import EventTime, event_of, offset_ns, series_of_all
from ..decide.decide import decide
from ..facts.rank_facts import RankFacts
from ..facts.run_facts import NodeFacts, RunFacts
from ..facts.words import end_text
from ..report.verdict import Verdict

_NODE = 0
"""The thread for what is of a node and of no rank; ranks follow it."""
_APART = 1 << 22
"""A rank's number and this: the thread for its collectives."""
_INSIDE = ("issuing", "waiting")
_Collective = tuple[int, str, str, int]
"""(attempt, name of the group, its members, number in it)"""


class TraceSlice(NamedTuple):
    """Something on a rank's thread, by the host's clock. `seconds` None: it is a moment."""

    name: str
    category: str
    time_ns: int
    seconds: float | None
    args: dict[str, Any]


def write_trace(facts: RunFacts, run: str, out: IO[str], ranks: Collection[int] | None = None) -> None:
    """Write the trace of a run as JSON, an event a line: of all ranks, or of some and their nodes. Raises OSError."""
    verdict = decide(facts)
    events = sorted(
        _events(facts.only(ranks), verdict, event_of(facts, verdict)),
        key=lambda event: (event["ph"] != "M", event.get("ts", 0), -event.get("dur", 0)),
    )
    first = min((event["ts"] for event in events if "ts" in event), default=0)
    about = {"run": run, "verdict": f"{verdict.kind}, {verdict.certainty}: {verdict.statement}", "began_us": first}
    out.write(f'{{"displayTimeUnit": "ms", "otherData": {msgspec.json.encode(about).decode()}, "traceEvents": [\n')
    for number, event in enumerate(events):
        line = msgspec.json.encode({**event, "ts": event["ts"] - first} if "ts" in event else event).decode()
        out.write(f"{line}{',' if number + 1 < len(events) else ''}\n")
    out.write("]}\n")


def _events(facts: RunFacts, verdict: Verdict, happened: EventTime | None) -> Iterator[dict[str, Any]]:
    pids = {agent: number for number, agent in enumerate(facts.nodes, 1)}
    for agent, node in facts.nodes.items():
        yield _meta("process_name", pids[agent], _NODE, node.host if node.hello is not None else agent)
        yield from _of_node(node, pids[agent])
    for agent, series in series_of_all(facts, 0).items():
        for of, what, figure in series.figures(facts):
            text = METRICS[what].text if what in METRICS else what
            name = f"{text}, {of}" if of else text
            for at_s, value in zip(figure.at_s, figure.shown, strict=True):
                if math.isfinite(value):
                    ts = int(at_s * 1e6)
                    yield {
                        "ph": "C",
                        "name": name,
                        "pid": pids[agent],
                        "tid": _NODE,
                        "ts": ts,
                        "args": {"": float(value)},
                    }
    met: dict[_Collective, list[dict[str, Any]]] = defaultdict(list)
    for rank in facts.everyone.values():
        if rank.agent in pids:
            yield from _of_rank(rank, facts.nodes[rank.agent], pids[rank.agent], facts.starter)
            for collective, waits in _collectives(rank, facts.nodes[rank.agent], pids[rank.agent]).items():
                met[collective].append(waits)
    yield from _meetings(met)
    if happened is not None:
        yield {
            **{"ph": "i", "s": "g", "name": f"verdict: {verdict.kind}", "cat": "verdict", "pid": 1, "tid": _NODE},
            **{"ts": happened.time_ns // 1000, "args": {"statement": verdict.statement}},
        }


def _of_node(node: NodeFacts, pid: int) -> Iterator[dict[str, Any]]:
    found = [TraceSlice(f"signal {s.signal}", "signal", s.time_ns, None, {}) for s in [node.signal] if s is not None]
    for event in node.gpu_events:
        if isinstance(event, GpuXid) and event.time_ns:
            args = {"gpu": event.device, "meaning": event.meaning}
            found.append(TraceSlice(f"XID {event.number}", "gpu", event.time_ns, None, args))
    yield from (_drawn(one, node, pid, _NODE) for one in found)


def _of_rank(rank: RankFacts, node: NodeFacts, pid: int, starter: str) -> Iterator[dict[str, Any]]:
    tid = rank.rank + 1 if rank.rank >= 0 else abs(rank.rank) + (1 << 20)
    name = f"rank {rank.rank}" if rank.rank >= 0 else "a process without a rank"
    yield _meta("thread_name", pid, tid, name)
    yield _meta("thread_sort_index", pid, tid, tid)
    for make in (_stages, _steps, partial(_moments, starter=starter)):
        yield from (_drawn(one, node, pid, tid) for one in make(rank) if one.time_ns > 0)
    for number, one in enumerate(_stalls(rank)):  # they may begin within a step, so they have a track of their own
        drawn = _drawn(one, node, pid, tid)
        ends = drawn["ts"] + drawn.pop("dur")
        yield from (
            {**drawn, "ph": ph, "id": f"{tid}.{number}", "ts": ts} for ph, ts in (("b", drawn["ts"]), ("e", ends))
        )


def _collectives(rank: RankFacts, node: NodeFacts, pid: int) -> dict[_Collective, dict[str, Any]]:
    """The last ones of each group whenever its table was read, from when the rank began them. Sends are left out.

    Slices of a thread may be inside of one another, and not overlap: one that another one outlasts is drawn to the
    beginning of that.
    """
    found: dict[_Collective, TraceSlice] = {}
    tables = [(look.where.time_ns, group) for look in rank.looks for group in look.groups]
    if (ended := rank.exit) is not None:
        tables += [(ended.ended_ns or ended.where.time_ns, group) for group in ended.groups]
    for read_ns, group in tables if rank.rank >= 0 else ():
        began = {one.number: one.began_ns for one in group.recent if one.number > 0 and one.began_ns > 0}
        took = {one.number: one.took_ns for one in group.recent}
        if (inside := group.pending or (group.at if group.phase in _INSIDE else 0)) > 0:
            since_s = group.pending_s if group.pending else group.since_s
            began_ns = began.setdefault(inside, read_ns - int(since_s * 1e9))
            took[inside] = max(0, read_ns - began_ns)
        for number, began_ns in began.items():
            each = (rank.attempt, group.name, group.members, number)
            found[each] = _issued(group, number, began_ns, took[number] / 1e9)
    slices = sorted(found.items(), key=lambda item: item[1].time_ns)
    drawn = {}
    for number, (each, one) in enumerate(slices, 1):
        ends_ns = _ends_ns(one)
        for _, other in slices[number:]:
            if other.time_ns >= ends_ns:
                break
            if _ends_ns(other) > ends_ns:
                ends_ns = other.time_ns
        drawn[each] = _drawn(one._replace(seconds=(ends_ns - one.time_ns) / 1e9), node, pid, rank.rank + _APART)
    return drawn


def _issued(group: GroupState, number: int, began_ns: int, seconds: float) -> TraceSlice:
    operation = next((one for one in group.recent if one.number == number), IssuedOperation(number, ""))
    name = f"{operation.operation or 'collective'} {number} of group {group.name}"
    args = {"ranks": group.members, "dtype": operation.dtype, "elements": operation.elements, "seconds": seconds}
    return TraceSlice(name, "collective", began_ns // 1000 * 1000, seconds, args)


def _ends_ns(one: TraceSlice) -> int:
    """In whole microseconds, as the trace has it."""
    return one.time_ns + int((one.seconds or 0.0) * 1e6) * 1000


def _meetings(met: dict[_Collective, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """The collectives on threads of their own, and an arrow through all ranks that have begun the same one."""
    named = {(waits["pid"], waits["tid"]) for each in met.values() for waits in each}
    for pid, tid in sorted(named):
        yield _meta("thread_name", pid, tid, f"rank {tid - _APART}, collectives")
        yield _meta("thread_sort_index", pid, tid, tid)
    for number, each in enumerate(met.values()):
        yield from each
        *earlier, last = sorted(each, key=lambda waits: waits["ts"])
        for place, waits in enumerate([*earlier, last] if earlier else []):
            kind = "f" if waits is last else "t" if place else "s"
            at = {key: waits[key] for key in ("name", "cat", "pid", "tid", "ts")}
            yield {**at, "ph": kind, "id": number, "bp": "e"}


def _stages(rank: RankFacts) -> Iterator[TraceSlice]:
    for stage in rank.stages:
        began_ns = stage.where.time_ns - int(stage.seconds * 1e9)
        args = {"grade": str(stage.grade), "detail": stage.detail}
        yield TraceSlice(f"preflight: {stage.stage}", "preflight", began_ns, stage.seconds, args)


def _steps(rank: RankFacts) -> Iterator[TraceSlice]:
    """Inside each step its parts one after the other: each is the sum over the step."""
    for number, began_ns, parts in sampled_steps(rank):
        yield TraceSlice(f"step {number}", "step", began_ns, sum(parts), {"attempt": rank.attempt})
        for part, length in zip(PARTS, parts, strict=True):
            if length > 0:
                yield TraceSlice(part, "part", began_ns, length, {})
            began_ns += round(length * 1e6) * 1000


def sampled_steps(rank: RankFacts) -> Iterator[tuple[int, int, list[float]]]:
    """(number, beginning by the host's clock in nanoseconds, seconds of each of PARTS) of the steps in the store."""
    times = rank.step_times
    if times is None or not times.began_ns:
        return
    try:
        (numbers, seconds), starts = unpack_steps(times.steps), unpack_starts(times.starts)
    except ValueError as error:
        if from_outside(error):
            raise
        return
    for number, parts, start_us in zip(numbers, seconds.tolist(), starts, strict=False):
        yield number, times.began_ns + start_us * 1000, parts


def _stalls(rank: RankFacts) -> Iterator[TraceSlice]:
    for look in rank.looks:
        place = module_text(look.module or "", look.cls) if look.cls else look.phase
        args = {"phase": look.phase, "stack": look_stack(look)}
        began_ns = look.where.time_ns - int(look.still_s * 1e9)
        yield TraceSlice(f"has not moved: {place}", "stall", began_ns, look.still_s, args)


def _moments(rank: RankFacts, starter: str) -> Iterator[TraceSlice]:
    for anomaly in rank.anomalies:
        place = f"{anomaly.value} in {anomaly.role} of {module_text(anomaly.module, anomaly.cls)}"
        yield _moment(place, "overflow", anomaly.where, phase=str(anomaly.phase))
    for error in rank.errors:
        yield _moment(f"raised {error.error}", "error", error.where, message=error.message)
    for fault in rank.faults:
        yield _moment(f"gpuwatch's own fault: {fault.part}", "fault", fault.where, message=fault.message)
    for skip in rank.scaler_skips:
        yield _moment("GradScaler skipped the step", "scaler", skip.where, scale=skip.scale)
    for forecast in rank.forecasts:
        yield _moment(f"forecast: `{forecast.module}` passes its limit", "forecast", forecast.where)
    if (ended := rank.exit) is not None:
        at_ns = ended.ended_ns or ended.alive_ns or ended.where.time_ns
        yield TraceSlice(end_text(rank, ended, starter), "exit", at_ns, None, {})


def _moment(name: str, category: str, where: RunPosition, **args: Any) -> TraceSlice:
    return TraceSlice(name, category, where.time_ns, None, {"batch": where.batch, "step": where.step, **args})


def _drawn(one: TraceSlice, node: NodeFacts, pid: int, tid: int) -> dict[str, Any]:
    ts = one.time_ns // 1000 + offset_ns(node) // 1000
    kind: dict[str, Any] = (
        {"ph": "i", "s": "t"} if one.seconds is None else {"ph": "X", "dur": round(one.seconds * 1e6)}
    )
    return {**kind, "name": one.name, "cat": one.category, "pid": pid, "tid": tid, "ts": ts, "args": one.args}


def _meta(what: str, pid: int, tid: int, value: str | int) -> dict[str, Any]:
    args = {"sort_index" if isinstance(value, int) else "name": value}
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}
