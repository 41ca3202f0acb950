"""Which of several addresses is that of the job's own collector."""

from contextlib import ExitStack

import pytest
import zmq
from gpuwatch.launcher.head_collector import first_that_answers

from ..known_keys import KEYS, STRANGER

ASKED = (KEYS.collector.public.decode(), KEYS.agent.public.decode(), KEYS.agent.private.decode())


@pytest.fixture
def listen():
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())

        def begin(keys):
            socket = stack.enter_context(context.socket(zmq.ROUTER))
            socket.linger = 0
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = keys.collector
            socket.bind("tcp://127.0.0.1:*")
            return socket.getsockopt_string(zmq.LAST_ENDPOINT)

        yield begin


def test_it_is_the_one_that_has_the_key(listen):
    another, ours = listen(STRANGER), listen(KEYS)
    assert first_that_answers(["tcp://127.0.0.1:1", another, ours], *ASKED) == ours


def test_there_may_be_none(listen, monkeypatch):
    monkeypatch.setattr("gpuwatch.launcher.head_collector._PATIENCE_MS", 300)
    assert first_that_answers([listen(STRANGER), "tcp://127.0.0.1:1"], *ASKED) is None
