"""A launch hears signals before torchrun does; and a torchrun that does not see its ranks end is left."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest
from gpuwatch.launcher import signals as module
from gpuwatch.launcher.signals import TimeLimitNear, signals_raise, watch_torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException

# What a launch hears before torchrun has its own handlers.


EARLY = [
    (signal.SIGINT, KeyboardInterrupt),
    (signal.SIGTERM, SignalException),
    (signal.SIGHUP, SignalException),
    (signal.SIGUSR2, TimeLimitNear),
]


def send(number):
    os.kill(os.getpid(), number)


@pytest.fixture
def ignored():
    """As in what a script starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "error"), EARLY)
def test_it_raises(number, error):
    with pytest.raises(error), signals_raise():
        send(number)


def test_an_interrupt_is_heard_where_it_was_ignored_before(ignored):
    with pytest.raises(KeyboardInterrupt), signals_raise():
        send(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "as before"


@pytest.mark.parametrize(("number", "error"), EARLY)
def test_what_is_held_is_raised_at_the_end(number, error):
    seen = []
    with pytest.raises(error), signals_raise() as signals:
        with signals.held():
            send(number)
            seen.append("all children are started")
        seen.append("not reached")
    assert seen == ["all children are started"]


def test_the_second_one_does_not_wait():
    with pytest.raises(SignalException), signals_raise() as signals, signals.held():
        send(signal.SIGINT)
        send(signal.SIGTERM)
        pytest.fail("not reached")


def test_an_error_comes_before_what_is_held():
    with pytest.raises(ValueError), signals_raise() as signals, signals.held():
        send(signal.SIGINT)
        raise ValueError
    with signals_raise() as signals, signals.held():
        pass


def test_while_the_main_thread_is_in_c_another_one_is_told(monkeypatch):
    """A mutex that this thread has: pthread_mutex_lock(3) goes on waiting after a signal."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.1)
    libc, mutex, told = ctypes.CDLL(None), ctypes.create_string_buffer(64), []

    def unheard(number):
        told.append(number)
        libc.pthread_mutex_unlock(mutex)

    with pytest.raises(SignalException), signals_raise() as signals:
        signals.unheard = unheard
        libc.pthread_mutex_lock(mutex)
        timer = threading.Timer(0.1, send, [signal.SIGTERM])
        timer.start()
        libc.pthread_mutex_lock(mutex)
        pytest.fail("not reached")
    timer.join()
    assert told == [signal.SIGTERM]


def test_what_is_heard_in_time_is_not_told():
    told = []
    with pytest.raises(SignalException), signals_raise() as signals:
        signals.unheard = told.append
        send(signal.SIGTERM)
    for thread in threading.enumerate():
        if thread.name == "gpuwatch-signals":
            thread.join()
    assert told == []


# A torchrun that does not see its ranks end is left; one that still has a rank running is not.


@pytest.mark.slow
def test_it_is_left_once_the_last_rank_has_ended():
    waits = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    ranks = [psutil.Process(process.pid) for process in waits]
    left = threading.Event()
    looked = threading.Event()

    def unseen():
        looked.set()
        return ranks

    watch_torchrun(unseen, left.set, 1.0)
    waits[0].communicate(b"\n")
    for _ in range(2):
        looked.clear()
        assert looked.wait(300)
    assert not left.is_set()

    waits[1].stdin.write(b"\n")
    waits[1].stdin.close()  # nobody waits for it: a zombie, as torchrun's children are
    assert left.wait(300)
    waits[1].wait()
