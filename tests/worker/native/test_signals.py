"""The note of a signal changes nothing for the script's handler: worker/native/signals.c."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gpuwatch.core.events.rank_standing import HeardSignal
from gpuwatch.core.recorder.heard_signals import ENTRY, HEARD, HEARD_AT, HEARD_BYTES, read_heard

from ...waiting import until

signals = pytest.importorskip("gpuwatch.worker.native.signals", reason="signals.c was not built")
BATCH_AT = 8
TERM = HEARD.index(signal.SIGTERM)


class NotedSignals:
    """A table in this process, and a handler of SIGTERM that notes what it was called with."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.memory[BATCH_AT : BATCH_AT + 8] = (6).to_bytes(8, "little")
        signals.note_in(self.memory, HEARD_AT, len(HEARD), BATCH_AT, 0)
        self.calls: list[int] = []

    def handle(self, number, frame):
        self.calls.append(number)

    def wait_for(self, calls: int) -> None:
        """Linux may give the signal to any thread, and Python runs the handler in this one after that."""
        until(lambda: len(self.calls) == calls, f"{calls} calls of the handler")

    @property
    def heard(self) -> list[HeardSignal]:
        return read_heard(self.memory[HEARD_AT : HEARD_AT + HEARD_BYTES])


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@contextmanager
def sender() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is not this one: it sends SIGTERM once it reads a line."""
    command = ["sh", "-c", f"read go && exec kill -TERM {os.getpid()}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        yield child


def go(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    os.write(child.stdin.fileno(), b"go\n")


def from_outside(noted: NotedSignals) -> int:
    """Another process sends SIGTERM, and the handler was called. Returns its id."""
    before = len(noted.calls)
    with sender() as child:
        go(child)
        noted.wait_for(before + 1)
    return child.pid


def is_caught(number: int) -> bool:
    """Whether Linux has a handler of this process for it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
    return bool(caught >> (number - 1) & 1)


def test_the_handler_is_called_as_it_is_without_a_note():
    noted = NotedSignals()
    signal.signal(signal.SIGTERM, noted.handle)
    assert signals.stand_before(signal.SIGTERM, TERM) is True
    assert signals.stand_before(signal.SIGTERM, TERM) is True  # and not before itself

    before_ns, pid, after_ns = time.time_ns(), from_outside(noted), time.time_ns()
    assert noted.calls == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == noted.handle
    (heard,) = noted.heard
    assert (heard.number, heard.batch, heard.sender, heard.parent_ns) == (signal.SIGTERM, 6, pid, 0)
    assert before_ns <= heard.time_ns <= after_ns


def test_the_first_one_stays():
    noted = NotedSignals()
    signal.signal(signal.SIGTERM, noted.handle)
    signals.stand_before(signal.SIGTERM, TERM)
    from_outside(noted)
    first = noted.heard
    from_outside(noted)

    assert noted.heard == first
    assert len(noted.calls) == 2


def test_what_a_handler_raises_is_the_scripts():
    class PreemptedError(Exception):
        pass

    def handle(number, frame):
        raise PreemptedError

    noted = NotedSignals()
    signal.signal(signal.SIGTERM, handle)
    signals.stand_before(signal.SIGTERM, TERM)
    with sender() as child, pytest.raises(PreemptedError):
        go(child)
        until(lambda: False, "what the handler raises")
    assert [heard.number for heard in noted.heard] == [signal.SIGTERM]


def test_a_signal_of_the_ranks_own_is_not_noted():
    noted = NotedSignals()
    signal.signal(signal.SIGTERM, noted.handle)
    signals.stand_before(signal.SIGTERM, TERM)
    signal.raise_signal(signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    noted.wait_for(2)

    assert noted.heard == []


def test_what_its_parent_sends_is_told_apart():
    """torchrun stops its ranks so, when another one has failed."""
    noted = NotedSignals()
    signal.signal(signal.SIGTERM, noted.handle)
    signals.stand_before(signal.SIGTERM, TERM)
    with sender() as parent:
        signals.note_in(noted.memory, HEARD_AT, len(HEARD), BATCH_AT, parent.pid)
        go(parent)
        noted.wait_for(1)

    (heard,) = noted.heard
    assert (heard.time_ns, heard.sender) == (0, 0)
    assert heard.parent_ns > 0


def test_a_fork_writes_nothing_into_its_parents_recorder():
    noted = NotedSignals()
    signal.signal(signal.SIGTERM, noted.handle)
    signals.stand_before(signal.SIGTERM, TERM)
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.write(writes, b"!")
        while not noted.calls:
            pass
        os._exit(7)
    os.read(reads, 1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    os.close(reads)
    os.close(writes)

    assert os.waitstatus_to_exitcode(status) == 7, "the fork's handler was called"
    assert noted.heard == []


@pytest.mark.parametrize("left", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_signal_at_its_default_stays_there(left):
    noted = NotedSignals()
    signal.signal(signal.SIGTERM, noted.handle)
    signals.stand_before(signal.SIGTERM, TERM)
    signal.signal(signal.SIGTERM, left)

    assert signals.stand_before(signal.SIGTERM, TERM) is False
    assert not is_caught(signal.SIGTERM)


def test_the_flags_of_the_handler_stay():
    """siginterrupt(3): whether a system call that the signal interrupts is begun again."""
    noted = NotedSignals()
    signal.signal(signal.SIGTERM, noted.handle)
    signal.siginterrupt(signal.SIGTERM, False)
    signals.stand_before(signal.SIGTERM, TERM)
    signal.siginterrupt(signal.SIGTERM, True)
    from_outside(noted)

    assert len(noted.calls) == len(noted.heard) == 1


@pytest.mark.parametrize("places", [(-8, 6, 8), (0, 66, 8), (4, 6, 8), (0, 6, 4096), (4088, 6, 8)])
def test_places_outside_of_the_memory_are_refused(places):
    at, count, batch_at = places
    with pytest.raises(ValueError, match="within the buffer"):
        signals.note_in(mmap.mmap(-1, 4096), at, count, batch_at, 0)


def test_any_bytes_are_read_without_harm():
    assert read_heard(bytes(HEARD_BYTES)) == []
    assert read_heard(b"\xff" * HEARD_BYTES) == []
    assert read_heard(b"\x7f" * HEARD_BYTES) == []
    assert read_heard(ENTRY.pack(-1, 0, 0, 5) + bytes(HEARD_BYTES - ENTRY.size)) == [
        HeardSignal(int(HEARD[0]), batch=0, parent_ns=5)
    ]
