"""What torch writes of NCCL, as torch 2.14.1 has written it, and what a rank's table and its device show together."""

from __future__ import annotations

import pickle

import pytest
from gpuwatch.core.events.rank_standing import GroupState, IssuedOperation
from gpuwatch.core.recorder.stalls import DeviceProgress, read_dump, with_device

DONE, GIVEN = "completed", "scheduled"


def entry(number, name, state=DONE, group="0", *, is_p2p=False, size=(8,), when_ns=1_000_000_000):
    return {
        "process_group": (group, "default_pg"),
        "collective_seq_id": 0 if is_p2p else number,
        "p2p_seq_id": number if is_p2p else 0,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": when_ns,
        "input_sizes": [list(size)],
        "input_dtypes": ["Float"],
        "state": state,
        "is_p2p": is_p2p,
    }


def read(*entries):
    return read_dump(pickle.dumps({"version": "2.10", "entries": list(entries)}))


def test_a_group_stands_in_the_first_collective_that_is_not_complete():
    found = read(
        entry(1, "all_reduce"),
        entry(2, "broadcast", GIVEN, when_ns=7),
        entry(3, "_all_gather_base", GIVEN),
        entry(1, "all_reduce_barrier", group="1"),
    )

    assert (found["0"].enqueued, found["0"].pending, found["0"].pending_ns) == (3, 2, 7)
    assert [found["0"].recent[n].operation for n in (1, 2, 3)] == ["all_reduce", "broadcast", "all_gather"]
    assert found["0"].recent[2] == IssuedOperation(2, "broadcast", "float32", 8, -1)
    assert (found["1"].pending, found["1"].recent[1].operation) == (0, "barrier")


def test_what_comes_before_a_complete_one_is_complete():
    """torch sees no end of the parts of a bundle."""
    bundle = [entry(1, "send 0->1", GIVEN, is_p2p=True), entry(1, "coalesced", is_p2p=True)]

    assert read(*bundle)["0"].pending == 0
    assert read(*bundle, entry(2, "recv 0<-1", GIVEN, is_p2p=True))["0"].pending == -2


@pytest.mark.parametrize(("name", "operation", "peer"), [("send 0->3", "send", 3), ("recv 0<-12", "recv", 12)])
def test_a_message_has_the_other_rank(name, operation, peer):
    found = read(entry(4, name, GIVEN, is_p2p=True))["0"]

    assert (found.pending, found.enqueued) == (-4, 0)
    assert found.recent[-4] == IssuedOperation(-4, operation, "float32", 8, peer)


class Reduced:
    def __reduce__(self):
        return exec, ("raise SystemExit('run')",)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a pickle.",
        pickle.dumps({"entries": [entry(1, "all_reduce")]})[:-20],
        pickle.dumps({"entries": 3}),
        pickle.dumps({"entries": [Reduced()]}),
        pickle.dumps([]),
    ],
)
def test_anything_else_is_not_read_and_nothing_of_it_runs(data):
    assert read_dump(data) is None


def state(begun=3, **fields):
    return GroupState("0", "0,1", 2, begun=begun, ended=begun, **fields)


def test_the_device_says_where_the_rank_stands():
    root = IssuedOperation(3, "broadcast", "float32", 8, 1)
    device = DeviceProgress(4, 3, 10**9, {n: IssuedOperation(n, "broadcast", "float32", 8) for n in (3, 4)})
    (found,) = with_device([state(recent=[root])], {"0": device}, 6 * 10**9)

    assert (found.begun, found.ended, found.pending, found.pending_s) == (4, 2, 3, 5.0)
    assert found.recent[0] == root  # torch's recorder has no root


@pytest.mark.parametrize("devices", [None, {"0": DeviceProgress(2, 2)}, {"1": DeviceProgress(9, 9)}])
def test_a_group_that_torch_counts_otherwise_is_left_as_it_is(devices):
    assert with_device([state()], devices, 0) == [state()]


def test_a_group_without_collectives_has_none_pending():
    (found,) = with_device([state(0)], {}, 0)

    assert found.pending == 0
