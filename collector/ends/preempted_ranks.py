"""Ranks that a signal from outside told to end, and whose scripts then left in a way of their own. Pure.

That is an exit code, or an exception. A scheduler that preempts a job may signal the ranks alone: `gpuwatch launch`
hears nothing, and torchrun sees a rank that failed. The recorder has the signal (worker/native/signals.c). Where the
ranks had no handler, none can tell: see killed_together.py.
"""

from __future__ import annotations

import signal
from typing import NamedTuple

from ...core.codes import Certainty, VerdictKind
from ...core.events.rank_standing import HeardSignal
from ...core.events.script_events import ScriptError
from ...core.recorder.stalls import is_users
from ..facts.rank_facts import RankFacts
from ..facts.run_facts import RunFacts
from ..facts.words import cascade_of, whose
from ..report.rank_states import signal_name
from ..report.sentence_parts import grouped, ranks_text
from ..report.verdict import Verdict
from .end_positions import calls_of
from .ending_order import endings_of
from .killed_in_a_wait import killed_in_a_wait

LEAVES_S = 900
"""A script that ends later after the signal may have ended for another reason. SLURM's grace is minutes, and so is the
saving of a large model."""

START_AGAIN = "Start the job again, from the checkpoint that its script has saved, if it has."
_MEANS_END = (signal.SIGTERM, signal.SIGINT, signal.SIGXCPU)
_MOST_BATCHES = 2
"""A script that leaves for a signal ends the batch that it is in; another one may accumulate gradients meanwhile."""


class RankDeparture(NamedTuple):
    """A rank's script has ended by sys.exit, os._exit or an exception that it raised itself, after a signal had reached
    a handler of its own."""

    rank: RankFacts
    number: int
    """The signal."""
    heard: HeardSignal
    seconds: float
    """From the signal to the end of the script; it may have saved a checkpoint then."""
    by_handler: bool
    """The handler itself has called sys.exit, or has raised."""

    @property
    def code(self) -> int | None:
        """What the script ended with."""
        script = self.rank.script_exit
        return script.code if script is not None else self.rank.code

    @property
    def ending(self) -> str:
        """`ended with exit code 7`, `raised Preempted`"""
        error = self.rank.error
        return f"raised {error.error}" if error is not None else f"ended with exit code {self.code}"

    @property
    def line(self) -> str:
        """`SIGTERM reached rank 1 from process 77, in batch 4; its script ended with exit code 7, 3.2 s later`"""
        sender = f" from process {self.heard.sender}" if self.heard.sender else ""
        where = f"in batch {self.heard.batch}" if self.heard.batch >= 0 else "before its first batch"
        who = f"{signal_name(self.number)} reached {ranks_text([self.rank.rank])}{sender}, {where}"
        end = f"its script {self.ending}"
        if self.by_handler:
            end = f"its handler {self.ending if self.rank.error is not None else f'called sys.exit({self.code})'}"
        return f"{who}; {end}, {_text(self.seconds)} later"


def departure_of(rank: RankFacts, from_launcher: bool = False) -> RankDeparture | None:
    """None if no signal from outside preceded its end, or if another signal or an error ended it.

    `from_launcher`: one that its launcher has sent counts, too. If several signals came, the one whose handler ended
    the script counts, else the last that came. A signal that scripts have other uses for counts if the rank left soon.
    So does any signal before an exception that no handler has raised.
    """
    exit_, script, error = rank.exit, rank.script_exit, rank.error
    if exit_ is None or (error is None and script is None and (rank.code or 0) < 0):
        return None
    if error is not None and not error.handler and not _is_scripts_own(error):
        return None
    end = error if error is not None else script
    left_ns = (end.where.time_ns if end is not None else 0) or exit_.ended_ns  # its agent may have told it
    found = []
    for heard in exit_.heard:
        times = [ns for ns in (heard.time_ns, heard.parent_ns if from_launcher else 0) if ns]
        by_handler = end is not None and end.handler == heard.number
        is_soon = exit_.where.batch - heard.batch <= _MOST_BATCHES
        if error is not None:
            is_meant = by_handler or (is_soon and not error.handler)
        else:
            is_meant = by_handler or is_soon or from_launcher or heard.number in _MEANS_END
        if is_meant and times and 0 <= left_ns - min(times) <= LEAVES_S * 10**9:
            found.append(RankDeparture(rank, heard.number, heard, (left_ns - min(times)) / 1e9, by_handler))
    return min(found, key=lambda one: (not one.by_handler, one.seconds), default=None)


def _is_scripts_own(error: ScriptError) -> bool:
    """Whether a line of the user's own raised it, for no other error: as `if told: raise Preempted` does."""
    calls = calls_of(error.traceback)
    is_first = error.traceback.count("Traceback (most recent call last)") <= 1 and not error.peer_failure
    return bool(calls) and is_first and is_users(calls[0].shown) and calls[0].text.startswith("raise ")


def saving_text(ranks: list[RankFacts]) -> str:
    """How long the scripts of ranks went on after the signal that ended their launch; "" if none has left by itself.

    ` Ranks 0 and 1 ended with exit code 7, up to 3.2 s after SIGTERM had reached them.`
    """
    left = [one for rank in ranks if (one := departure_of(rank, from_launcher=True)) is not None]
    said = ""
    for (ending, number), same in grouped(left, lambda one: (one.ending, one.number)).items():
        who, seconds = ranks_text([one.rank.rank for one in same]), max(one.seconds for one in same)
        how_long, them = (_text(seconds), "it") if len(same) == 1 else (f"up to {_text(seconds)}", "them")
        name = signal_name(number)
        said += f" {who[0].upper()}{who[1:]} {ending}, {how_long} after {name} had reached {them}."
    return said


def preemption_verdict(facts: RunFacts) -> Verdict | None:
    """None if a launch got the signal itself, or if a rank ended for another reason than that or its peers' end."""
    if not facts.failed_by_itself:
        return None
    ranks = facts.of_attempt(facts.last_attempt)
    ended = endings_of(facts, facts.last_attempt).by_themselves
    found = [one for rank in ranks if (one := departure_of(rank)) is not None]
    left = [one for one in found if one.code != 0 or one.by_handler or one.rank in ended]
    if not left or len({one.rank.error.error for one in left if one.rank.error is not None}) > 1:
        return None
    number, leavers = left[0].number, [one.rank for one in left]
    others = [rank for rank in ended if rank not in leavers and rank.own_code != -number]
    waited = killed_in_a_wait(ranks)
    if any(one.number != number for one in left) or not all(rank in waited or follows(rank) for rank in others):
        return None
    reached = [rank for rank in ranks if rank in leavers or rank.own_code == -number or _has_heard(rank, number)]
    sure = all(one.by_handler for one in left) and all(rank.exit and rank.exit.by == "torchrun" for rank in others)
    only = reached[0] if len(reached) == 1 and len(ranks) > 1 else None
    return Verdict(
        VerdictKind.INTERRUPTED,
        f"{_reached(facts, reached, signal_name(number))}, and {_left(left)}; no overflow had been seen.",
        Certainty.ESTABLISHED if sure else Certainty.SUPPORTED,
        **(whose(facts, only) if only is not None else {}),
        attempt=facts.last_attempt,
        signal=signal_name(number),
        evidence=[*(one.line for one in left), f"{facts.starter} got no signal: it was sent to the ranks"],
        next=[START_AGAIN],
        cascade=cascade_of(facts, facts.last_attempt, {rank.rank for rank in reached}),
    )


def _has_heard(rank: RankFacts, number: int) -> bool:
    return rank.exit is not None and any(one.number == number and one.time_ns for one in rank.exit.heard)


def follows(rank: RankFacts) -> bool:
    """Whether it ended because others had."""
    lost_a_peer = rank.error.peer_failure if rank.error is not None else rank.hid_a_peer_failure
    return lost_a_peer or (rank.error is None and rank.exit is not None and rank.exit.by == "torchrun")


def _reached(facts: RunFacts, reached: list[RankFacts], name: str) -> str:
    host = facts.host(reached[0]) if len(reached) == 1 else ""
    return f"{name} reached {ranks_text([rank.rank for rank in reached])}{f' on {host}' if host else ''} from outside"


def _left(left: list[RankDeparture]) -> str:
    codes = " or ".join(str(code) for code in sorted({one.code or 0 for one in left if one.rank.error is None}))
    raised = sorted({one.ending for one in left if one.rank.error is not None})
    ends = " or ".join([*([f"ended with exit code {codes}"] if codes else []), *raised])
    if len(left) == 1:
        return f"its script {ends}, {_text(left[0].seconds)} later"
    return f"their scripts {ends}, up to {_text(max(one.seconds for one in left))} later"


def _text(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
