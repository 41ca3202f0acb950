"""The verdict of a run that ended badly without an overflow: which rank went first, and which ones followed."""

from __future__ import annotations

import re

from ...core.codes import Certainty, VerdictKind
from ...core.events.agent_events import WorkerExit
from ...core.events.run_position import RunPosition
from ...core.identity import is_rank, rank_name
from ...core.recorder.group_table import members_of
from ...core.recorder.operation_mismatch import standing_at
from ...core.recorder.stalls import is_users
from ...core.text import size_text
from ..cause.script_cause import cause_of_crash
from ..facts.rank_facts import RankFacts
from ..facts.run_facts import RunFacts
from ..facts.words import cascade_of, doing, error_line, first_line, progress_of, when_of, whose
from ..report.rank_states import signal_name
from ..report.sentence_parts import grouped, one_on, ranks_text
from ..report.verdict import CascadedRank, ConcurrentOrigin, Verdict
from .end_positions import stood_still
from .ending_order import ExitOrder, endings_of, left_before
from .ending_words import exit_line, how_it_ended
from .hang_groups import SAME_COLLECTIVES
from .kernel_kills import killed_step, memory_text
from .killed_in_a_wait import waited_for
from .known_crashes import known_lines, known_steps, raised_at
from .lost_node import lost_node_verdict
from .missing_nodes import unheard_hosts, waited_for_nodes
from .orphaned_ranks import orphaned_text
from .pending_operations import begun_in
from .preempted_ranks import START_AGAIN, departure_of, saving_text

_FATAL_TEXT = {
    "SIGBUS": "SIGBUS means an access to mapped memory that is not there: /dev/shm or a disk is full, or a mapped file "
    "was truncated. In a container, enlarge /dev/shm (docker run --shm-size), or use fewer data loader workers.",
    "SIGILL": "SIGILL means an instruction that this processor does not know: an extension was built for another "
    "processor than this host's. Compare the hosts' processors, and rebuild it.",
}
_ABORTED_AT_EXIT = (
    "Its script had finished: torch with gloo sometimes aborts a process while Python exits, without gpuwatch too "
    "(pytorch/pytorch#179291). Release models and optimizers before dist.destroy_process_group(): train inside a "
    "function, then call gc.collect()."
)
_PORT_TAKEN = (
    "The port is in use, by an earlier run that is still ending or by another job: ss -ltnp shows which. Choose "
    "another one with --master-port (or MASTER_PORT), or --rdzv-endpoint HOST:0 on one node."
)
_MORE_MEMORY = "Give the job more memory on {}, or let it use less: batch size, data loader workers."
_LOST_WORKER = re.compile(r"DataLoader worker \(pid.*\) (?:is killed by signal: Killed|exited unexpectedly)")
_MOST_CALLS = 6
SIGNAL_S = 60
"""The longest time from a signal to its record. torchrun gives its ranks half of that to end."""


def ending_verdict(facts: RunFacts) -> Verdict | None:
    """The rank that was killed or raised first; None if no rank ended by itself."""
    if not facts.failed:
        return None
    endings = endings_of(facts, facts.last_attempt)
    if not endings.by_themselves or all(_left_for_the_signal(facts, rank) for rank in endings.by_themselves):
        return None
    if endings.first is None:
        lost = lost_node_verdict(facts)
        if lost is None and all(_by_the_signal(facts, rank) for rank in endings.by_themselves):
            return None
        return lost or _left_early(facts, endings.by_themselves) or _unknown_peer(facts, endings.by_themselves)
    if endings.first.was_killed and endings.first.error is None:
        return _lost(facts, endings.first, endings)
    return _crash(facts, endings.first, endings)


def _left_early(facts: RunFacts, victims: list[RankFacts]) -> Verdict | None:
    """All that raised lost a peer, and others had left before, with exit code 0; None if that is not all there is.

    A rank that has issued fewer collectives than those that raised in one never reached it.
    """
    ranks = facts.of_attempt(facts.last_attempt)
    left = []
    for rank in ranks:
        if rank in victims or (rank.exit is not None and rank.exit.by == "torchrun"):
            continue
        waited = (left_before(facts, rank, victim) and _may_have_waited_for(victim, rank) for victim in victims)
        if rank.own_code != 0 or not all(waited):
            return None
        left.append(rank)
    if not left or len(ranks) < facts.announced_ranks:
        return None
    one, first = len(left) == 1, left[0]
    assert first.exit is not None
    who, others = (ranks_text([rank.rank for rank in some]) for some in (left, victims))
    where = f" on {facts.host(first)}" if one and facts.host(first) else ""
    ended, them = "they ended with exit code 0", "them"
    if one:
        ended, them = f"its process ended with exit code 0{exit_line(first)}, {doing(first.exit)}", "it"
    exits = ((rank.rank, rank.exit) for rank in left if rank.exit is not None)
    by_itself = "rank {} ended by itself after {} collectives; its recorder says: {}"
    evidence = [by_itself.format(number, exit_.where.seq, doing(exit_)) for number, exit_ in exits]
    for number, error in ((rank.rank, rank.errors[0]) for rank in victims if rank.errors):
        evidence.append(f"rank {number}, after {error.where.collectives} collectives: {first_line(error.message)}")
    return Verdict(
        VerdictKind.CRASH,
        f"{who.capitalize()}{where} left early: {ended}, and {others} lost the connection to {them}.",
        Certainty.SUPPORTED,
        **(whose(facts, first) if one else {}),
        **(when_of(first.exit.where) | {"root": None} if one else {"attempt": first.attempt}),
        evidence=evidence,
        next=[
            (_exit_step(first) if one else "")
            or f"{SAME_COLLECTIVES}: look for a loop that ends sooner on that rank, an early return, or os._exit."
        ],
        cascade=cascade_of(facts, facts.last_attempt, {rank.rank for rank in left}),
    )


def _may_have_waited_for(victim: RankFacts, rank: RankFacts) -> bool:
    """Whether a rank that left is one of those that the victim's last operation needed, and had not come to it."""
    place = standing_at(victim.exit.groups, failed=True) if victim.exit is not None else None
    if place is None or rank.exit is None:
        return True  # its table does not show where it failed: a backward, what C++ has issued
    group, number = place
    begun = begun_in(rank.exit.groups, group) or 0
    return rank.rank in members_of(group.members) and (number < 0 or begun < number)


def _unknown_peer(facts: RunFacts, victims: list[RankFacts]) -> Verdict:
    """All ranks that were heard lost a peer, so the one that went first is unknown."""
    who = ranks_text([rank.rank for rank in victims]).capitalize()
    return Verdict(
        VerdictKind.LOST,
        f"{who} lost the connection to another rank; it is unknown which one failed first.",
        Certainty.UNKNOWN,
        attempt=facts.last_attempt,
        evidence=[
            f"rank {rank.rank}: {first_line(rank.error.message)}"
            if rank.error is not None
            else f"rank {rank.rank} {how_it_ended(rank)} after a collective had raised in it"
            for rank in victims
        ],
        next=[
            "Look at the ranks that are not among these: one of them, or the link to it, failed first."
            if len(victims) < max(facts.announced_ranks, len(facts.of_attempt(facts.last_attempt)))
            or unheard_hosts(facts)
            else "No rank ended for a reason of its own: compare what they raised, and test the links: gpuwatch check."
        ],
        cascade=[CascadedRank(rank.rank, f"raised {rank.errors[0].error}") for rank in victims if rank.errors],
    )


def _by_the_signal(facts: RunFacts, rank: RankFacts) -> bool:
    """Whether a signal ended the launch on this rank's node. Its peers then went away for the same reason."""
    return rank.error is not None and _after_the_signal(facts, rank, rank.error.where.time_ns)


def _left_for_the_signal(facts: RunFacts, rank: RankFacts) -> bool:
    """Whether a script left in a way of its own after the signal, as one that saves a checkpoint first."""
    if rank.error is not None and departure_of(rank, from_launcher=True) is not None:
        return _by_the_signal(facts, rank)
    if rank.error is not None or (rank.code or 0) <= 0 or rank.exit is None:
        return False
    told = rank.script_exit.where.time_ns if rank.script_exit is not None else 0
    return _after_the_signal(facts, rank, told or rank.exit.ended_ns)


def _after_the_signal(facts: RunFacts, rank: RankFacts, time_ns: int) -> bool:
    """A launch records its signal after its ranks have ended, by the same clock as theirs."""
    node = facts.nodes.get(rank.agent)
    return node is not None and node.signal is not None and time_ns > node.signal.time_ns - SIGNAL_S * 10**9


def _certainty(endings: ExitOrder, behind: list[int]) -> Certainty:
    """`behind`: the ranks that the first one seems to have waited for."""
    if behind:
        return Certainty.SUPPORTED
    if endings.first is not None and endings.first.was_aborted and endings.first.error is None:
        exit_ = endings.first.exit
        if exit_ is not None and (exit_.main or not exit_.stack):  # by a thread that is not the script's
            return Certainty.SUPPORTED
    sure = not (endings.same or endings.later or endings.behind or endings.too)
    return Certainty.ESTABLISHED if sure else Certainty.SUPPORTED


def _who(first: RankFacts, endings: ExitOrder, host: str) -> str:
    """`Rank 1 (and rank 2 at the same point) on node7`."""
    same, too = ([rank.rank for rank in ranks] for ranks in (endings.same, endings.too))
    others = [*([f"{ranks_text(same)} at the same point"] if same else []), *([ranks_text(too)] if too else [])]
    also = f" (and {', '.join(others)})" if others else ""
    return f"{one_on(first.rank)}{also} on {host}"


def _later_lines(endings: ExitOrder) -> list[str]:
    kinds = (
        ("raised the same at the same point,", endings.alike),
        ("ended at the same point,", endings.later),
        ("had issued fewer collectives, and ended", endings.behind),
    )
    return [
        f"{rank_name(rank.rank)} {what} at least {ns / 1e6:.0f} ms later by the clock of the same host: "
        f"it {how_it_ended(rank)}"
        for what, ranks in kinds
        for rank, ns in ranks
    ]


def _lost(facts: RunFacts, first: RankFacts, endings: ExitOrder) -> Verdict:
    exit_ = first.exit
    assert exit_ is not None and exit_.code is not None
    pid = first.state.pid if first.state is not None else "?"
    name, host, place = signal_name(-exit_.code), facts.host(first), doing(exit_)
    hint, short = _FATAL_TEXT.get(name, ""), ""
    if exit_.memory_kills:
        short, hint = f": {memory_text(exit_)}", _MORE_MEMORY.format(host)
    elif name == "SIGKILL":
        hint = killed_step(host)
    elif first.was_aborted_at_exit:
        hint = _ABORTED_AT_EXIT
    behind = [rank.rank for rank in waited_for(first, facts.of_attempt(first.attempt))]
    frames = f"Its last frames are in the report:\n{facts.report_command} --rank {first.rank}"
    at = next((f", at {line.short}" for line in exit_.stack if is_users(line.shown) and line.line), "")
    return Verdict(
        VerdictKind.LOST,
        f"{_who(first, endings, host)} was killed by {name} {place}{at}{short}.",
        _certainty(endings, behind),
        **whose(facts, first),
        **when_of(exit_.where),
        module=exit_.module,
        cls=exit_.cls,
        phase="forward" if exit_.phase == "forward" else None,
        signal=name,
        evidence=[
            f"{facts.starter} saw {rank_name(first.rank)} (pid {pid}) end with signal {-exit_.code}; "
            f"its recorder says: {place}",
            *([f"{rank_name(first.rank)} had up to {size_text(exit_.resident)} in memory"] if exit_.resident else []),
            *_fatal_lines(exit_),
            *([f"it seems to have waited for {ranks_text(behind)}, which had got less far"] if behind else []),
            *_later_lines(endings),
        ],
        next=[*filter(None, [hint]), *([frames] if is_rank(first.rank) else [])],
        concurrent=_beside(facts, endings),
        cascade=cascade_of(facts, first.attempt, {first.rank, *(rank.rank for rank in _by_themselves(endings))}),
    )


def _beside(facts: RunFacts, endings: ExitOrder) -> list[ConcurrentOrigin]:
    """The others that ended at the same point, or for the same reason by themselves."""
    return [
        ConcurrentOrigin(rank.rank, "", "", None, "", facts.host(rank), how_it_ended(rank))
        for rank in (*endings.same, *endings.too)
    ]


def _by_themselves(endings: ExitOrder) -> list[RankFacts]:
    """The ranks that ended for no reason of the first one's."""
    raised = [rank for rank in endings.by_themselves if rank.error is not None and not rank.error.peer_failure]
    return [*endings.same, *endings.too, *raised]


def _fatal_lines(exit_: WorkerExit) -> list[str]:
    lines = []
    if exit_.stack:
        calls = "; ".join(line.short for line in reversed(exit_.stack[:_MOST_CALLS]))
        native = any(not line.line for line in exit_.stack)
        why = "" if native else " (Python's calls only: faulthandler shows native ones from Python 3.14 on)"
        lines.append(f"its stack, innermost call last: {calls}{why}")
    if exit_.shm_free >= 0:
        lines.append(f"{size_text(exit_.shm_free)} were free in /dev/shm of its host after it ended")
    return lines


def _exit_step(rank: RankFacts) -> str:
    """ "" where the line is unknown."""
    if rank.exit_call is None:
        return ""
    return f"The script ends this rank itself{exit_line(rank)}: look at what leads there, and at what it printed last."


def _crash(facts: RunFacts, first: RankFacts, endings: ExitOrder) -> Verdict:
    error, seen = first.error, first.exit
    who = _who(first, endings, facts.host(first))
    if error is not None:
        inside = f", inside `{error.module}`" if error.module else ""
        last = error_line(error.message)
        statement = f"{who} raised {error.error}{inside}{f': {last}' if last else ''}."
        evidence = [*known_lines(error.message), error.traceback.strip()]
        where = error.where
        hint = f"The script itself failed{raised_at(error.traceback)}: its traceback is above, and in the job's output."
        hint = next(iter(known_steps(error.message)), hint)
        if seen is not None and seen.memory_kills and _LOST_WORKER.search(error.message):
            evidence.insert(0, memory_text(seen))
            hint = _MORE_MEMORY.format(facts.host(first))
    elif seen is not None and first.left_silently:
        statement = f"{who} {how_it_ended(first)}, before its script had ended."
        evidence = [f"its process ended by itself, and its recorder says: {doing(seen)}"]
        where = seen.where
        hint = _exit_step(first) or "Look for os._exit or sys.exit in what runs there."
    else:
        statement = f"{who} {how_it_ended(first)}."
        evidence = [f"it reported no exception; its recorder says: {doing(seen)}"] if seen is not None else []
        where = seen.where if seen is not None else RunPosition(first.rank, first.attempt)
        hint = "Look at what this rank printed last in the job's output, and for sys.exit or os._exit in the script."
        if line := _exit_step(first):
            hint = line
        elif first.script_exit is not None and first.script_exit.message:
            hint = "Its script called sys.exit with that text: look for it there."
    cause = cause_of_crash(first)
    return Verdict(
        VerdictKind.CRASH,
        statement,
        _certainty(endings, []),
        **whose(facts, first),
        **when_of(where),
        module=error.module if error is not None else None,
        evidence=evidence + _later_lines(endings),
        next=cause.next if cause is not None else [hint],
        cause=cause,
        concurrent=_beside(facts, endings),
        cascade=cascade_of(facts, first.attempt, {first.rank, *(rank.rank for rank in _by_themselves(endings))}),
    )


def interrupted_verdict(facts: RunFacts) -> Verdict | None:
    """A signal ended the launch."""
    signals = [node.signal for node in facts.nodes.values() if node.signal is not None]
    if not signals:
        return None
    name = signal_name(signals[0].signal)
    reason = next((signal.reason for signal in signals if signal.reason), "")
    if name == "SIGUSR2":
        reason = "the scheduler's warning: the time limit is near"
    why = f" ({reason})" if reason else ""
    what, seen = ("check", "") if facts.check_only else ("run", "; no overflow had been seen")
    stood, (waited, steps) = stood_still(facts), waited_for_nodes(facts)
    ranks = facts.of_attempt(facts.last_attempt)
    codes = grouped((rank for rank in ranks if (rank.code or 0) > 0), lambda rank: rank.code)
    ended = [f"{ranks_text([rank.rank for rank in same])} ended with exit code {code}" for code, same in codes.items()]
    if not steps and name != "SIGINT" and any(rank.batches for rank in ranks):
        steps = [START_AGAIN]
    orphaned = orphaned_text(facts)
    return Verdict(
        VerdictKind.INTERRUPTED,
        f"{orphaned or f'The {what} was ended from outside by {name}{why}'}{seen}.{saving_text(ranks)}{waited}"
        + (f" {stood.statement}" if stood else ""),
        Certainty.ESTABLISHED,
        attempt=facts.last_attempt,
        signal=name,
        evidence=[*progress_of(facts, facts.last_attempt), *ended, *(stood.evidence if stood else [])],
        next=stood.next if stood else steps,
    )


def unexplained_verdict(facts: RunFacts) -> Verdict | None:
    """Who started the ranks has failed, and nothing says why."""
    if not facts.failed:
        return None
    starter = "torchrun" if facts.starter == "torchrun" else facts.starter.capitalize()
    error = next((node.bye.error for node in facts.nodes.values() if node.bye is not None and node.bye.error), "")
    if error:
        waited, steps = waited_for_nodes(facts)
        is_taken = "EADDRINUSE" in error or "address already in use" in error.lower()
        return Verdict(
            VerdictKind.CRASH,
            f"{starter} failed by itself: {first_line(error).rstrip('. ')}.{waited}",
            Certainty.SUPPORTED,
            attempt=facts.last_attempt,
            evidence=progress_of(facts, facts.last_attempt) or ["no rank had started"],
            next=[_PORT_TAKEN] if is_taken else steps,
        )
    return Verdict(
        kind=VerdictKind.CRASH,
        statement=f"{starter} failed, and no rank said why: see its own output.",
        certainty=Certainty.UNKNOWN,
        attempt=facts.last_attempt,
        evidence=progress_of(facts, facts.last_attempt),
    )
