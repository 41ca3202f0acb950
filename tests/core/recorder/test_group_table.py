"""The text of a group's members, and any bytes in the table."""

from __future__ import annotations

import struct

import pytest
from gpuwatch.core.events.rank_standing import IssuedOperation
from gpuwatch.core.recorder.group_table import (
    MEMBERS_BYTES,
    GroupField,
    GroupPhase,
    members_of,
    members_text,
    read_groups,
    what_of,
    widened,
)
from gpuwatch.core.recorder.layout import EARLIER_GROUP_BYTES, EARLIER_GROUPS, GROUP_BYTES, GROUPS
from hypothesis import given
from hypothesis import strategies as st


@given(st.sets(st.integers(0, 200), max_size=40))
def test_members_come_back_or_are_unknown(ranks):
    text = members_text(sorted(ranks))
    assert members_of(text) == (sorted(ranks) if text else [])
    assert text or not ranks or len(ranks) > 8


def test_groups_of_a_large_job_are_short():
    assert members_text(list(range(4096))) == "0-4095"
    assert members_text(list(range(3, 4096, 8))) == "3-4091:8"
    assert len(members_text(list(range(0, 4096, 7)))) < MEMBERS_BYTES


@given(st.text(alphabet="0123456789-,: x", max_size=MEMBERS_BYTES))
def test_no_text_of_members_does_harm(text):
    assert len(members_of(text, 1000)) <= 1000


@given(st.binary(min_size=GROUP_BYTES, max_size=GROUP_BYTES))
def test_any_bytes_can_be_read(data):
    used = (1).to_bytes(8, "little") + data[8:]
    assert len(read_groups(used + bytes(GROUP_BYTES * (GROUPS - 1)), 1 << 62)) == 1


@pytest.mark.parametrize(
    ("phase", "timeout_ms", "expected_s"),
    [
        *((phase, 600_000, 600.0) for phase in GroupPhase),
        (GroupPhase.WAITING, -600_000, 600.0),
        (GroupPhase.ISSUED, -600_000, 600.0),
        (GroupPhase.ISSUING, -600_000, 0.0),
        (GroupPhase.ON_DEVICE, -600_000, 0.0),
        (GroupPhase.WAITING, 0, 0.0),
    ],
)
def test_a_timeout_may_end_the_wait_of_a_work_alone(phase, timeout_ms, expected_s):
    fields = {GroupField.USED: 1, GroupField.STATE: phase, GroupField.TIMEOUT_MS: timeout_ms}
    slot = struct.pack("<16q", *(fields.get(field, 0) for field in range(16))).ljust(GROUP_BYTES, b"\0")
    (group,) = read_groups(slot + bytes(GROUP_BYTES * (GROUPS - 1)), 1 << 62)
    assert group.timeout_s == expected_s


def test_the_table_of_an_earlier_version_is_read():
    """Its operations are of 32 bytes at 128, the last ones not used; its group's name is at 384."""
    fields = {GroupField.USED: 1, GroupField.BEGUN: 9, GroupField.SIZE: 2}
    slot = struct.pack("<16q", *(fields.get(field, 0) for field in range(16)))
    slot += b"".join(struct.pack("<qqqq", number, what_of(1, 1, -1), 64, 0) for number in range(2, 10))
    slot += b"dp".ljust(40, b"\0") + b"0,1".ljust(88, b"\0")
    table = bytes(EARLIER_GROUP_BYTES * (EARLIER_GROUPS - 1)) + slot
    (group,) = read_groups(widened(table), 1 << 62, 1 << 62)
    assert (group.name, group.members, group.size, group.begun) == ("dp", "0,1", 2, 9)
    assert group.recent == [IssuedOperation(number, "all_reduce", "float32", 64) for number in range(2, 10)]
