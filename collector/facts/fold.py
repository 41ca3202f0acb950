"""From messages to facts, in any order, with duplicates or gaps; live, or from a store.

Each page is inspected once, on arrival. Its findings stay in memory, the page itself does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec.structs import replace

from ...core.events.agent_events import SlowRankLooks, StepTimes
from ...core.events.alarms import Anomaly
from ...core.events.node_events import AttemptNodes, GpuCounters, GpuHealth, GpuXid, NodeSignal
from ...core.events.preflight_events import PreflightResult, RankInventoryEvent
from ...core.events.run_position import RunPosition
from ...core.events.script_events import ExitCall, LeftGroup
from ...core.identity import is_rank
from ...core.judge import anomaly_of, first_alarm
from ...core.secrets import masked_command
from ...core.signal_errors import from_outside
from ...core.wire import messages
from ...core.wire.beat import NodeBeat, RankState
from ...core.wire.messages import AgentBody, NameDefinitions, PageMessage, RankHistoryMessage, node_of
from .heard_numbers import HeardNumbers
from .kept_pages import KeptHistory, KeptPage, PageCache, RankNames
from .rank_facts import RankFacts
from .rank_origin import diagnose
from .run_facts import NodeFacts, RunFacts
from .shown_body import shown_body

_EARLIER_PAGES = 3
"""How many pages before a rank's first anomaly its diagnosis reads."""
_Body = TypeVar("_Body", PageMessage, RankHistoryMessage)
LoadPage = Callable[[str, int], PageMessage | None]
"""Gives the page again that an agent has sent under a number; None if it is lost."""
LoadHistory = Callable[[str, int], RankHistoryMessage | None]
"""The same for a history."""


def fold(
    stored: Iterable[tuple[str, int, AgentBody]], lost_agents: Iterable[str] = (), killed_agents: Iterable[str] = ()
) -> RunFacts:
    """Put messages together; all pages are kept. `lost_agents` went silent, as the collector saw it; `killed_agents`
    are those of them whose launches have ended, too."""
    folded = FactFold()
    for agent, n, body in stored:
        folded.add(agent, n, body)
    return folded.facts(lost_agents, killed_agents)


def _masked(hello: messages.AgentHello) -> messages.AgentHello:
    """An earlier release has sent and stored the command as it was typed."""
    return msgspec.structs.replace(hello, command=masked_command(hello.command))


class FactFold:
    """The facts from the messages received so far."""

    def __init__(self, load: LoadPage | None = None, load_history: LoadHistory | None = None) -> None:
        """Without a loader, all pages or histories stay in memory."""
        self._load = load
        self._load_history = load_history
        self._facts = RunFacts()
        self._heard = HeardNumbers()
        self._cache = PageCache()
        self._names: dict[tuple[int, int], RankNames] = {}
        self._diagnosed: dict[tuple[int, int], tuple[Anomaly, list[tuple[int, int]]]] = {}
        """What a rank's diagnosis was made of."""
        self.is_behind = False
        """Whether some ranks have yet to be diagnosed from their pages."""
        self._inferred: set[tuple[int, int]] = set()
        """Ranks whose anomaly was seen in their pages."""
        self._met_in: set[int] = set()
        """Optimizer steps in which a rank has met something."""
        self._told: set[tuple[int, int]] = set()
        """Ranks whose preflight result comes from their peers."""

    def add(self, name: str, n: int, received: AgentBody, *, spool: str = "") -> None:
        """One message of an agent, by its number; 0 is not numbered. `spool`: the file that alone has it, by name."""
        agent = node_of(name)
        self._heard.add(name, n)
        is_columns = isinstance(received, PageMessage | RankHistoryMessage | NameDefinitions)
        body = received if is_columns else shown_body(received)
        node = self._facts.nodes.setdefault(agent, NodeFacts(agent))
        node.spool = node.spool or spool
        if isinstance(body, messages.AgentHello):
            node.hello = _masked(body)
        elif isinstance(body, messages.NodeBye):
            node.bye = body
        elif isinstance(body, NameDefinitions):
            self._names_of(body.attempt, body.rank).add(name, body.entries)
        elif isinstance(body, PageMessage):
            self._take_page(name, n, body, None if spool else self._load)
        elif isinstance(body, RankHistoryMessage):
            rank = _rank(self._facts, node_of(name), body.attempt, body.rank)
            load = _loader(None if spool else self._load_history, name, n, body)
            names = self._names_of(body.attempt, body.rank)
            rank.histories[body.root] = KeptHistory(load, names, self._cache, body.root)
        elif isinstance(body, messages.TelemetryMessage):
            known = node.telemetry.get(body.began_ns)
            if known is None or (known.sent_ns, known.samples) < (body.sent_ns, body.samples):
                node.telemetry[body.began_ns] = body
        elif isinstance(body, NodeBeat):
            _take_beat(self._facts, node, body)
        elif isinstance(body, messages.EventMessage):
            if isinstance(body.event, Anomaly):
                self._forget_inferred((body.event.where.attempt, body.event.where.rank))
                self._met_in.add(body.event.where.step)
            elif isinstance(body.event, PreflightResult):
                self._told.discard((body.event.where.attempt, body.event.where.rank))
            _take_event(self._facts, agent, node, body)

    def as_it_stands(self) -> RunFacts:
        """The facts without the pending diagnoses and inferences: it costs nothing."""
        return self._facts

    def facts(
        self, lost_agents: Iterable[str] = (), killed_agents: Iterable[str] = (), *, most_diagnosed: int | None = None
    ) -> RunFacts:
        """The facts now. The same object changes with the messages that are added.

        `most_diagnosed` limits how many ranks are diagnosed from new pages; ranks with the earliest anomalies go first.
        The others stay as if these pages had not been received.
        """
        facts = self._facts
        facts.peers.clear()
        facts.unnamed_pages = 0
        self._take_preflights_of_peers()
        facts.processes = facts.never_ranks()
        self._infer_anomalies()
        lost, killed = set(map(node_of, lost_agents)), set(map(node_of, killed_agents))
        not_heard = self._heard.lost()
        for node in facts.nodes.values():
            node.lost, node.killed = node.agent in lost, node.agent in killed
            node.messages_lost = not_heard.get(node.agent, 0)
            node.gpu_events.sort(key=lambda event: event.time_ns)
        dropped: dict[int, int] = {}
        for node in facts.nodes.values():
            for number, pages in node.pages_dropped.items():
                dropped[number] = max(dropped.get(number, 0), pages)
        for rank in facts.everyone.values():
            rank.pages_dropped = dropped.get(rank.rank, 0)
            _sort(rank)
        left = len(facts.everyone) if most_diagnosed is None else most_diagnosed
        self.is_behind = False
        for key, rank in sorted(facts.everyone.items(), key=_met_first):
            left -= self._diagnose(key, rank, from_pages=left > 0)
        return facts

    def _names_of(self, attempt: int, rank: int) -> RankNames:
        if (attempt, rank) not in self._names:
            self._names[attempt, rank] = RankNames(self._cache.names)
        return self._names[attempt, rank]

    def _take_page(self, name: str, n: int, message: PageMessage, load: LoadPage | None) -> None:
        names = self._names_of(message.attempt, message.rank)
        try:
            page = KeptPage(message, _loader(load, name, n, message), names, self._cache)
            if page.step in self._met_in:  # the verdict compares it with the page of the rank that has met something
                page.prepare()
        except Exception as error:  # bytes from the network: whatever is wrong with them, the report must be written
            if from_outside(error):
                raise
            self._facts.undecodable_pages += 1
            return
        rank = _rank(self._facts, node_of(name), message.attempt, message.rank)
        known = rank.pages.get(page.number)
        if known is None or page.fullness > known.fullness:
            rank.pages[page.number] = page

    def _take_preflights_of_peers(self) -> None:
        """Take a rank's preflight result from its peers if the rank was stopped before it could report it."""
        ranks = self._facts.ranks
        for key in self._told:
            ranks[key].preflight = None
        self._told.clear()
        tellers = [rank.preflight for _, rank in sorted(ranks.items()) if rank.preflight is not None]
        for teller in tellers:
            for peer in teller.peers:
                rank = ranks.get((teller.where.attempt, peer.rank))
                if rank is not None and rank.preflight is None:
                    where = RunPosition(peer.rank, teller.where.attempt)
                    rank.preflight = PreflightResult(where, peer.outcome, peer.stage, peer.detail, teller.stops)
                    self._told.add((rank.attempt, rank.rank))

    def _infer_anomalies(self) -> None:
        """A rank can end before it could look at what came back from its device."""
        for key in list(self._inferred):
            self._forget_inferred(key)
        for key, rank in self._facts.everyone.items():
            if rank.anomalies:
                continue
            excused = _excused(rank)
            for _, page in sorted(rank.pages.suspicious.items()):
                if page.cleared_at == page.place_of_names:
                    continue
                if not page.is_named:
                    self._facts.unnamed_pages += 1
                    continue
                # frames missing here can only clear an alarm: a call that returned something finite
                excused_here = excused.get(page.root, set())
                found = first_alarm(sorted(page.suspicious_frames, key=lambda frame: frame.index), excused_here)
                if found is not None:
                    found = first_alarm(sorted(page.frames, key=lambda frame: frame.index), excused_here)
                if found is None:
                    page.cleared_at = page.place_of_names
                else:
                    rank.anomalies = [anomaly_of(page.head, *found)]
                    self._inferred.add(key)
                    break

    def _forget_inferred(self, key: tuple[int, int]) -> None:
        if key in self._inferred:
            self._inferred.discard(key)
            if key in self._facts.everyone:
                self._facts.everyone[key].anomalies = []

    def _diagnose(self, key: tuple[int, int], rank: RankFacts, *, from_pages: bool) -> bool:
        """Where its first anomaly came from; not again, if nothing has changed that the answer depends on.

        Returns whether pages were read for it.
        """
        if not rank.anomalies:
            rank.diagnosis = None
            return False
        first = rank.anomalies[0]
        pages = _pages_up_to(rank.pages, first.where.page)
        made_of = [page.as_known for page in pages]
        known = self._diagnosed.get(key)
        if known is not None and known[0] is first and known[1] == made_of:
            return False
        if pages and not from_pages:
            self.is_behind = True
            if known is not None and known[0] is first:
                return False
            pages, made_of = [], []
        rank.diagnosis = diagnose(rank.anomalies, {page.number: page.lazy() for page in pages})
        self._diagnosed[key] = first, made_of
        return bool(pages)


def _met_first(item: tuple[tuple[int, int], RankFacts]) -> tuple[bool, int, int]:
    key, rank = item
    return not rank.anomalies, key[0], rank.anomalies[0].where.seq if rank.anomalies else 0


def _excused(rank: RankFacts) -> dict[str, set[tuple[str, str]]]:
    """Root -> (module, role) of what the rank has found to lead nowhere, and no page shows that."""
    found: dict[str, set[tuple[str, str]]] = {}
    for told in rank.absorbed:
        if told.why in ("no gradient", "not trained"):
            found.setdefault(told.where.root, set()).add((told.module, told.role))
    return found


def _loader(
    load: Callable[[str, int], _Body | None] | None, name: str, n: int, message: _Body
) -> Callable[[], _Body | None]:
    """Gives the message again; without `load` it is kept."""
    return (lambda: message) if load is None else (lambda: load(name, n))


def _pages_up_to(pages: dict[int, KeptPage], number: int) -> list[KeptPage]:
    """A page, then earlier pages of its root, latest first, which show which values are new in it.

    [] if the page or one of its names was not received.
    """
    last = pages.get(number)
    if last is None or not last.is_named:
        return []
    earlier = [page for n, page in sorted(pages.items(), reverse=True) if n < number and page.root == last.root]
    return [last, *earlier[:_EARLIER_PAGES]]


def _sort(rank: RankFacts) -> None:
    for name in _LISTS.values():
        getattr(rank, name).sort(key=_ORDERS.get(name, _in_time))


def _in_time(event: Any) -> tuple[tuple[int, int, int], int]:
    return _place(event.where), event.where.time_ns


_ORDERS: dict[str, Callable[[Any], Any]] = {
    # a device's numbers arrive late: the collectives issued by then show which of two alarms was first
    "anomalies": lambda one: (one.where.seq, one.where.time_ns, one.where.page, one.frame),
    "errors": lambda error: error.where.time_ns,
    "begun": lambda began: began.where.time_ns,
    "stages": lambda stage: stage.where.time_ns,
    "warned": lambda warned: (_place(warned.where), warned.module, warned.role, warned.kind),
    "scaler_skips": lambda skip: (skip.where.time_ns, *_place(skip.where), skip.in_a_row),
    "ignored": lambda ignored: (_place(ignored.where), ignored.module, ignored.role),
    "hashes": lambda hashes: (hashes.where.root, hashes.where.batch, hashes.where.step, hashes.table),
    "not_looked_into": lambda hidden: (hidden.module, hidden.cls),
    "watch_choices": lambda choice: (choice.where.step, _place(choice.where), choice.alert),
    "compiled_unseen": lambda unseen: (not unseen.calls, unseen.text),
    "loose_parameters": lambda loose: (loose.optimizer, -loose.parameters, -loose.unread),
    "unread_states": lambda unread: (unread.optimizer, unread.steps, unread.where.time_ns),
    "absorbed": lambda absorbed: (_place(absorbed.where), absorbed.module, absorbed.role),
    "masks": lambda mask: (_place(mask.where), mask.module, mask.role),
    "passed": lambda passed: (passed.where.seq, passed.where.time_ns, passed.group, passed.number),
    "forecasts": lambda forecast: (_place(forecast.where), forecast.module),
    "zeroed_gradients": lambda zeroed: (_place(zeroed.where), zeroed.where.root, zeroed.batches),
    "unmoved_weights": lambda unmoved: (_place(unmoved.where), unmoved.where.root, unmoved.steps),
    "looks": lambda look: (look.number, look.where.time_ns),
}
"""List of a rank -> the key of its order, where that is not the order of its events' places and times."""


def _place(where: RunPosition) -> tuple[int, int, int]:
    return where.page, where.batch, where.seq


def _rank(facts: RunFacts, agent: str, attempt: int, rank: int) -> RankFacts:
    known = facts.ranks if is_rank(rank) else facts.processes
    found = known.get((attempt, rank))
    if found is None:
        found = known[attempt, rank] = RankFacts(rank, attempt)
    found.agent = agent
    return found


_HINTS = get_type_hints(RankFacts)
_LISTS = {get_args(hint)[0]: name for name, hint in _HINTS.items() if get_origin(hint) is list}
"""Class of an event -> the list of a rank that holds all of them."""
_ONES = {get_args(hint)[0]: name for name, hint in _HINTS.items() if type(None) in get_args(hint)}
"""Class of an event -> the field of a rank that holds one of them."""


def _take_event(facts: RunFacts, agent: str, node: NodeFacts, message: messages.EventMessage) -> None:
    event = message.event
    if isinstance(event, NodeSignal):
        node.signal = event
        return
    if isinstance(event, AttemptNodes):
        facts.attempts[event.attempt] = event
        return
    if isinstance(event, GpuXid | GpuCounters | GpuHealth):
        if event not in node.gpu_events:
            node.gpu_events.append(event)
        return
    rank = _rank(facts, agent, event.where.attempt, event.where.rank)
    if type(event) in _LISTS:
        listed = getattr(rank, _LISTS[type(event)])
        if event not in listed:
            listed.append(event)
    elif type(event) in _ONES:
        name = _ONES[type(event)]
        if _replaces(event, getattr(rank, name)):
            setattr(rank, name, event)


def _replaces(event: Any, known: Any) -> bool:
    """Whether an event replaces the known one. Most are sent once."""
    if known is None:
        return True
    if isinstance(event, RankInventoryEvent):
        return event.facts is not None  # an inventory without facts is sent again with them
    if isinstance(event, LeftGroup):
        return bool(event.where.step >= known.where.step)
    if isinstance(event, ExitCall):  # a handler of the first may call the second
        return bool(event.where.time_ns >= known.where.time_ns)
    if isinstance(event, SlowRankLooks):
        return bool(event.looks > known.looks)
    if isinstance(event, StepTimes):
        # if two agents saw parts of a rank, the larger part counts, whichever was received first
        return (event.timed, event.steps) > (known.timed, known.steps)
    return True


def _take_beat(facts: RunFacts, node: NodeFacts, beat: NodeBeat) -> None:
    if beat.sent_ns:
        node.hot, node.gpus, node.figures = beat.hot, beat.gpus, beat.figures
    if beat.clock_offset_ns is not None and beat.clock_round_trip_ns is not None:
        clock = (beat.clock_offset_ns, beat.clock_round_trip_ns)
        if node.clock is None or clock[1] <= node.clock[1]:
            node.clock = clock
    for state in beat.ranks:
        rank = _rank(facts, node.agent, state.attempt, state.rank)
        if rank.state is None or _moved(state) >= _moved(rank.state):
            # an agent before this one has seen more
            before = rank.state.traces_thinned if rank.state is not None else 0
            rank.state = state if state.traces_thinned >= before else replace(state, traces_thinned=before)
    for number, dropped in beat.pages_dropped.items():
        node.pages_dropped[number] = max(node.pages_dropped.get(number, 0), dropped)


_moved: Callable[[RankState], tuple[int, ...]] = attrgetter(
    *("final", "step", "batch", "seq", "ignored", "absorbed", "scaler_skips", "warned", "batches_skipped"),
    *("faults", "records_lost", "calls_left_out", "hooks_gone", "left"),
)
"""A key that orders beats by progress, whichever was received first: its numbers never decrease."""
