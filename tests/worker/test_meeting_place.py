"""Ranks are threads; the store at which they meet is torch's."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist
from gpuwatch.core.host import loopback
from gpuwatch.core.recorder.run_folder import write_meeting_key
from gpuwatch.worker.meeting_place import GroupEntry, LeftOut, MeetingPlace

from ..ports import ports_of_this_test

LOOK = "check who can reach the port at which the ranks meet"


def entry(rank: int) -> GroupEntry:
    return GroupEntry(rank, 2, "a group", host="127.0.0.1")


@pytest.fixture
def port():
    with ports_of_this_test((number,) for number in range(20000, 30000)) as (found,):
        yield found


def meet(rank, folder, meets_at="", while_there=lambda: None):
    """Returns who it is, or why there is no preflight."""
    try:
        with MeetingPlace(entry(rank), None, folder, meets_at, 20.0) as identity:
            while_there()
            return identity
    except LeftOut as reason:
        return str(reason)


def test_on_one_host_nobody_else_reaches_the_store(tmp_path):
    heard = []

    def where_this_process_listens():
        mine = psutil.Process().net_connections("tcp")
        heard.extend(found.laddr for found in mine if found.status == psutil.CONN_LISTEN)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, 0, tmp_path, "", where_this_process_listens)
        second = pool.submit(meet, 1, tmp_path)
        identities = first.result(), second.result()
    assert [identity.rank for identity in identities] == [0, 1]
    assert {address.ip for address in heard if address.port == identities[0].master_port} == {loopback()}


PREFIX = f"gpuwatch/{hashlib.sha256(b'a group 2').hexdigest()[:16]}"


@pytest.fixture
def folder(tmp_path):
    write_meeting_key(tmp_path, "the job's")
    return tmp_path


def test_who_comes_in_a_ranks_place_is_told_by_the_seal(folder, port):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, 0, folder, f"127.0.0.1:{port}")
        stranger = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        stranger.set(f"{PREFIX}/came/1", '{"host": "elsewhere", "local_rank": 0}')
        stranger.add(f"{PREFIX}/came", 1)
        stranger.add(f"{PREFIX}/left", 1)
        said = first.result()
    assert said == f"the store's entry {PREFIX}/came/1 was not written by this job; {LOOK}"


def test_who_decides_in_rank_0s_place_is_told_by_the_seal(folder, port):
    stranger = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    stranger.set(f"{PREFIX}/go", '"there is none, as I say"')
    said = meet(1, folder, f"127.0.0.1:{port}")
    assert said == f"the store's entry {PREFIX}/go was not written by this job; {LOOK}"


def test_two_ranks_with_the_jobs_key_meet_on_several_hosts(folder, port):
    with ThreadPoolExecutor(2) as pool:
        identities = list(pool.map(lambda rank: meet(rank, folder, f"127.0.0.1:{port}"), (0, 1)))
    assert [(identity.rank, identity.local_rank) for identity in identities] == [(0, 0), (1, 1)]
