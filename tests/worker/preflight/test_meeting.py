"""Ranks are threads with clients of their own; the store is torch's."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from gpuwatch.core.identity import RankIdentity
from gpuwatch.worker.preflight.meeting import (
    ForeignValue,
    MetReports,
    NoConclusion,
    StoreLost,
    StoreRendezvous,
    connect,
)
from needs import needs

LONG = {"reports_s": 20.0, "conclusion_s": 20.0, "deputy_s": 5.0}


@pytest.fixture(scope="module")
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


class Ranks:
    """Seats in one meeting."""

    def __init__(self, server: Any, world_size: int) -> None:
        self.prefix = f"gpuwatch/{uuid.uuid4().hex}"
        self.server = server
        self.world_size = world_size
        self.calls = 0

    def seat(self, rank: int, key: str = "") -> StoreRendezvous:
        identity = RankIdentity(rank, 0, self.world_size, 1, "127.0.0.1", self.server.port, agent_store=True)
        return StoreRendezvous(connect(identity, 20), self.prefix, rank, self.world_size, key)

    def draw(self, reports: MetReports) -> bytes:
        """A conclusion that says who drew it from what."""
        self.calls += 1
        heard = ",".join(f"{rank}={text.decode()}" for rank, text in sorted(reports.by_rank.items()))
        return f"{heard} silent {reports.silent} deputy {reports.leader_failed}".encode()

    def all_at_once(self, do, ranks=None) -> list[Any]:
        ranks = range(self.world_size) if ranks is None else ranks
        seats = {rank: self.seat(rank) for rank in ranks}
        with ThreadPoolExecutor(len(seats)) as pool:
            return list(pool.map(lambda rank: do(rank, seats[rank]), ranks))

    @property
    def keys(self) -> list[str]:
        return sorted(key for key in self.server.list_keys() if self.prefix in key)


class Asked:
    """A store that notes what it is asked."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.questions: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.questions.append(name)
        return getattr(self._store, name)


@needs("torch.distributed.TCPStore.list_keys")
def test_all_hear_one_conclusion_and_no_key_is_left(server):
    ranks = Ranks(server, 3)

    def take_part(rank: int, seat: StoreRendezvous) -> bytes:
        heard = [
            seat.meet(step, f"{step}{rank}".encode(), ranks.draw, **LONG, failed=step == "last" and rank > 0)
            for step in ("arrive", "allocation", "last")
        ]
        seat.leave(["arrive", "allocation", "last"], 3)
        return heard[1]

    assert set(ranks.all_at_once(take_part)) == {
        b"0=allocation0,1=allocation1,2=allocation2 silent [] deputy False",
    }
    assert ranks.calls == 3
    assert ranks.keys == []


@needs("torch.distributed.TCPStore.list_keys")
def test_who_is_missing_is_known_after_the_deadline_and_finds_out_itself_when_it_comes(server):
    ranks = Ranks(server, 3)
    short = {**LONG, "reports_s": 0.2}

    def take_part(rank: int, seat: StoreRendezvous) -> bytes:
        heard = seat.meet("arrive", b"here", ranks.draw, **short)
        seat.leave(["arrive"], 2)
        return heard

    assert set(ranks.all_at_once(take_part, [0, 2])) == {b"0=here,2=here silent [1] deputy False"}
    assert [key.rpartition("/")[2] for key in ranks.keys] == ["conclusion", "left"]
    assert take_part(1, ranks.seat(1)) == b"0=here,2=here silent [1] deputy False"
    assert ranks.keys == []


@pytest.mark.parametrize("leader_is_there", [True, False])
def test_without_a_conclusion_of_the_leader_one_of_the_others_draws_it(server, leader_is_there):
    ranks = Ranks(server, 4)
    if leader_is_there:  # and does not do its part after it has reported
        dist.PrefixStore(ranks.prefix, server).set("arrive/0", "here")

    def take_part(rank: int, seat: StoreRendezvous) -> bytes:
        heard = seat.meet("arrive", b"here", ranks.draw, reports_s=20, conclusion_s=0.2, deputy_s=20)
        seat.leave(["arrive"], 3)
        return heard

    (heard,) = set(ranks.all_at_once(take_part, [1, 2, 3]))
    silent = [] if leader_is_there else [0]
    assert heard.endswith(f"1=here,2=here,3=here silent {silent} deputy True".encode())
    assert ranks.calls == 1


def test_a_deputy_that_gives_none_either_ends_the_wait(server):
    ranks = Ranks(server, 3)
    dist.PrefixStore(ranks.prefix, server).set("arrive/deputy", "2")
    with pytest.raises(NoConclusion):
        ranks.seat(1).meet("arrive", b"here", ranks.draw, reports_s=1, conclusion_s=0.1, deputy_s=0.1)


@pytest.mark.slow
def test_a_store_that_nobody_serves_is_lost(port_of_nobody):
    identity = RankIdentity(0, 0, 2, 1, "127.0.0.1", port_of_nobody, agent_store=True)
    with pytest.raises(StoreLost):
        connect(identity, 1)


def test_a_store_that_goes_away_is_lost_at_once():
    gone = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    ranks = Ranks(gone, 2)
    seat = ranks.seat(1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(seat.meet, "arrive", b"here", ranks.draw, reports_s=1, conclusion_s=3000, deputy_s=1)
        store = dist.PrefixStore(ranks.prefix, gone)
        store.wait(["arrive/1"], timedelta(seconds=20))
        del store, gone
        ranks.server = None
        with pytest.raises(StoreLost):
            waiting.result(timeout=300)


def test_each_rank_puts_few_questions_to_the_store_however_many_there_are(server):
    """512 ranks meet three times; one thread of the store serves them all."""
    ranks = Ranks(server, 512)
    for rank in range(1, 512):
        dist.PrefixStore(ranks.prefix, server).set(f"arrive/{rank}", "x" * 4000)
    seat = ranks.seat(0)
    asked = Asked(seat._store)
    seat._store = asked
    conclusion = seat.meet("arrive", b"x" * 4000, lambda found: str(len(found.by_rank)).encode(), **LONG)
    assert conclusion == b"512"
    assert asked.questions == ["set", "wait", "multi_get", "compare_set", "wait", "get", "delete_key"]
    for rank in range(1, 512):
        server.delete_key(f"{ranks.prefix}/arrive/{rank}")


@pytest.fixture
def port_of_nobody() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_report_that_somebody_without_the_key_has_written_is_no_ranks_word(server):
    ranks = Ranks(server, 2)
    heard = []

    def draw(reports: MetReports) -> bytes:
        heard.append(reports)
        return b"{}"

    server.set(f"{ranks.prefix}/arrive/1", '{"kind": "died"}')
    assert ranks.seat(0, "the job's").meet("arrive", b"{}", draw, **LONG) == b"{}"
    (reports,) = heard
    assert (reports.by_rank, reports.silent) == ({0: b"{}"}, [])
    assert reports.foreign == {1: f"the store's entry {ranks.prefix}/arrive/1 was not written by this job"}


def test_a_conclusion_that_somebody_without_the_key_has_drawn_is_not_believed(server):
    ranks = Ranks(server, 2)
    server.set(f"{ranks.prefix}/arrive/conclusion", '{"findings": []}')
    with pytest.raises(ForeignValue, match="conclusion was not written by this job"):
        ranks.seat(1, "the job's").meet("arrive", b"{}", ranks.draw, **LONG)
