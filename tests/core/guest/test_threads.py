from __future__ import annotations

import _thread
import threading

import pytest
from gpuwatch.core.guest import threads
from gpuwatch.core.guest.threads import AwaitedThread, OneThread, start_thread


def refuse(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_a_thread_runs_what_it_is_given():
    ran = threading.Event()
    assert start_thread(ran.set)
    assert ran.wait(60)


def test_a_limit_on_threads_is_told(monkeypatch):
    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    assert not start_thread(lambda: pytest.fail("it ran"))


def test_a_thread_that_begins_after_it_was_given_up_does_nothing(monkeypatch):
    late = []
    monkeypatch.setattr(_thread, "start_new_thread", lambda run, _: late.append(run))
    assert not start_thread(lambda: pytest.fail("it ran"), begins_s=0.01)
    late[0]()


def test_one_thing_is_done_after_another_in_one_other_thread():
    one = OneThread()
    futures = [one.submit(lambda n=n: (n, threading.get_ident())) for n in range(20)]
    done = [future.result(60) for future in futures]
    one.close()
    assert [n for n, _ in done] == list(range(20))
    ((other),) = {thread for _, thread in done}
    assert other != threading.get_ident()


def test_what_it_raises_is_in_the_future_and_the_next_thing_is_done():
    one = OneThread()
    assert isinstance(one.submit(lambda: [][0]).exception(60), IndexError)
    assert one.submit(lambda: 5).result(60) == 5
    one.close()


def test_without_a_thread_it_is_done_by_whoever_asks(monkeypatch):
    monkeypatch.setattr(threads._thread, "start_new_thread", refuse)
    one = OneThread()
    assert one.submit(threading.get_ident).result(0) == threading.get_ident()
    assert isinstance(one.submit(lambda: [][0]).exception(0), IndexError)
    one.close()


def test_an_awaited_thread_ends_in_time_or_not():
    go, ran = threading.Event(), []
    thread = AwaitedThread(lambda: ran.append(go.wait()), "helper")
    assert thread.ends_within(0)  # it was not begun
    thread.begin()
    assert not thread.ends_within(0)
    go.set()
    assert thread.ends_within(60)
    assert ran == [True]
    assert thread.refused is None


def test_an_awaited_thread_that_is_given_up_before_it_begins_does_nothing():
    thread = AwaitedThread(lambda: pytest.fail("it ran"), "helper")
    thread.give_up()
    thread.begin()
    assert thread.ends_within(60)


@pytest.mark.parametrize("where", ["_thread", "threading"])
def test_a_limit_on_threads_ends_an_awaited_thread(monkeypatch, where):
    """The first of the two threads that it takes, or the second one."""
    name = "_start_new_thread" if where == "threading" else "start_new_thread"
    monkeypatch.setattr(_thread if where == "_thread" else threading, name, refuse)
    thread = AwaitedThread(lambda: pytest.fail("it ran"), "helper")
    thread.begin()
    assert thread.ends_within(60)
    assert str(thread.refused) == "can't start new thread"
