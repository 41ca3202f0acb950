"""How a rank and how an attempt ended, in words."""

from __future__ import annotations

from ..facts.rank_facts import RankFacts
from ..facts.run_facts import RunFacts
from ..facts.words import doing, error_line, first_line
from ..report.rank_states import signal_name
from ..report.sentence_parts import ranks_text
from .ending_order import endings_of


def ending_text(facts: RunFacts, attempt: int) -> str:
    """How an attempt ended, as a line: `rank 1 raised ValueError: boom, after batch 3`."""
    endings = endings_of(facts, attempt)
    if endings.first is not None:
        numbers = [rank.rank for rank in (endings.first, *endings.same)]
        return f"{ranks_text(numbers)} {how_it_ended(endings.first)}"
    if endings.by_themselves:
        victims = ranks_text([rank.rank for rank in endings.by_themselves])
        return f"{victims} lost the connection to another rank; it is unknown which one failed first"
    ranks = facts.of_attempt(attempt)
    if ranks and all(rank.ran_another_program for rank in ranks):
        return "became another program"
    if ranks and all(rank.script_exit is not None for rank in ranks):
        batches = max((rank.exit.where.batch + 1 for rank in ranks if rank.exit is not None), default=0)
        return f"finished after {batches} batches"
    return "ended, and no rank said why"


def how_it_ended(rank: RankFacts) -> str:
    """`raised ValueError: boom, after batch 3`, `was killed by SIGKILL in the forward of batch 3`."""
    error = rank.error
    if error is not None:
        message = error_line(error.message)
        when = f", in batch {error.where.batch}" if error.where.batch >= 0 else ", before its first batch"
        return f"raised {error.error}{f': {message}' if message else ''}{when}"
    if rank.exit is not None and rank.was_killed:
        return f"was killed by {signal_name(-(rank.code or 0))} {doing(rank.exit)}"
    if rank.exit is not None and rank.left_silently:
        return f"exited with code 0 {doing(rank.exit)}{exit_line(rank)}"
    script = rank.script_exit
    said = first_line(script.message).rstrip(". ") if script is not None else ""
    # what the system has is what counts: sys.exit(-1) ends with 255, and os._exit in an exit handler takes its place
    code = rank.code if (rank.code is not None and rank.code >= 0) or script is None else script.code & 0xFF
    return f"ended with exit code {code}{exit_line(rank)}{f': {said}' if said else ''}"


def exit_line(rank: RankFacts) -> str:
    """` at train.py:84 in main`: where its script called sys.exit or os._exit; "" is unknown."""
    return f" at {rank.exit_call.line.short}" if rank.exit_call is not None else ""
