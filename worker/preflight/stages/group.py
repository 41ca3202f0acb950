"""A process group over some ranks: do the collectives end, and are their values right? If not, whose fault is it?

Every rank publishes its results as a vote in the store, since the collectives themselves are in doubt. All ranks read
the same votes and reach the same verdict. If a sum is wrong, the transfers show whether its values arrived right. If
they did, pairs of ranks compute sums, until only the ranks that are wrong with every partner are left.
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
"""Numbers of float32 elements: NCCL uses different protocols for 16 KiB and for 4 MiB."""
SMALL = 16
"""In a group of up to this many ranks each one broadcasts, and pairs of ranks are searched for wrong sums. In a larger
group two ranks broadcast, and pairs of its nodes are tried."""

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
    """Run every kind of collective among `ranks` (global numbers; this one is `rank`). Returns what was done, in words.

    `store` is a PrefixStore of this test alone. `say` is called with each step as it begins.
    Raises ProbeFailure if a value is wrong; see there for `peers`. Errors that torch raises for a broken collective are
    not translated.

    It ends within `timeout_s`. Run it in a separate process with a longer deadline, and end that with os._exit: a group
    can hang while it is destroyed if one of its ranks has ended.
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
            pass  # the verdict without the pairs is worth more than their error
    if verdict is not None:
        raise _failure(verdict, rank)
    return f"all_reduce, all_gather, broadcast and barrier over {len(ranks)} ranks came out right ({backend})"


def exchange(store: Store, ranks: Sequence[int], rank: int, mine: Vote, deadline: float) -> dict[int, Vote]:
    """The votes of all ranks. Raises ProbeFailure with the ranks that give none in time."""
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
    """One run of the collectives, and this rank's results."""

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
    """How a sum over a group is wrong on this rank, for either size; "" if both are right."""
    errors = []
    for count in SIZES:  # always both sizes: the other ranks take part in both
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
    """The input of a rank: float32 whole numbers, so small that sums over 50,000 ranks are exact in any order.

    Elements at even positions hold the rank's low byte, those at odd positions its high byte.
    """
    return _repeated([_value(rank, place) for place in range(_PERIOD)], count)


def sum_of(ranks: Sequence[int], count: int) -> torch.Tensor:
    """The correct sum."""
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
    """The ranks that add wrong. Disjoint pairs of ranks compute sums at the same time; see pairwise_search.py."""
    say("pairs")
    results: list[PairResult] = []
    for number in range(ROUNDS):
        pairs = next_pairs(results, ranks)
        if not pairs:
            break
        error = ""
        for pair in pairs:  # torch requires that every rank makes every group, in the same order
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
