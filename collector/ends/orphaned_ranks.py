"""Ranks that ran on when their launch was killed: nothing ends them, and nobody watches them any more. Pure."""

from __future__ import annotations

from ...core.text import joined
from ..facts.rank_facts import RankFacts
from ..facts.run_facts import RunFacts
from ..report.sentence_parts import grouped, ranks_text

_MOST_HOSTS = 4


def orphaned_text(facts: RunFacts) -> str:
    """The beginning of a statement; "" where no rank ran on.

    `The launch on vm was killed, and ranks 0 and 1 (process ids 77 and 78) were still running then`
    """
    by_host = _by_host(facts)
    if not by_host:
        return ""
    if len(by_host) == 1:
        ((host, ranks),) = by_host.items()
        were = "was" if len(ranks) == 1 else "were"
        return f"The launch on {host} was killed, and {_who(ranks)} {were} still running then"
    each = [f"{_who(ranks)} on {host}" for host, ranks in list(by_host.items())[:_MOST_HOSTS]]
    rest = len(by_host) - len(each)
    more = [f"those of {rest} more host{'s' if rest > 1 else ''}"] if rest else []
    return f"{len(by_host)} launches were killed, and these ranks were still running then: {joined([*each, *more])}"


def orphaned_steps(facts: RunFacts) -> list[str]:
    """How to find them and to end them, a step for each host."""
    return [_step(host, ranks) for host, ranks in list(_by_host(facts).items())[:_MOST_HOSTS]]


def _step(host: str, ranks: list[RankFacts]) -> str:
    who, pids = ranks_text([rank.rank for rank in ranks]).capitalize(), _pids(ranks)
    they, them, were = ("it still runs", "it", "was") if len(ranks) == 1 else ("they still run", "them", "were")
    look = f"ps -p {','.join(pids)}" if pids else "pgrep -fa gpuwatch.worker"
    end = f"kill {' '.join(pids) if pids else 'PID'}"
    return (
        f"{who} {were} running when the launch was killed, and nothing ends {them}. Look on {host} whether {they}: "
        f"{look}; to end {them}: {end}"
    )


def _who(ranks: list[RankFacts]) -> str:
    who, pids = ranks_text([rank.rank for rank in ranks]), _pids(ranks)
    return f"{who} (process id{'s' if len(pids) > 1 else ''} {joined(pids)})" if pids else who


def _pids(ranks: list[RankFacts]) -> list[str]:
    """Process ids of all of them; [] if one is not known."""
    pids = [rank.state.pid for rank in ranks if rank.state is not None and rank.state.pid > 0]
    return list(map(str, pids)) if len(pids) == len(ranks) else []


def _by_host(facts: RunFacts) -> dict[str, list[RankFacts]]:
    """Host -> its ranks that ran on."""
    ranks = (rank for rank in facts.of_attempt(facts.last_attempt) if rank.runs_on)
    return grouped(ranks, lambda rank: facts.host(rank) or "its host")
