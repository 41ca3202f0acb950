"""A process group over some ranks: do the collectives end, and are their values right? If not, whose fault is it?

Every rank publishes its results as a vote in the store, since the collectives themselves are in doubt. All ranks read
the same votes and reach the same verdict. If a sum is wrong, the transfers show whether its values arrived right. If
they did, pairs of ranks compute sums, until only the ranks that are wrong with every partner are left.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ...core.text import ranks_text
from ..device.accelerator import gpu_of, tested_device
from .blame.group_blame import RankVote, VoteResult, judge, judge_sums_of_pairs
from .blame.pairs import ROUNDS, blame, next_pairs
from .probe_child import ProbeFailure
from .steps import PairResult

# Collectives with a deadline, on gloo and on NCCL alike.
#
# Since torch 2.8 a blocking collective of NCCL returns no Work. It runs in the current stream, and reading the result
# then waits for the device without a timeout. So every collective here is asynchronous, and its Work is awaited with a
# timeout.

_LEAST_S = 0.1
_ROUNDING_S = 0.05
"""Tolerance: torch counts a timeout in whole milliseconds, from a slightly different start."""
_WATCHDOG = 10
"""Factor on the remaining time: torch's own watchdog, which ends the process, must not fire before our deadline."""
_BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


def left_s(deadline: float) -> float:
    """Seconds until a deadline on the monotonic clock, at least 0.1."""
    return max(_LEAST_S, deadline - time.monotonic())


def join(
    store: Store,
    device: torch.device,
    backend: str,
    ranks: Sequence[int],
    rank: int,
    timeout_s: float,
    say: Callable[[str], None],
) -> GroupCollectives:
    """Make the process group of this process among `ranks` (global numbers; this one is `rank`), at least two.

    `store` is a PrefixStore of this group alone. `say` is called with each step as it begins. NCCL connects at once,
    since it is given the device. Raises ProbeFailure, with the ranks that do not come, or with no ranks if the group is
    not up in time. All that is done in the group ends within `timeout_s` from here on.
    """
    deadline = time.monotonic() + timeout_s
    say("init")
    tested, is_gpu = tested_device(device), gpu_of(device) is not None
    tested.use(device)
    if is_gpu:
        _set_up_nccl()
    ready = PrefixStore("ready", store)
    ready.set(str(rank), "")
    # A rank whose device hangs does not arrive; without this, NCCL would only fail to connect.
    _wait_for(ready, ranks, deadline, "did not reach the process group")
    limit_s = left_s(deadline)

    def make() -> None:
        tested.use(device)  # every thread has its own current device
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=list(ranks).index(rank),
            world_size=len(ranks),
            timeout=timedelta(seconds=limit_s * _WATCHDOG if is_gpu else limit_s),
            device_id=device if is_gpu else None,
        )

    _in_time(make, limit_s, f"{backend} had not connected {len(ranks)} ranks")
    return GroupCollectives(store, device, backend, list(ranks), rank, timeout_s, deadline, say)


def _set_up_nccl() -> None:
    """Have NCCL's errors raised where we wait. Otherwise torch's watchdog ends the process and names no rank.

    TORCH_NCCL_BLOCKING_WAIT would also do that, but then every wait polls once a millisecond, which distorts the times.
    """
    for name in _BLOCKING_WAIT:
        os.environ.pop(name, None)
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"


def _wait_for(store: Store, ranks: Sequence[int], deadline: float, otherwise: str) -> None:
    """Wait until the store has a key of each rank. Raises ProbeFailure with the ranks that have set none in time."""
    try:
        store.wait([str(rank) for rank in ranks], timedelta(seconds=left_s(deadline)))
    except RuntimeError as error:
        absent = [rank for rank in ranks if not store.check([str(rank)])]
        if not absent:
            raise
        raise ProbeFailure(f"{ranks_text(absent)} {otherwise}", peers=absent) from error


def _in_time(call: Callable[[], None], timeout_s: float, otherwise: str) -> None:
    """Call in a thread that is abandoned if it hangs, since ncclCommInitRank has no timeout. The process ends soon."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="gpuwatch-init")
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise ProbeFailure(f"{otherwise} within {timeout_s:.0f} s", peers=[])
    if errors:
        raise errors[0]


@dataclass
class GroupCollectives:
    """The group that this process has joined, and its collectives. Raises ProbeFailure at the deadline."""

    store: Store
    device: torch.device
    backend: str
    ranks: list[int]
    """Global numbers, `rank` among them."""
    rank: int
    timeout_s: float
    deadline: float
    """In monotonic time."""
    say: Callable[[str], None]
    limit_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.limit_s = left_s(self.deadline)

    def run(self, name: str, *args: object, **named: object) -> None:
        """Call the collective of this name in torch.distributed, and wait until it has ended, also on the device."""
        work = getattr(dist, name)(*args, **named, async_op=True)
        if work is None:
            return
        try:
            work.wait(timedelta(seconds=left_s(self.deadline)))
        except RuntimeError as error:
            if time.monotonic() < self.deadline - _ROUNDING_S:
                raise
            raise self.too_late(name) from error

    def too_late(self, name: str) -> ProbeFailure:
        """The failure at the deadline. It names no rank: a waiting rank does not know for which one it waits."""
        return ProbeFailure(
            f"{name} did not end within {self.limit_s:.0f} s: some rank took no part in it, or did not answer",
            peers=[],
            next="Look for the rank that hangs, or for packets that are dropped on the way to it.",
        )


SIZES = (4096, 1 << 20)
"""Numbers of float32 elements: NCCL uses different protocols for 16 KiB and for 4 MiB."""
SMALL = 16
"""In a group of up to this many ranks each one broadcasts, and pairs of ranks are searched for wrong sums. In a larger
group two ranks broadcast, and pairs of its nodes are tried."""

_PERIOD = 122


def check_group(group: GroupCollectives) -> str:
    """Run every kind of collective. Returns what was done, in words.

    Raises ProbeFailure if a value is wrong; see there for `peers`. Errors that torch raises for a broken collective are
    not translated.

    Run it in a separate process with a longer deadline, and end that with os._exit: a group can hang while it is
    destroyed if one of its ranks has ended.
    """
    vote = _vote(group)
    group.say("votes")
    try:
        votes = exchange(group, "votes", vote)
    except ProbeFailure as silent:
        if vote == RankVote():
            raise
        # its own collectives may have returned too early, and the others wait for it
        detail = f"{silent.detail}, and rank {group.rank} got wrong values itself; undetermined which rank is at fault"
        raise ProbeFailure(detail, peers=[]) from silent
    verdict = judge(votes)
    if verdict is not None and verdict.search and len(votes) <= SMALL:
        with suppress(RuntimeError, ProbeFailure):  # the verdict without the pairs is worth more than their error
            verdict = judge_sums_of_pairs(votes, _search(group))
    if verdict is not None:
        raise _failure(verdict, group.rank)
    return f"all_reduce, all_gather, broadcast and barrier over {len(votes)} ranks gave right results ({group.backend})"


def exchange(group: GroupCollectives, name: str, mine: RankVote) -> dict[int, RankVote]:
    """The votes of all ranks. Raises ProbeFailure with the ranks that give none in time."""
    store = PrefixStore(name, group.store)
    store.set(str(group.rank), msgspec.json.encode(mine).decode())
    _wait_for(store, group.ranks, group.deadline, "did not report the result of the test")
    votes = store.multi_get([str(rank) for rank in group.ranks])
    return {rank: msgspec.json.decode(vote, type=RankVote) for rank, vote in zip(group.ranks, votes, strict=True)}


def _vote(group: GroupCollectives) -> RankVote:
    """Run the collectives. Returns the numbers that this rank received."""
    group.say("all_reduce")
    error = sum_error(group, group.ranks)
    group.say("all_gather")
    gather_errors = _gather_errors(group)
    group.say("broadcast")
    broadcast_errors = _broadcast_errors(group)
    group.say("barrier")
    group.store.add("entered", 1)
    group.run("barrier", device_ids=[group.device.index] if gpu_of(group.device) is not None else None)
    entered, count = group.store.add("entered", 0), len(group.ranks)
    early = f"{entered} of {count} ranks had reached it" if entered < count else ""
    return RankVote(error, gather_errors, broadcast_errors, early)


def _gather_errors(group: GroupCollectives) -> list[int]:
    mine = values_of(group.rank, SIZES[0]).to(group.device)
    gathered = [torch.empty_like(mine) for _ in group.ranks]
    group.run("all_gather", gathered, mine)
    return [
        rank
        for rank, got in zip(group.ranks, gathered, strict=True)
        if not torch.equal(got.cpu(), values_of(rank, SIZES[0]))
    ]


def _broadcast_errors(group: GroupCollectives) -> list[int]:
    wrong = []
    for root in group.ranks if len(group.ranks) <= SMALL else (group.ranks[0], group.ranks[-1]):
        due = values_of(root, SIZES[0])
        got = (due if root == group.rank else torch.zeros_like(due)).to(group.device)
        group.run("broadcast", got, src=group.ranks.index(root))
        if not torch.equal(got.cpu(), due):
            wrong.append(root)
    return wrong


def sum_error(collectives: GroupCollectives, ranks: Sequence[int], group: dist.ProcessGroup | None = None) -> str:
    """How a sum over `ranks` (all, or those of `group`) is wrong here, for either size; "" if both are right."""
    errors = []
    for count in SIZES:  # always both sizes: the other ranks take part in both
        total = values_of(collectives.rank, count).to(collectives.device)
        collectives.run("all_reduce", total, group=group)
        got, due = total.cpu(), sum_of(ranks, count)
        if not torch.equal(got, due):
            wrong = (got != due).nonzero().flatten()
            first = int(wrong[0])
            errors.append(
                f"all_reduce over {len(ranks)} ranks gave {got[first].item():g} instead of {due[first].item():g} "
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


def _search(group: GroupCollectives) -> list[int]:
    """The ranks that add wrong. Disjoint pairs of ranks compute sums at the same time; see blame/pairs.py."""
    group.say("pairs")
    ranks = group.ranks
    results: list[PairResult] = []
    for number in range(ROUNDS):
        pairs = next_pairs(results, ranks)
        if not pairs:
            break
        error = ""
        for pair in pairs:  # torch requires that every rank makes every group, in the same order
            of_pair = dist.new_group([ranks.index(one) for one in pair])
            if group.rank in pair:
                error = sum_error(group, pair, of_pair)
        votes = exchange(group, f"pairs/{number}", RankVote(sum_error=error))
        for a, b in pairs:
            found = votes[a].sum_error or votes[b].sum_error
            results.append(PairResult(a, b, not found, found))
    nodes = {one: [one] for one in ranks}
    findings = blame(results, nodes, {one: f"rank {one}" for one in ranks})
    return [one for finding in findings if finding.subject == "node" for one in finding.ranks]


def _failure(verdict: VoteResult, rank: int) -> ProbeFailure:
    guilty = list(verdict.guilty)
    next_ = (
        f"Leave out the GPU or host of {ranks_text(guilty)}: it answers, but with wrong numbers."
        if guilty
        else "Run `gpuwatch check` with other nodes: the wrong numbers stay with the device or link that makes them."
    )
    return ProbeFailure(verdict.sentence, peers=None if rank in guilty else guilty, next=next_)
