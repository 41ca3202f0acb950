from __future__ import annotations

import stat
import subprocess

import pytest
from gpuwatch.core.errors import GpuwatchError
from gpuwatch.core.events.node_events import NodeSignal
from gpuwatch.core.wire.messages import AgentMessage, EventMessage, NodeBye, PageMessage, PageSegment, encode
from gpuwatch.core.wire.spool import SUFFIX, SpoolWriter, agent_of, keep_spools, read_spool
from hypothesis import given
from hypothesis import strategies as st

MESSAGES = [AgentMessage(n, EventMessage(NodeSignal(n)), n - 1) for n in range(1, 5)] + [
    AgentMessage(5, NodeBye("ok"), 4)
]
DATA = [encode(message) for message in MESSAGES]


def write(path, data=tuple(DATA), **options) -> SpoolWriter:
    spool = SpoolWriter(path, **options)
    for message in data:
        spool.append(message, is_page=False)
    spool.close()
    return spool


def test_a_spool_is_read_as_it_was_written_and_nobody_else_may_read_it(tmp_path):
    path = tmp_path / "a"
    assert write(path).left_out == 0
    assert read_spool(path) == MESSAGES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_can_be_read_while_it_is_written(tmp_path):
    spool = SpoolWriter(tmp_path / "a")
    assert read_spool(tmp_path / "a") == []
    for number, message in enumerate(DATA, 1):
        spool.append(message, is_page=False)
        assert read_spool(tmp_path / "a") == MESSAGES[:number]
    spool.close()


@pytest.mark.parametrize("kind", ["file", "link", "fifo"])
def test_what_is_there_already_is_not_touched(tmp_path, kind):
    path, target = tmp_path / "a", tmp_path / "target"
    target.write_text("mine")
    if kind == "file":
        path.write_text("mine")
    elif kind == "link":
        path.symlink_to(target)
    else:
        subprocess.run(["mkfifo", str(path)], check=True)
    assert write(path).left_out == len(DATA)
    assert target.read_text() == "mine"


def test_it_is_bounded_and_pages_leave_room_for_events(tmp_path):
    page = encode(AgentMessage(1, PageMessage(0, 0, 0, 0, 0, 0, True, [PageSegment(0, 0, 0, b"x" * 900, b"", b"")])))
    spool = SpoolWriter(tmp_path / "a", max_bytes=4000)
    for _ in range(10):
        spool.append(page, is_page=True)
    for message in DATA:
        spool.append(message, is_page=False)
    spool.close()
    found = read_spool(tmp_path / "a")
    assert (spool.left_out, found[-len(MESSAGES) :]) == (10 - (len(found) - len(MESSAGES)), MESSAGES)
    assert (tmp_path / "a").stat().st_size <= 4000


def test_on_a_full_disk_what_was_written_is_whole(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("cannot mount a small file system here: not root, or in a container without the right to")
    try:
        spool = SpoolWriter(folder / "a")
        big = encode(AgentMessage(9, NodeBye("x" * 10_000)))
        for message in [*DATA, big, big, big, *DATA]:
            spool.append(message, is_page=False)
        spool.close()
        found = [message for message in read_spool(folder / "a") if message.n != 9]
        assert spool.left_out >= 2
        assert found[: len(MESSAGES)] == MESSAGES
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


# -- what stays of them -------------------------------------------------------------------------------------------


def test_the_spools_of_all_agents_of_a_launch_are_kept_as_one_private_file(tmp_path):
    write(tmp_path / "n.0", DATA[:2])
    write(tmp_path / "n.1", DATA[2:4])
    kept = keep_spools([tmp_path / "n.0", tmp_path / "n.1"], tmp_path / "new folder", "abcdef0123", DATA[4:])
    assert kept == tmp_path / "new folder" / f"agent-abcdef01{SUFFIX}"
    assert read_spool(kept) == MESSAGES
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_nothing_to_keep_is_no_file_and_nowhere_to_keep_it_no_error(tmp_path):
    assert keep_spools([], tmp_path / "runs", "a", []) is None
    (tmp_path / "file").write_text("in the way")
    assert keep_spools([], tmp_path / "file", "a", DATA) is None
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_without_a_hello_the_file_names_the_agent(tmp_path):
    assert agent_of(MESSAGES, tmp_path / f"agent-abc{SUFFIX}") == "abc"


# -- any bytes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "a"
    write(path)
    return path.read_bytes()


def test_a_spool_that_was_cut_gives_its_whole_messages(whole, tmp_path):
    path = tmp_path / "a"
    for size in range(0, len(whole), 3):
        path.write_bytes(whole[:size])
        found = read_spool(path)
        assert found == MESSAGES[: len(found)]
    assert len(found) >= len(MESSAGES) - 1


@pytest.mark.parametrize("content", [b"#!/usr/bin/env python\n" * 9, b"\x04\0\0\0nope", b"\xff" * 40])
def test_another_kind_of_file_is_told_in_a_sentence(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(GpuwatchError, match="found something else in"):
        read_spool(tmp_path / "x")


def test_a_file_that_cannot_be_read_is_told_in_a_sentence(tmp_path):
    with pytest.raises(GpuwatchError, match="cannot be read"):
        read_spool(tmp_path)


@given(st.integers(17, 400), st.binary(min_size=1, max_size=40))
def test_whatever_is_damaged_the_messages_before_and_behind_it_are_read(whole, tmp_path_factory, at, new):
    path = tmp_path_factory.getbasetemp() / f"damaged{SUFFIX}"
    at = min(at, len(whole) - 1)
    data = whole[:at] + new + whole[at + len(new) :]
    path.write_bytes(data)
    found = read_spool(path)
    damaged = range(at, at + len(new))
    position = 17
    for message, encoded in zip(MESSAGES, DATA, strict=True):
        place = range(position, position + 8 + len(encoded))
        if not set(place) & set(damaged) and data[place.start : place.stop] == whole[place.start : place.stop]:
            assert message in found
        position = place.stop


@given(st.binary(max_size=2000))
def test_any_bytes_behind_the_beginning(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / f"any{SUFFIX}"
    path.write_bytes(b"gpuwatch spool 1\n" + data)
    read_spool(path)


def test_many_false_beginnings_do_not_take_long(tmp_path):
    """Each says that a large message follows."""
    false = (1 << 20).to_bytes(4, "little") + b"\0\0\0\0\x83\xa1n"
    (tmp_path / "a").write_bytes(b"gpuwatch spool 1\n" + false * 200_000)
    assert read_spool(tmp_path / "a") == []
