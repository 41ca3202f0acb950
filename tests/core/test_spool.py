from __future__ import annotations

import pytest
from gpuwatch.core.errors import GpuwatchError
from gpuwatch.core.messages import AgentMessage, Bye, EventMessage, encode
from gpuwatch.core.records import NodeSignal
from gpuwatch.core.spool import SUFFIX, read_spool, write_spool

MESSAGES = [AgentMessage(n, EventMessage(NodeSignal(n)), n - 1) for n in range(1, 5)] + [AgentMessage(5, Bye("ok"), 4)]
DATA = [encode(message) for message in MESSAGES]


def test_a_spool_is_read_as_it_was_written(tmp_path):
    path = write_spool(tmp_path / "new folder", "abcdef0123456789", DATA)
    assert path is not None
    assert path.name == f"agent-abcdef01{SUFFIX}"
    assert read_spool(path) == MESSAGES


def test_nothing_left_to_send_is_no_file(tmp_path):
    assert write_spool(tmp_path, "a", []) is None
    assert list(tmp_path.iterdir()) == []


def test_nowhere_to_write_is_none_and_no_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert write_spool(tmp_path / "file", "a", DATA) is None


def test_a_spool_is_never_overwritten(tmp_path):
    first = write_spool(tmp_path, "a", DATA)
    assert first is not None
    assert write_spool(tmp_path, "a", DATA[:1]) is None
    assert read_spool(first) == MESSAGES


@pytest.mark.parametrize("missing", range(1, 12))
def test_a_spool_that_was_cut_gives_its_complete_messages(tmp_path, missing):
    path = write_spool(tmp_path, "a", DATA)
    assert path is not None
    whole = path.read_bytes()
    path.write_bytes(whole[:-missing])
    assert read_spool(path) == MESSAGES[:-1]


@pytest.mark.parametrize("content", [b"#!/usr/bin/env python\n" * 9, b"\x04\0\0\0nope", b"\xff" * 40])
def test_another_kind_of_file_is_told_in_a_sentence(tmp_path, content):
    path = tmp_path / f"x{SUFFIX}"
    path.write_bytes(content)
    with pytest.raises(GpuwatchError):
        read_spool(path)


def test_an_empty_spool_has_no_messages(tmp_path):
    path = tmp_path / f"x{SUFFIX}"
    path.touch()
    assert read_spool(path) == []
