"""A process group over some ranks: do the collectives come through, and are their values right? If not: whose fault?

Every rank votes on what it saw, through the store, as the collectives are what is in doubt; the same votes give every
rank the same verdict. If the sum is wrong, the transfers tell whether the values were; if they were not, pairs of ranks
add by themselves until only those that are wrong with everybody are left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ....core.text.ranks_text import ranks_text
from ..decide.pairwise_search import ROUNDS, PairResult, blame, next_pairs
from ..decide.votes import Judgement, Vote, judge, judge_sums_of_pairs
from .collectives import Collectives, join, left_s
from .failure import ProbeFailure

SIZES = (4096, 1 << 20)
"""float32: NCCL takes other protocols for 16 KiB than for 4 MiB."""
SMALL = 16
"""In a group of so many ranks each one broadcasts, and it is searched for who adds wrong. In a larger one, two do,
and the pairs of its nodes are tried."""

_PERIOD = 122


def check_group(
    store: Store,
    device: torch.device,
    backend: str,
    ranks: Sequence[int],
    rank: int,
    timeout_s: float,
    say: Callable[[str], None],
) -> str:
    """Run every kind of collective among `ranks` (global numbers, this is `rank`); what was done, in words.

    `store` is a PrefixStore of this one test: no other may use its prefix. `say` hears each step as it begins.
    Raises ProbeFailure if a value is wrong: peers None is this rank's own fault, peers [] is nobody's by name, else the
    ranks to blame. What torch raises when a collective breaks is left as it is.

    It ends within `timeout_s`. For a process of its own with a deadline above that, to be ended by os._exit: a group of
    which one rank went away can hang when it is taken down.
    """
    deadline = time.monotonic() + timeout_s
    if len(ranks) == 1:
        return "one rank: nothing to test"
    collectives = join(store, device, backend, ranks, rank, deadline, say)
    vote = _Round(store, collectives, device, ranks, rank, say).run()
    say("votes")
    votes = exchange(PrefixStore("votes", store), ranks, rank, vote, deadline)
    verdict = judge(votes)
    if verdict is not None and verdict.search and len(ranks) <= SMALL:
        try:
            verdict = judge_sums_of_pairs(votes, _search(store, collectives, device, ranks, rank, deadline, say))
        except (RuntimeError, ProbeFailure):
            pass  # what is known without the pairs is worth more than that they could not be tried
    if verdict is not None:
        raise _failure(verdict, rank)
    return f"all_reduce, all_gather, broadcast and barrier over {len(ranks)} ranks came out right ({backend})"


def exchange(store: Store, ranks: Sequence[int], rank: int, mine: Vote, deadline: float) -> dict[int, Vote]:
    """Every rank's vote. Raises ProbeFailure with the ranks that give none in time."""
    store.set(str(rank), msgspec.json.encode(mine).decode())
    keys = [str(one) for one in ranks]
    try:
        store.wait(keys, timedelta(seconds=left_s(deadline)))
    except RuntimeError as error:
        silent = [one for one in ranks if not store.check([str(one)])]
        if not silent:
            raise
        raise ProbeFailure(f"{ranks_text(silent)} did not say what came out of the test", peers=silent) from error
    return {one: msgspec.json.decode(found, type=Vote) for one, found in zip(ranks, store.multi_get(keys), strict=True)}


class _Round:
    """One run of the collectives, and what this rank saw."""

    def __init__(
        self,
        store: Store,
        collectives: Collectives,
        device: torch.device,
        ranks: Sequence[int],
        rank: int,
        say: Callable[[str], None],
    ) -> None:
        self._store = store
        self._collectives = collectives
        self._device = device
        self._ranks = list(ranks)
        self._rank = rank
        self._say = say

    def run(self) -> Vote:
        steps: list[tuple[str, Callable[[], Vote]]] = [
            ("all_reduce", self._all_reduce),
            ("all_gather", self._all_gather),
            ("broadcast", self._broadcast),
            ("barrier", self._barrier),
        ]
        seen = Vote()
        for name, step in steps:
            self._say(name)
            found = step()
            seen = msgspec.structs.replace(
                seen, **{field: value for field, value in msgspec.structs.asdict(found).items() if value}
            )
        return seen

    def _all_reduce(self) -> Vote:
        return Vote(sum_error=sum_error(self._collectives, self._device, self._ranks, self._rank))

    def _all_gather(self) -> Vote:
        mine = values_of(self._rank, SIZES[0]).to(self._device)
        gathered = [torch.empty_like(mine) for _ in self._ranks]
        self._collectives.all_gather(gathered, mine)
        wrong = [
            one
            for one, got in zip(self._ranks, gathered, strict=True)
            if not torch.equal(got.cpu(), values_of(one, SIZES[0]))
        ]
        return Vote(gather_errors=wrong)

    def _broadcast(self) -> Vote:
        wrong = []
        for root in self._ranks if len(self._ranks) <= SMALL else (self._ranks[0], self._ranks[-1]):
            due = values_of(root, SIZES[0])
            got = (due if root == self._rank else torch.zeros_like(due)).to(self._device)
            self._collectives.broadcast(got, self._ranks.index(root))
            if not torch.equal(got.cpu(), due):
                wrong.append(root)
        return Vote(broadcast_errors=wrong)

    def _barrier(self) -> Vote:
        self._store.add("entered", 1)
        self._collectives.barrier()
        entered = self._store.add("entered", 0)
        if entered < len(self._ranks):
            return Vote(barrier_error=f"{entered} of {len(self._ranks)} ranks had reached it")
        return Vote()


def sum_error(
    collectives: Collectives,
    device: torch.device,
    ranks: Sequence[int],
    rank: int,
    group: dist.ProcessGroup | None = None,
) -> str:
    """How a sum over a group, of either size, came out wrong at this rank; "" if both are right."""
    errors = []
    for count in SIZES:  # always both: the others take part in both
        total = values_of(rank, count).to(device)
        collectives.all_reduce(total, group=group)
        got, due = total.cpu(), sum_of(ranks, count)
        if not torch.equal(got, due):
            wrong = (got != due).nonzero().flatten()
            first = int(wrong[0])
            errors.append(
                f"all_reduce over {len(ranks)} ranks gave {got[first].item():g} where {due[first].item():g} was due "
                f"({len(wrong)} of {count} numbers wrong)"
            )
    return errors[0] if errors else ""


def values_of(rank: int, count: int) -> torch.Tensor:
    """What a rank puts in: float32, whole numbers so small that sums over 50,000 ranks are exact in any order.

    The rank's low byte is in every even number, its high byte in every odd one.
    """
    return _repeated([_value(rank, place) for place in range(_PERIOD)], count)


def sum_of(ranks: Sequence[int], count: int) -> torch.Tensor:
    """What the sum must be."""
    return _repeated([sum(_value(rank, place) for rank in ranks) for place in range(_PERIOD)], count)


def _value(rank: int, place: int) -> int:
    return (rank >> 8 * (place % 2) & 0xFF) + place % 61 + 1


def _repeated(pattern: list[int], count: int) -> torch.Tensor:
    return torch.tensor(pattern, dtype=torch.float32).repeat(count // _PERIOD + 1)[:count]


def _search(
    store: Store,
    collectives: Collectives,
    device: torch.device,
    ranks: Sequence[int],
    rank: int,
    deadline: float,
    say: Callable[[str], None],
) -> list[int]:
    """Who adds wrong: pairs of ranks add by themselves, as many at once as there are; see pairwise_search.py."""
    say("pairs")
    results: list[PairResult] = []
    for number in range(ROUNDS):
        pairs = next_pairs(results, ranks)
        if not pairs:
            break
        error = ""
        for pair in pairs:  # every rank makes every group, in one order: torch wants it so
            group = dist.new_group([list(ranks).index(one) for one in pair])
            if rank in pair:
                error = sum_error(collectives, device, pair, rank, group)
        votes = exchange(PrefixStore(f"pairs/{number}", store), ranks, rank, Vote(sum_error=error), deadline)
        for a, b in pairs:
            found = votes[a].sum_error or votes[b].sum_error
            results.append(PairResult(a, b, not found, found))
    nodes = {one: [one] for one in ranks}
    findings = blame(results, nodes, {one: f"rank {one}" for one in ranks})
    return [one for finding in findings if finding.subject == "node" for one in finding.ranks]


def _failure(verdict: Judgement, rank: int) -> ProbeFailure:
    guilty = list(verdict.guilty)
    if rank in guilty:
        guilty_or_own: list[int] | None = None
    else:
        guilty_or_own = guilty
    next_ = (
        f"Leave out the GPU or host of {ranks_text(guilty)}: it answers, but with wrong numbers."
        if guilty
        else "Run `gpuwatch check` with other nodes: the wrong numbers stay with the device or link that makes them."
    )
    return ProbeFailure(verdict.sentence, peers=guilty_or_own, next=next_)
