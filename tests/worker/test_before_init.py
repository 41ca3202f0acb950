"""What a call of init_process_group says of the ranks, and where each of them is."""

import pytest
import torch
from gpuwatch.worker.before_init import entry_of
from gpuwatch.worker.meeting_place import GroupEntry, LeftOut, RankMeetingPlace, identity_of

ENVIRON = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("arguments", "environ", "entry"),
    [
        ({}, ENVIRON, GroupEntry(1, 4, "port 29500, attempt 0", "head")),
        ({"backend": "nccl", "rank": -1, "world_size": -1}, ENVIRON, GroupEntry(1, 4, "port 29500, attempt 0", "head")),
        ({"rank": 3, "world_size": 8}, ENVIRON, GroupEntry(3, 8, "port 29500, attempt 0", "head")),
        (
            {"init_method": "tcp://10.0.0.1:29500", "rank": 0, "world_size": 2},
            {},
            GroupEntry(0, 2, "port 29500, attempt 0", "10.0.0.1"),
        ),
        (
            {"init_method": "tcp://[fd00::1]:29500?rank=1&world_size=2"},
            ENVIRON,
            GroupEntry(1, 2, "port 29500, attempt 0", "fd00::1"),
        ),
        (
            {"init_method": "file:///shared/store", "rank": 0, "world_size": 2},
            {"TORCHELASTIC_RESTART_COUNT": "2"},
            GroupEntry(0, 2, "file /shared/store, attempt 2"),
        ),
        ({"store": object(), "rank": 1, "world_size": 2}, {}, GroupEntry(1, 2, "store, attempt 0")),
        ({"device_id": torch.device("cuda:3")}, ENVIRON, GroupEntry(1, 4, "port 29500, attempt 0", "head", 3)),
        ({"device_id": 2}, ENVIRON, GroupEntry(1, 4, "port 29500, attempt 0", "head", 2)),
        ({"backend": "fake", "rank": 0, "world_size": 8}, {}, None),
        ({}, {}, None),
        ({"rank": 4, "world_size": 4}, {}, None),
    ],
)
def test_the_call_says_who_comes_and_where_they_meet(arguments, environ, entry):
    assert entry_of(arguments, environ) == entry


def test_a_backend_that_knows_the_ranks_only_later():
    with pytest.raises(LeftOut, match="known only once it has joined"):
        entry_of({"backend": "mpi"}, {})


def test_each_rank_finds_its_place_among_the_hosts():
    places = [RankMeetingPlace("a", 0), RankMeetingPlace("b"), RankMeetingPlace("a", 1), RankMeetingPlace("b")]
    found = [identity_of(GroupEntry(rank, 4, ""), places, "head", 1234) for rank in range(4)]

    assert [(one.local_rank, one.local_world_size, one.node) for one in found] == [
        (0, 2, 0),
        (0, 2, 1),
        (1, 2, 0),
        (1, 2, 1),
    ]
    assert {(one.master_addr, one.master_port, one.agent_store) for one in found} == {("head", 1234, True)}
