"""Trace a received value to the rank that sent it, from the ranks' reports of collectives and messages. Pure.

A rank reports each non-finite tensor that went into or came out of a collective or a message (PassedTensor). A row of a
frame is matched with the last output before it that has the same step, dtype, number of elements and kind of value. The
trace goes on to the rank that put it in, and so from rank to rank.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...core.events.across_ranks import PassedTensor
from ...core.events.read_tensors import ReducedElement
from ...core.frames import Frame, FramePhase
from ...core.roles import RoleKind, parse_role
from ...core.values import DTYPE_MAX
from ..facts.calls import begun
from ..facts.diagnosis import LocalDiagnosis, number_text
from ..facts.kept_pages import KeptPage
from ..facts.rank_facts import RankFacts
from ..facts.replicas import page_of, run_the_same_model
from ..facts.run_facts import RunFacts
from .own_before import REDUCTIONS, own_between, ranks_of, way_text

_MOST_HOPS = 64
_HANDED = ("outside", "received", "carried")


@dataclass(frozen=True)
class ValueArrival:
    """The path of a value to the rank of a diagnosis."""

    ways: tuple[PassedTensor, ...]
    """The output on each rank along the path, the last rank first."""
    put: PassedTensor | None
    """The input of the first rank; None: all ranks put finite numbers in, and their sum was not finite."""
    summands: tuple[PassedTensor, ...] = ()
    """Each rank's report of that sum."""

    @property
    def rank(self) -> int | None:
        """Who put it in; None: nobody, the sum overflowed."""
        return self.put.where.rank if self.put is not None else None


class PassedOperations:
    """The tensors that the ranks of an attempt report as passed to each other, by operation."""

    def __init__(self, facts: RunFacts, attempt: int) -> None:
        self._ranks = {rank.rank: rank for rank in facts.of_attempt(attempt)}
        self._told: defaultdict[tuple[object, ...], list[PassedTensor]] = defaultdict(list)
        for rank in self._ranks.values():
            for one in rank.passed:
                self._told[_key(one)].append(one)

    def fed_by(self, diagnosis: LocalDiagnosis) -> ValueArrival | None:
        """The path of a diagnosis's value to its rank; None if no recorded operation brought it."""
        rank = self._ranks.get(diagnosis.rank)  # a process that is no rank shares no group
        if rank is None or diagnosis.source not in _HANDED or diagnosis.row.shape is None:
            return None
        elements = math.prod(diagnosis.row.shape)
        if elements < 2:  # a metric that is reduced looks the same
            return None
        came = [
            one
            for one in _came_out(rank, diagnosis.step, diagnosis.issued.seq)
            if (one.value, one.dtype, one.elements) == (diagnosis.row.value, diagnosis.row.dtype, elements)
        ] or _reduced(rank, diagnosis, elements)
        return self._follow(came[-1]) if came else None

    def put_into_sum(self, diagnosis: LocalDiagnosis) -> PassedTensor | None:
        """One rank's contribution to the reduced gradient under diagnosis; None if unknown.

        Every other rank has put finite numbers into that sum.
        """
        rank = self._ranks.get(diagnosis.rank)
        if rank is None or diagnosis.row.shape is None:
            return None
        for came in _reduced(rank, diagnosis, math.prod(diagnosis.row.shape))[::-1]:
            told = self._of(came)
            put = {one.where.rank: one for one in told if not one.came_out}
            finite = {one.where.rank for one in told if one.came_out and one.given == "finite"}
            if len(put) == 1 and finite | put.keys() == set(ranks_of(came)):
                return next(iter(put.values()))
        return None

    def _follow(self, came: PassedTensor) -> ValueArrival | None:
        ways: list[PassedTensor] = []
        while came not in ways and len(ways) < _MOST_HOPS:
            ways.append(came)
            told = self._of(came)
            given = [one for one in told if not one.came_out]
            if not given and came.operation in REDUCTIONS:
                summands = [one for one in told if one.given == "finite"]
                return ValueArrival(tuple(ways), None, tuple(summands)) if _all_of(came, summands) else None
            put = given[0] if given else None
            if put is None or any(one.given == "not finite" and one.where.rank != put.where.rank for one in told):
                return None  # several did, or it is not known who
            before = _came_out(self._ranks[put.where.rank], put.where.step, put.where.seq)
            before = [one for one in before if one.value == put.value and one != came and _is_same_tensor(one, put)]
            if not before:
                return ValueArrival(tuple(ways), put)
            came = before[-1]
        return None

    def _of(self, came: PassedTensor) -> list[PassedTensor]:
        """All ranks' reports of the operation that put out `came`."""
        if came.operation == "recv":
            return self._told.get(("send", came.group, came.number, came.tag, came.peer, came.where.rank), [])
        # a group of another mesh may have the same name, and no member in common
        members = set(ranks_of(came))
        return [one for one in self._told.get(_key(came), []) if one.where.rank in members]


def _key(one: PassedTensor) -> tuple[object, ...]:
    if one.operation == "send":
        return one.operation, one.group, one.number, one.tag, one.where.rank, one.peer
    return one.operation, one.group, one.number


def _came_out(rank: RankFacts, step: int, seq: int) -> list[PassedTensor]:
    """Outputs on a rank in a step, up to a place; the earliest first."""
    found = [one for one in rank.passed if one.came_out and one.where.step == step and one.where.seq <= seq]
    return sorted(found, key=lambda one: (one.where.seq, one.where.time_ns))


def _reduced(rank: RankFacts, diagnosis: LocalDiagnosis, elements: int) -> list[PassedTensor]:
    """What came out of reductions that a gradient can have been a part of, in whatever dtype they were reduced."""
    if parse_role(diagnosis.role).kind is not RoleKind.GRAD_WEIGHT:
        return []
    came = _came_out(rank, diagnosis.step, diagnosis.issued.seq)
    came = [one for one in came if one.operation in REDUCTIONS and one.value == diagnosis.row.value]
    # the gradient of a sharded weight has the shape of the whole
    parts = [len(ranks_of(one)) if one.operation == "reduce_scatter" else 1 for one in came]
    return [one for one, number in zip(came, parts, strict=True) if one.elements * number >= max(2, elements)]


def _is_same_tensor(came: PassedTensor, put: PassedTensor) -> bool:
    """Whether what a rank was handed can be what it passed on. The same operation's own output is not."""
    if (came.operation, came.group, came.number) == (put.operation, put.group, put.number):
        return False
    return (came.dtype, came.elements) == (put.dtype, put.elements)


def _all_of(came: PassedTensor, summands: list[PassedTensor]) -> bool:
    """Whether each rank's own was finite, and so large that the sum of all can have overflowed. A sum is never nan."""
    members = ranks_of(came)
    sizes = {one.where.rank: one.given_max or 0.0 for one in summands}
    limit = DTYPE_MAX.get(came.dtype)
    if came.value == "nan" or limit is None or set(sizes) != set(members):
        return False
    return sum(sizes.values()) > limit * 0.999


def fed_lines(fed: ValueArrival) -> list[str]:
    """The path as lines, from the rank that put it in to the rank that met it."""
    put = fed.put
    lines = [put_line(put)] if put is not None else []
    lines += [
        f"rank {one.where.rank}: {one.value} came out of {way_text(one)}, {one.elements} elements of {one.dtype}"
        f"{_elements_of(one)}"
        for one in fed.ways[::-1]
    ]
    for one in fed.summands[:8]:
        lines.append(f"rank {one.where.rank} put in finite numbers, abs max {one.given_max or 0.0:.2e}")
    if fed.summands:
        given = [RankSummand(one.where.rank, one.reduced, one.given_max) for one in fed.summands]
        lines += filter(None, [element_line(way_text(fed.ways[-1]), given, fed.ways[-1].dtype)])
    return lines


def put_line(put: PassedTensor, also: str = "") -> str:
    """`rank 1 put nan into all_reduce 7 of process group 0 (ranks 0 and 1); not finite there: all of row 3 (dim 0)`"""
    return f"rank {put.where.rank} put {put.value} into {way_text(put)}{also}{_elements_of(put)}"


def _elements_of(one: PassedTensor) -> str:
    return f"; not finite there: {one.element}" if one.element else ""


# Whether a value that a model, or its backward, received may come from another rank or model. Pure.
#
# A rank that was fed a nan has made it itself only if nothing has passed between the last finite value that was seen of
# that rank and the place: no collective, send or receive, and no call of another model.
#
# rank 1, batch 4: step, 40 collectives     batch 5: input[0] of `Second`, 40 collectives      the rank's own
# rank 1, batch 4: step, 40 collectives     batch 5: input[0] of `Second`, 41 collectives      a recv, or a collective

_MOST_EARLIER = 4
"""How many earlier pages are searched for the last number of collectives before a call."""


def as_passed(facts: RunFacts, found: LocalDiagnosis) -> LocalDiagnosis:
    """The diagnosis of a value from outside of a model, less sure if it may have been passed on.

    It is `received` if ranks may have passed it on that run other models: those hand each other what they compute.
    """
    page = page_of(facts, found) if found.source == "outside" else None
    frame = next((each for each in page.frames if each.index == found.row.frame), None) if page is not None else None
    if page is None or frame is None:
        return found
    is_backward = frame.phase in (FramePhase.BACKWARD, FramePhase.LOSS)
    last = max((other.seq for other in page.frames if other.index < frame.index), default=-1)
    if not is_backward:
        last = _last_before(facts, page, frame)
    now = frame.seq if is_backward else begun(frame)
    own = own_between(facts, found, last, now) if now > max(last, 0) else None
    if own is not None:
        found, now = replace(found, notes=(*found.notes, own.line), passage=replace(found.passage, puts=own.puts)), last
    if found.passage.proved:
        return found
    notes: list[str] = []
    if now > max(last, 0):
        when = "the forward's end" if is_backward else "what it did before" if last >= 0 else "its start"
        issued = f"{now - max(last, 0)} collectives, sends or receives between {when} and that call"
        notes.append(f"rank {found.rank} issued {issued}: one can have brought it from another rank")
    of_loss = frame.phase == FramePhase.LOSS  # what any model returned to it was finite
    others = sorted({f"`{other.root}`" for other in _other_models(facts, page, is_backward=is_backward)})
    if others and not of_loss:
        made = "the value can have been made from what it returned"
        notes.append(f"{', '.join(others)} was called in between, too: {made}")
    if not notes:
        return found
    counts = facts.one(found.attempt, found.rank).counts
    unchecked = counts.passed_unseen and any(found.issued.received.values())  # messages
    if now > max(last, 0) and (unchecked or _are_stages(facts, page)):
        return replace(found, source="received", phase=FramePhase.COLLECTIVE, notes=(*found.notes, *notes))
    passage = replace(found.passage, passed=True)
    return replace(found, sure=False, passage=passage, notes=(*found.notes, *notes))


def _last_before(facts: RunFacts, page: KeptPage, frame: Frame) -> int:
    """The collectives issued at the last frame that any model of the rank has before this call; -1 if none is known."""
    pages = facts.one(page.attempt, page.rank).pages
    earlier = sorted((number for number in pages if number < page.number), reverse=True)[:_MOST_EARLIER]
    now = begun(frame)
    return max((each.seq for number in earlier for each in pages[number].frames if 0 <= each.seq <= now), default=-1)


def _other_models(facts: RunFacts, page: KeptPage, *, is_backward: bool) -> Iterator[KeptPage]:
    """The pages of other models' calls in the same step before a forward, or after it for its backward.

    A loss that is a module is none: what it returns is a scalar.
    """
    for other in facts.one(page.attempt, page.rank).pages.of_step(page.step):
        apart = other.root != page.root and (other.number > page.number) == is_backward
        shapes = (row.shape for frame in other.frames if not frame.module for row in frame.outputs)
        if apart and any(shape is None or len(shape) > 0 for shape in shapes):
            yield other


def _are_stages(facts: RunFacts, page: KeptPage) -> bool:
    """Whether another rank is known to run another model than this page's."""
    for rank in facts.of_attempt(page.attempt):
        last = max((number for number in rank.pages), default=None)
        if rank.rank == page.rank or last is None:
            continue
        same = [found for found in rank.pages.values() if found.root == page.root]
        if not same or not run_the_same_model(page, max(same, key=lambda found: found.number)):
            return True
    return False


# The first bad element of a sum over the ranks, in what each rank has put in: a line of evidence.

_MOST_SHOWN = 4


class RankSummand(NamedTuple):
    """What one rank has put into a sum."""

    rank: int
    element: ReducedElement | None
    """None: the rank did not look."""
    largest: float | None
    """abs max of all that it has put in; None: unknown."""


def element_line(what: str, summands: Sequence[RankSummand], dtype: str) -> str:
    """`element [3, 5] of grad weight: 4.10e+04 on rank 0, 3.90e+04 on rank 1; their sum is beyond 65504 (float16)`

    "" where no rank knows what it had there, or the ranks have read different elements.
    """
    places = {tuple(each.element.index) for each in summands if each.element is not None}
    known = {
        each.rank: each.element.own for each in summands if each.element is not None and each.element.own is not None
    }
    if len(places) != 1 or not known:
        return ""
    rest = {each.rank: each.largest for each in summands if each.rank not in known}
    given = [f"{number_text(known[rank])} on rank {rank}" for rank in sorted(known, key=lambda rank: -abs(known[rank]))]
    given += [f"at most {number_text(largest)} on rank {rank}" for rank, largest in rest.items() if largest is not None]
    given += [f"unknown on rank {rank}" for rank, largest in rest.items() if largest is None]
    more = f", and {len(given) - _MOST_SHOWN} more ranks" if len(given) > _MOST_SHOWN else ""
    shown = f"element {list(*places)} of {what}: {', '.join(given[:_MOST_SHOWN])}{more}"
    return shown + _beyond(list(known.values()), list(rest.values()), dtype)


def _beyond(known: list[float], rest: list[float | None], dtype: str) -> str:
    limit = DTYPE_MAX.get(dtype)
    if limit is None or None in rest:
        return ""
    bound = sum(each for each in rest if each is not None)
    up, down = sum(each for each in known if each > 0), -sum(each for each in known if each < 0)
    if abs(up - down) - bound > limit:
        return f"; their sum is beyond {limit:.6g} ({dtype})"
    return f"; some of them alone are beyond {limit:.6g} ({dtype})" if max(up, down) > limit else ""
