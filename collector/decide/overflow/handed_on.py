"""What a value may have come by that a model was handed, or its backward. Pure.

A rank that was fed a nan has made it itself only if nothing has passed between the last finite value that was seen of
that rank and the place: no collective, send or receive, and no call of another model.

    rank 1, batch 4: step, 40 collectives     batch 5: input[0] of `Second`, 40 collectives      the rank's own
    rank 1, batch 4: step, 40 collectives     batch 5: input[0] of `Second`, 41 collectives      a recv, or a collective
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ....core.frames import Frame
from ...diagnose.calls import begun
from ...diagnose.local_diagnosis import LocalDiagnosis
from ...facts.facts import RunFacts
from ...facts.kept_pages import KeptPage
from .replicas import page_of, run_the_same_model

_MOST_EARLIER = 4
"""Pages that are looked at for the last number of collectives before a call."""


def as_passed(facts: RunFacts, found: LocalDiagnosis) -> LocalDiagnosis:
    """The diagnosis of a value from outside of a model, less sure if it may have been passed on.

    It is `received` if ranks may have passed it on that run other models: those hand each other what they compute.
    """
    page = page_of(facts, found) if found.source == "outside" else None
    frame = next((each for each in page.frames if each.index == found.frame), None) if page is not None else None
    if page is None or frame is None:
        return found
    is_backward = frame.phase == "backward"
    last = _last_in(page, frame) if is_backward else _last_before(facts, page, frame)
    now = frame.seq if is_backward else begun(frame)
    notes: list[str] = []
    if now > max(last, 0):
        when = "the forward's end" if is_backward else "what it did before" if last >= 0 else "its start"
        notes.append(
            f"{now - max(last, 0)} collectives, sends or receives were issued by rank {found.rank} between {when} and "
            "that: one can have brought it from another rank"
        )
    others = sorted({f"`{other.root}`" for other in _other_models(facts, page, is_backward=is_backward)})
    if others:
        notes.append(f"{', '.join(others)} was called in between, too: it can have been made of what that returned")
    if not notes:
        return found
    if now > max(last, 0) and (_are_stages(facts, page) or _may_have_received_it(facts, found)):
        return replace(found, source="received", phase="collective", notes=(*found.notes, *notes))
    return replace(found, sure=False, passed=True, notes=(*found.notes, *notes))


def _may_have_received_it(facts: RunFacts, found: LocalDiagnosis) -> bool:
    """Whether the rank gets messages of others, and nobody looks at what is in them."""
    state = facts.one(found.attempt, found.rank).state
    return state is not None and state.passed_unseen and any(found.received.values())


def _last_in(page: KeptPage, frame: Frame) -> int:
    """The collectives issued at the last frame before this one in its page; -1 if none is known."""
    return max((other.seq for other in page.frames if other.index < frame.index), default=-1)


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
        if apart and any(_is_tensor(row.shape) for frame in other.frames if not frame.module for row in frame.outputs):
            yield other


def _is_tensor(shape: Sequence[int] | None) -> bool:
    return shape is None or len(shape) > 0


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
