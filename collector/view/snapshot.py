"""From the facts as they stand to what a viewer sees. Pure; a thousand ranks take a millisecond or two."""

from __future__ import annotations

from ...core.records import GpuHealth, Xid
from ...core.wire.messages import unpack_hot
from ...core.wire.view import Happened, NodeView, RankView, View
from ..decide.insights.growth import is_sound, passing_text
from ..facts.facts import RankFacts, RunFacts
from ..facts.shown_body import shown_body

MOST_HOT = 8
MOST_EVENTS = 12
_MOST_XIDS = 4


def view_of(facts: RunFacts, run: str, time_ns: int, verdict: str = "") -> View:
    """`verdict` is the one so far, "" where there is none."""
    attempt = facts.last_attempt
    hellos = [node.hello for node in facts.nodes.values() if node.hello is not None]
    ranks = facts.of_attempt(attempt)
    hot = sorted((hot for node in facts.nodes.values() for hot in unpack_hot(node.hot)), key=lambda hot: hot.left)
    return View(
        time_ns,
        run,
        hellos[0].command if hellos else [],
        facts.announced_ranks,
        attempt,
        _nodes(facts),
        [_rank(facts, rank) for rank in ranks],
        [shown_body(each) for each in hot[:MOST_HOT]],
        _events(facts, ranks)[-MOST_EVENTS:],
        verdict,
    )


def _rank(facts: RunFacts, rank: RankFacts) -> RankView:
    state, ended = rank.state, rank.exit
    if state is None:
        phase = ended.phase if ended is not None else "starting"
        return RankView(rank.rank, facts.host(rank), phase, -1, -1, -1, "", 0.0, False, 0, *_end(rank))
    return RankView(
        rank.rank,
        facts.host(rank),
        state.phase,
        state.step,
        state.batch,
        state.begun,
        state.module or "",
        state.age_s,
        state.overflow or bool(rank.anomalies),
        rank.warned_rows,
        *_end(rank),
        state.waits,
    )


def _end(rank: RankFacts) -> tuple[int | None, bool]:
    return (rank.exit.code, True) if rank.exit is not None else (None, False)


def _nodes(facts: RunFacts) -> list[NodeView]:
    found = []
    for node in facts.nodes.values():
        health = [event for event in node.gpu_events if isinstance(event, GpuHealth)]
        xids = [event.number for event in node.gpu_events if isinstance(event, Xid)]
        gpus = (health[-1].grade if health[-1].grade == "ok" else health[-1].detail) if health else ""
        found.append(NodeView(node.hello.host if node.hello is not None else "", node.lost, gpus, xids[-_MOST_XIDS:]))
    return found


def _events(facts: RunFacts, ranks: list[RankFacts]) -> list[Happened]:
    found: list[Happened] = []
    for rank in ranks:
        name = f"rank {rank.rank}"
        for anomaly in rank.anomalies[:1]:
            place = f"`{anomaly.module}`" if anomaly.module else "the root"
            text = f"{name}: {anomaly.value} in {anomaly.role} of {place}, batch {anomaly.where.batch}"
            found.append(Happened(anomaly.where.time_ns, text, True))
        for error in rank.errors[:1]:
            found.append(Happened(error.where.time_ns, f"{name} raised {error.error}", True))
        for forecast in rank.forecasts[:1]:
            if is_sound(forecast):
                text = f"{name}: in batch {forecast.where.batch} {passing_text(forecast)}"
                found.append(Happened(forecast.where.time_ns, text, True))
        for fault in rank.faults[:1]:
            found.append(Happened(fault.where.time_ns, f"{name}: gpuwatch's own fault: {fault.part}"))
        for skip in rank.scaler_skips[-1:]:
            found.append(Happened(skip.where.time_ns, f"{name}: GradScaler skipped a step, scale {skip.scale:g}"))
    for node in facts.nodes.values():
        host = node.hello.host if node.hello is not None else "a node"
        for xid in [event for event in node.gpu_events if isinstance(event, Xid)][-_MOST_XIDS:]:
            found.append(Happened(xid.time_ns, f"{host}: XID {xid.number} {xid.meaning}".rstrip(), xid.grade == "fail"))
        if node.lost:
            found.append(Happened(1 << 62, f"{host} is silent", True))
    return sorted(found, key=lambda event: event.time_ns)
