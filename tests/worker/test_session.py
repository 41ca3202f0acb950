"""What the worker writes down about the end of the script."""

from __future__ import annotations

import linecache
import os
import sys

import pytest
import torch.distributed
from gpuwatch.core.events.preflight_events import RankInventoryEvent
from gpuwatch.core.events.script_events import ExitCall, ScriptError, ScriptExit
from gpuwatch.core.recorder.reader import RecorderReader
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.settings import WorkerSettings
from gpuwatch.worker.session import WorkerSession


@pytest.fixture
def session(tmp_path):
    recorder = RecorderWriter(
        tmp_path / "r", rank=2, local_rank=0, world_size=4, attempt=1, log_bytes=1 << 20, segments=4
    )
    yield WorkerSession(WorkerSettings(str(tmp_path), attempt=1), recorder, 2)
    recorder.close()


def events(session) -> list:
    reader = RecorderReader(session.recorder.path)
    try:
        return [*reader.new_entries()[1], reader.state().phase]
    finally:
        reader.close()


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        return raised


def test_an_exception_is_recorded_with_its_traceback(session):
    session.raised(caught(ValueError("boom")))
    error, phase = events(session)
    assert isinstance(error, ScriptError)
    assert (error.error, error.message, error.module, error.peer_failure) == ("ValueError", "boom", None, False)
    assert (error.where.rank, error.where.attempt) == (2, 1)
    assert error.traceback.startswith("Traceback")
    assert "ValueError: boom" in error.traceback
    assert phase == "raised"


GLOO = RuntimeError(
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1234. "
    "This is typically caused by a remote worker crashing."
)
LOST = torch.distributed.DistNetworkError(
    "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"
)
LATE = torch.distributed.DistStoreError("wait timeout after 300000ms, keys: /default_pg/0//cpu//0/1")
CLOSED = RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:81] Application timeout caused pair closure")


@pytest.mark.parametrize("error", [GLOO, LOST, LATE, CLOSED])
def test_a_peer_that_went_away_is_told_apart(session, error):
    session.raised(caught(error))
    assert events(session)[0].peer_failure


@pytest.mark.parametrize(
    "error",
    [
        OSError("HTTPSConnectionPool(host='s3', port=443): Read timed out. (read timeout=60)"),
        RuntimeError("DataLoader timed out after 5 seconds"),
        ConnectionResetError(104, "Connection reset by peer"),
        BrokenPipeError(32, "Broken pipe"),
        torch.distributed.DistBackendError("NCCL error: invalid usage"),
    ],
)
def test_what_a_script_itself_waits_for_is_no_peer(session, error):
    session.raised(caught(error))
    assert not events(session)[0].peer_failure


@pytest.mark.parametrize("way", ["from", "while", "instead"])
def test_what_a_script_raises_because_a_peer_went_away_tells_no_more(session, way):
    def wraps():
        try:
            raise GLOO
        except RuntimeError as error:
            if way == "from":
                raise ArithmeticError("step 4 failed") from error
            if way == "instead":
                raise ArithmeticError("step 4 failed") from None
            raise ArithmeticError("step 4 failed")  # noqa: B904

    with pytest.raises(ArithmeticError) as raised:
        wraps()
    session.raised(raised.value)
    assert events(session)[0].peer_failure


def test_a_message_of_torchs_own_code_needs_no_name_of_a_library_in_it(session):
    code = compile("raise RuntimeError('Socket Timeout')", "/venv/torch/distributed/rendezvous.py", "exec")
    with pytest.raises(RuntimeError) as raised:
        exec(code)
    session.raised(raised.value)
    assert events(session)[0].peer_failure


def test_a_long_message_keeps_the_end_of_its_traceback(session):
    session.raised(caught(ValueError("x" * 100_000 + "END")))
    error = events(session)[0]
    assert len(error.message) <= 2000
    assert len(error.traceback) <= 16000
    assert "END" in error.traceback


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "error",
    [Unprintable(), OSError(2, "x", "\udcff"), ValueError("\ud800"), ValueError(), KeyError(None)],
    ids=["unprintable", "file name", "surrogate", "empty", "none"],
)
def test_any_exception_is_recorded_and_none_raises(session, error):
    session.raised(caught(error))
    assert isinstance(events(session)[0], ScriptError)


@pytest.mark.parametrize("code", [0, 3, -1, True, 1 << 70])
def test_any_exit_code_is_recorded_and_none_raises(session, code):
    session.finished(code)
    event, phase = events(session)
    assert isinstance(event, ScriptExit)
    assert phase == "finished"


def test_the_line_of_sys_exit_is_recorded_if_it_has_an_error_code(session):
    def gives_up(code):
        try:
            sys.exit(code)
        except SystemExit:
            session.finished(code)

    gives_up(0)
    gives_up(3)
    calls = [event for event in events(session) if isinstance(event, ExitCall)]
    assert [(call.line.file, call.line.function) for call in calls] == [(__file__, "gives_up")]
    assert linecache.getline(__file__, calls[0].line.line).strip() == "sys.exit(code)"


@pytest.mark.parametrize(
    ("said", "message"), [("loss is nan", "loss is nan"), (3, ""), (None, ""), ("x" * 9999, "x" * 2000)]
)
def test_the_text_of_sys_exit_is_recorded(session, said, message):
    try:
        raise SystemExit(said)
    except SystemExit:
        session.finished(1)
    assert [each.message for each in events(session) if isinstance(each, ScriptExit)] == [message]


def test_a_process_that_the_script_has_forked_writes_nothing(session):
    child = os.fork()
    if child == 0:
        session.finished(7)
        os._exit(0)
    os.waitpid(child, 0)
    assert events(session) == ["starting"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="such a rank may train on a GPU")
def test_a_rank_of_a_torch_without_gpus_says_its_device_without_a_preflight(session):
    session.attach_hooks()
    session.hooks.detach()
    assert [event.device for event in events(session) if isinstance(event, RankInventoryEvent)] == ["cpu"]
