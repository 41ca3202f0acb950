"""From the current facts to what viewers are shown: the picture, and the stacks of all ranks. Pure.

The picture of a thousand ranks takes a millisecond or two.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ...core.events.agent_events import RankLook
from ...core.events.node_events import GpuHealth, GpuXid
from ...core.events.own_limits import choice_text
from ...core.identity import rank_name
from ...core.recorder.stalls import ANSWER_S
from ...core.text import ranks_text
from ...core.values import DTYPE_MAX
from ...core.wire.beat import GpuNow, HostNow, HotModule, NodeBeat, closest_modules, unpack_list
from ...core.wire.view import JobView, LimitPassing, NodeView, RankView, StacksView, ViewEvent, ViewStraggler
from ..assemble.build import look_stack
from ..assemble.timeline import forecasts_of, is_sound, passing_text
from ..decide.decide import uuid_of
from ..ends.hang_finding import position_line
from ..ends.hang_model import HangFinding, position_of
from ..facts.rank_facts import RankFacts
from ..facts.run_facts import NodeFacts, RunFacts
from ..facts.shown_body import shown_body
from ..report.sentence_parts import counted, grouped, modules_text
from ..report.side_by_side import RankStack, stacks_text

MOST_HOT = 8
_WORTH_A_WORD = 16.0
MOST_EVENTS = 12
MOST_PASSING = 8
MOST_PROCESSES = 16
_MOST_XIDS = 4


def view_of(
    facts: RunFacts,
    run: str,
    time_ns: int,
    verdict: str = "",
    kind: str = "",
    slow: ViewStraggler | None = None,
    started_ns: int = 0,
    hang: tuple[int, HangFinding] | None = None,
) -> JobView:
    """`verdict` is the one so far, or ""; `kind` is its kind, and `slow` the rank that costs the others time. `hang` is
    the last finding about ranks that rest, with its attempt."""
    attempt = facts.last_attempt
    found = hang[1] if hang is not None and hang[0] == attempt else None
    ranks = facts.of_attempt(attempt)
    lone = sorted(  # first those with a non-finite value, then running ones
        facts.never_ranks().values(), key=lambda process: (not process.anomalies, process.exit is not None)
    )
    anomalies = Counter(anomaly.value for rank in facts.everyone.values() for anomaly in rank.anomalies)
    gpus = {agent: {gpu.uuid: gpu for gpu in unpack_list(node.gpus, GpuNow)} for agent, node in facts.nodes.items()}
    close = (hot for node in facts.nodes.values() for hot in unpack_list(node.hot, HotModule) if _is_close(hot))
    hot = closest_modules(close, MOST_HOT)
    return JobView(
        time_ns,
        run,
        next((hello.command for hello in facts.hellos), []),
        facts.announced_ranks,
        attempt,
        _nodes(facts),
        [_rank(facts, rank, gpus.get(rank.agent, {})) for rank in ranks],
        [shown_body(each) for each in hot],
        _events(facts, [*ranks, *lone])[-MOST_EVENTS:],
        verdict,
        kind,
        slow,
        _passing(ranks),
        _events_by_kind(facts),
        dict(anomalies),
        _lost(facts),
        processes=[_rank(facts, process, {}) for process in lone[:MOST_PROCESSES]],
        more_processes=max(0, len(lone) - MOST_PROCESSES),
        started_ns=started_ns,
        hang=shown_body(found.statement) if found is not None else "",
        hang_ranks=found.ranks if found is not None else [],
    )


def _is_close(hot: HotModule) -> bool:
    """float32 and bfloat16 reach so far that only their last powers of two are worth a word."""
    return hot.left < _WORTH_A_WORD or DTYPE_MAX.get(hot.dtype, math.inf) < 1e38


def _rank(facts: RunFacts, rank: RankFacts, gpus: dict[str, GpuNow]) -> RankView:
    state, ended, host = rank.state, rank.exit is not None, facts.host(rank)
    stopped = rank.exit is not None and rank.exit.by == "torchrun"
    if state is None:
        phase = rank.exit.phase if rank.exit is not None else "starting"
        return RankView(
            rank.rank,
            host,
            phase,
            -1,
            -1,
            -1,
            "",
            0.0,
            False,
            0,
            exit=rank.code,
            ended=ended,
            stopped=stopped,
            runs_on=rank.runs_on,
        )
    gpu = gpus.get(uuid_of(rank)) if gpus else None
    return RankView(
        rank.rank,
        host,
        state.phase,
        state.step,
        state.batch,
        state.begun,
        state.module or "",
        state.age_s,
        state.overflow or bool(rank.anomalies),
        rank.warned_rows,
        rank.code,
        ended,
        state.waits,
        gpu.use if gpu is not None else -1.0,
        gpu.memory if gpu is not None else -1.0,
        stopped,
        state.loss,
        rank.runs_on,
    )


def _nodes(facts: RunFacts) -> list[NodeView]:
    found = []
    for node in facts.nodes.values():
        health = [event for event in node.gpu_events if isinstance(event, GpuHealth)]
        xids = [event.number for event in node.gpu_events if isinstance(event, GpuXid)]
        gpus = (health[-1].grade if health[-1].grade == "ok" else health[-1].detail) if health else ""
        host = next(iter(unpack_list(node.figures, HostNow)), HostNow())
        found.append(
            NodeView(node.host, node.lost, gpus, xids[-_MOST_XIDS:], host.cpu, host.memory, *_gpu_figures(node))
        )
    return found


def _gpu_figures(node: NodeFacts) -> tuple[float, float, float, float]:
    gpus = unpack_list(node.gpus, GpuNow)
    use, memory, heat, power = (
        [value for gpu in gpus if (value := getattr(gpu, what)) >= 0]
        for what in ("use", "memory", "temperature", "power")
    )
    mean = sum(use) / len(use) if use else -1.0
    return mean, max(memory, default=-1.0), max(heat, default=-1.0), sum(power) if power else -1.0


def _events(facts: RunFacts, ranks: list[RankFacts]) -> list[ViewEvent]:
    found: list[ViewEvent] = []
    for rank in ranks:
        name = rank_name(rank.rank)
        events: list[tuple[Any, str, bool]] = []
        for anomaly in rank.anomalies[:1]:
            place = f"{anomaly.role} of {modules_text([anomaly.module])}"
            events.append((anomaly, f"{name}: {anomaly.value} in {place}, batch {anomaly.where.batch}", True))
        events += [(error, f"{name} raised {error.error}", True) for error in rank.errors[:1]]
        for forecast in filter(is_sound, rank.forecasts[:1]):
            events.append((forecast, f"{name}: in batch {forecast.where.batch} {passing_text(forecast)}", True))
        for fault in rank.faults[:1]:
            events.append((fault, f"{name}: gpuwatch's own fault: {fault.part}", False))
        for choice in rank.watch_choices[-1:] if rank is ranks[0] else ():
            events.append((choice, f"{name}: {choice_text(choice)}", False))
        for skip in rank.scaler_skips[-1:]:
            events.append((skip, f"{name}: GradScaler skipped a step at scale {skip.scale:g}", False))
        found += [ViewEvent(event.where.time_ns, text, loud) for event, text, loud in events]
    for node in facts.nodes.values():
        host = node.host if node.hello is not None else "a node"
        for xid in [event for event in node.gpu_events if isinstance(event, GpuXid)][-_MOST_XIDS:]:
            text = f"{host}: XID {xid.number} {xid.meaning}".rstrip()
            found.append(ViewEvent(xid.time_ns, text, xid.grade == "fail"))
        if node.lost:
            found.append(ViewEvent(1 << 62, f"{host} is silent", True))
    return sorted(found, key=lambda event: event.time_ns)


def _passing(ranks: list[RankFacts]) -> list[LimitPassing]:
    found = [
        LimitPassing(told.module, told.dtype, *(told.batch + n for n in (told.after, told.earliest, told.latest)))
        for told in forecasts_of(ranks)
    ]
    return sorted(found, key=lambda passing: (passing.batch, passing.module))[:MOST_PASSING]


def _events_by_kind(facts: RunFacts) -> dict[str, int]:
    found: Counter[str] = Counter()
    for rank in facts.everyone.values():
        found["anomaly"] += len(rank.anomalies)
        found["exception"] += len(rank.errors)
        found["forecast"] += len(rank.forecasts)
        found["scaler_skip"] += rank.skipped_steps
        found["warned_row"] += rank.warned_rows
        found["fault"] += len(rank.faults)
        found["exit"] += rank.exit is not None and not rank.runs_on
    found["xid"] = sum(isinstance(event, GpuXid) for node in facts.nodes.values() for event in node.gpu_events)
    return dict(found)


def _lost(facts: RunFacts) -> dict[str, int]:
    states = [rank.state for rank in facts.everyone.values() if rank.state is not None]
    return {
        "rows": sum(state.rows_gone for state in states),
        "records": sum(state.records_lost for state in states),
        "pages": sum(sum(node.pages_dropped.values()) for node in facts.nodes.values()),
    }


# Which ranks wait for which, and the state of a rank in a picture. Pure.

STILL_S = 3.0
"""Seconds without progress after which a rank counts as at rest."""

State = Literal["overflow", "waited for", "failed", "at rest", "running", "ended"]
STATES: tuple[State, ...] = get_args(State)
"""The worst first."""


def behind_of(view: JobView) -> set[int]:
    """The ranks that the others wait for: all rest, and these are in no collective and have begun the fewest, or the
    collector has asked all ranks and found them.

    Empty if any rank moves, if all have begun as many, or if that is unknown.
    """
    running = [rank for rank in view.ranks if not rank.ended]
    if len(running) < 2 or any(rank.still_s < STILL_S for rank in running):
        return set()
    told = {rank.rank for rank in running} & set(view.hang_ranks)
    if len(told) == len(running):
        return set()
    if told or any(rank.begun < 0 for rank in running):
        return told
    fewest = min(rank.begun for rank in running)
    found = {rank.rank for rank in running if rank.begun == fewest and not rank.waits}
    others = [rank for rank in running if rank.rank not in found]
    return found if all(rank.waits and rank.begun > fewest for rank in others) and others else set()


def state_of(rank: RankView, behind: set[int]) -> State:
    """`behind` are the ranks that the others wait for."""
    if rank.overflow:
        return "overflow"
    if rank.rank in behind:
        return "waited for"
    if rank.runs_on:
        return "running"
    if rank.ended:
        return "ended" if rank.exit in (0, None) else "failed"
    return "at rest" if rank.still_s >= STILL_S else "running"


# The stacks of all ranks, for viewers who ask: when the agents are asked, and the text of the answer.


@dataclass
class StacksRound:
    """One round at a time, in which every agent looks at its ranks."""

    _asked_at: float | None = None
    _looks: dict[int, RankLook] = field(default_factory=dict)

    def begins(self, now: float) -> bool:
        """Somebody wants stacks: whether the agents are to be asked now."""
        if self._asked_at is not None:
            return False
        self._asked_at, self._looks = now, {}
        return True

    def on_message(self, beat: NodeBeat) -> None:
        """Take the looks of a beat, at the ranks that it speaks of."""
        own = {(state.rank, state.attempt) for state in beat.ranks}
        for look in unpack_list(beat.looks, RankLook):
            if self._asked_at is not None and (look.where.rank, look.where.attempt) in own:
                self._looks[look.where.rank] = shown_body(look)

    @property
    def is_open(self) -> bool:
        """Agents were asked, and may still answer."""
        return self._asked_at is not None

    def conclude(self, ranks: Set[int], now: float) -> list[RankLook] | None:
        """The looks, once all of these ranks were looked at or the time is over; else None."""
        if self._asked_at is None or (ranks - self._looks.keys() and now - self._asked_at < ANSWER_S):
            return None
        self._asked_at = None
        return [look for _, look in sorted(self._looks.items())]


def view_text(view: StacksView) -> Iterator[str]:
    """Lines: what the ranks do, and their stacks, a stack once for all ranks that have the same one."""
    yield f"run {view.run}: {counted(len(view.hosts), 'running rank')} of {view.world_size}"
    positions = [(look.where.rank, position_of(look)) for look in view.looks]
    for alike in grouped(
        positions, lambda pair: (pair[1].kind, pair[1].doing, pair[1].operation, pair[1].line)
    ).values():
        yield f"  - {position_line([rank for rank, _ in alike], alike[0][1])}"
    unseen = sorted(view.hosts.keys() - {look.where.rank for look in view.looks})
    if unseen:
        yield f"  - {ranks_text(unseen)}: no answer from the node within {ANSWER_S:.0f} s"
    stacks = [RankStack(look.where.rank, look_stack(look), []) for look in view.looks]
    yield from ("", *stacks_text(stacks)) if any(each.stack for each in stacks) else ()
