"""The text of a group's members, and any bytes in the table."""

from __future__ import annotations

from gpuwatch.core.recorder.group_table import MEMBERS_BYTES, members_of, members_text, read_groups
from gpuwatch.core.recorder.layout import GROUP_BYTES, GROUPS
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
