from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from gpuwatch.core.codes import VerdictKind
from gpuwatch.core.text import from_json
from gpuwatch.core.wire import pipe
from gpuwatch.core.wire.messages import AgentHello, StopRanks

AGENT_CONFIG = pipe.AgentConfig(
    "tcp://h:1",
    "s",
    "p",
    "k",
    "/dev/shm/x",
    "runs",
    AgentHello(
        "", "", 2, 1, 4, ["gpuwatch", "launch", "a b"], {"python": "3"}, "id", trace_batches=[0, 3], check_only=True
    ),
)
COLLECTOR_CONFIG = pipe.CollectorConfig("tcp://*:1", "p", "k", "a", "v", "runs", "id", 5)
TO_AGENT = [
    AGENT_CONFIG,
    pipe.WorkersStarted(1, {4: 101, 5: 102}),
    pipe.WorkersEnded(1, {4: -9, 5: None}, [4]),
    pipe.LaunchDone("signal", 15),
]
FROM_AGENT = [
    pipe.UserNotice("one\nsentence"),
    StopRanks("why"),
    pipe.JobResult(4, VerdictKind.OVERFLOW, "té\nxt", "r.json"),
    pipe.VerdictWait(),
    pipe.NodeWelcomed("20261122-1"),
    pipe.ConnectionHanded(),
]
FROM_COLLECTOR = [
    pipe.CollectorBound("tcp://0.0.0.0:1", "runs/x"),
    pipe.CannotBind(True, "in use"),
    pipe.UserNotice("n"),
    pipe.StageLine("node group", 3, 4, "warn", 1.5),
    pipe.PreflightOver("warn", "one line", ["a", "b\nc"]),
]


def through_a_pipe(message) -> bytes:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as source:
        with os.fdopen(writing, "wb") as sink:
            assert pipe.write_line(sink, message)
        return source.read()


@pytest.mark.parametrize(
    ("kind", "message"),
    [(pipe.ToAgent, m) for m in TO_AGENT]
    + [(pipe.FromAgent, m) for m in FROM_AGENT]
    + [(pipe.FromCollector, m) for m in FROM_COLLECTOR],
    ids=lambda part: type(part).__name__,
)
def test_a_message_is_one_line_and_arrives_unchanged(kind, message):
    data = through_a_pipe(message)
    assert data.count(b"\n") == 1
    assert data.endswith(b"\n")
    assert from_json(data, kind) == message


def test_the_samples_hold_every_message():
    assert {type(m) for m in TO_AGENT} == set(get_args(pipe.ToAgent))
    assert {type(m) for m in FROM_AGENT} == set(get_args(pipe.FromAgent))
    assert {type(m) for m in FROM_COLLECTOR} == set(get_args(pipe.FromCollector))


@pytest.mark.parametrize("line", [b"", b"\n", b"hello\n", b"{}\n", b'{"type":"nope"}\n', b'{"type":"done"}\n'])
def test_another_line_is_a_decode_error(line):
    for kind in (pipe.ToAgent, pipe.FromAgent, pipe.FromCollector):
        with pytest.raises(msgspec.DecodeError):
            from_json(line, kind)


def test_a_reader_that_is_gone_is_false():
    reading, writing = os.pipe()
    os.close(reading)
    sink = os.fdopen(writing, "wb", buffering=0)
    assert not pipe.write_line(sink, pipe.UserNotice("x"))
    sink.close()
    assert not pipe.write_line(sink, pipe.UserNotice("x"))


def test_a_pipe_that_fails_is_false():
    with Path("/dev/full").open("wb", buffering=0) as sink:
        assert not pipe.write_line(sink, pipe.UserNotice("x"))


def test_what_a_pipe_did_not_take_goes_out_before_the_next_message():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    room = 0
    while True:  # until it is full
        try:
            room += os.write(writing, b"x" * 4096)
        except BlockingIOError:
            break
    with os.fdopen(writing, "wb") as sink:
        assert not pipe.write_line(sink, pipe.UserNotice("first"))
        assert len(os.read(reading, room)) == room
        assert pipe.write_line(sink, pipe.UserNotice("second"))
    with os.fdopen(reading, "rb") as source:
        assert [from_json(line, pipe.FromAgent).text for line in source] == ["first", "second"]


@pytest.mark.parametrize("config", [AGENT_CONFIG, COLLECTOR_CONFIG], ids=lambda c: type(c).__name__)
def test_the_config_is_read_and_not_a_byte_of_the_next_line(config):
    reading, writing = os.pipe()
    os.write(writing, msgspec.json.encode(config) + b"\nrest")
    os.close(writing)
    assert pipe.read_config(reading, type(config)) == config
    assert os.read(reading, 100) == b"rest"
    os.close(reading)


@pytest.mark.slow
def test_the_config_of_a_command_line_of_2_mb_is_read():
    """It took minutes: each byte copied all before it."""
    hello = msgspec.structs.replace(AGENT_CONFIG.hello, command=["x" * 100] * 20_000)
    config = msgspec.structs.replace(AGENT_CONFIG, hello=hello)
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as sink:
        telling = threading.Thread(target=pipe.write_line, args=(sink, config))
        telling.start()
        assert pipe.read_config(reading, pipe.AgentConfig) == config
        telling.join()
    os.close(reading)


@pytest.mark.parametrize("written", [b"", b'{"type":"config"'])
def test_a_launch_that_died_before_its_config_is_none(written):
    reading, writing = os.pipe()
    os.write(writing, written)
    os.close(writing)
    assert pipe.read_config(reading, pipe.AgentConfig) is None
    os.close(reading)
