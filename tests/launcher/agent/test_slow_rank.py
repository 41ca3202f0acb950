"""Looks at a slow rank: real processes that answer, recorders that say what they do, and a made clock."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from gpuwatch.core.events.rank_standing import StackLine
from gpuwatch.core.recorder.group_table import GroupField, GroupPhase
from gpuwatch.core.recorder.layout import HeadField, RankPhase, file_name
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.wire.messages import WatchSlowRank
from gpuwatch.launcher.agent.rank_watch import RankWatch
from gpuwatch.launcher.agent.slow_rank import ANSWER_S, MOST_LOOKS, LineCounts, SlowRankWatch, own_line

from ...waiting import until

SCRIPT = """
import sys, time
from pathlib import Path
from gpuwatch.worker.answers import answer_with_stacks
answer_with_stacks(Path(sys.argv[1]), 1, 0)
def load_batch():
    print("loading", flush=True)
    began = time.monotonic()
    time.sleep(float(sys.argv[2]))
    print(time.monotonic() - began, flush=True)
load_batch()
"""
SLOW = WatchSlowRank(0, 1)


class Node:
    """Rank 1 is a process that loads data; rank 0 is its neighbour, of which only the recorder is there."""

    def __init__(self, folder, seconds):
        script = folder / "train.py"
        script.write_text(SCRIPT)
        command = [sys.executable, str(script), str(folder), str(seconds)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "loading\n"
        paths = [folder / file_name(rank, 0) for rank in (0, 1)]
        self.writers = [
            RecorderWriter(path, rank=rank, local_rank=rank, world_size=2, attempt=0) for rank, path in enumerate(paths)
        ]
        self.is_at(0, RankPhase.BACKWARD, step=3)
        self.is_at(1, RankPhase.SCRIPT, step=3)
        self.watches = [RankWatch(folder, rank, 0, self.process.pid, []) for rank in (0, 1)]
        for watch in self.watches:
            watch.poll(0.0)
        self.slow = SlowRankWatch(folder)
        self.now = 100.0
        self.told = []

    def is_at(self, rank, phase, step):
        self.writers[rank].fields[HeadField.PHASE] = phase
        self.writers[rank].fields[HeadField.STEP] = step

    @property
    def size(self):
        """Bytes that the process has answered."""
        (file,) = self.watches[1]._path.parent.glob("*.stack")
        return file.stat().st_size

    def looks(self):
        """One turn that may begin a look, and one that takes its answer; whether the process was asked."""
        before, began = self.size, self.slow._left
        self.told += self.slow.turn(self.watches, self.now)
        asked = self.slow._left < began
        if asked:
            until(lambda: self.size > before, "the answer")
        self.now += ANSWER_S + 0.01
        self.told += self.slow.turn(self.watches, self.now)
        return asked

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        for each in (*self.watches, *self.writers):
            each.close()


@pytest.fixture
def node(tmp_path, request):
    made = Node(tmp_path, getattr(request, "param", 1000))
    yield made
    made.close()


def test_nobody_is_looked_at_where_none_is_slow(node):
    assert not node.looks()
    node.slow.ask(WatchSlowRank(0))
    assert not node.looks()
    node.slow.ask(WatchSlowRank(0, 7))
    assert not node.looks(), "it is another node's"
    assert node.size == 0


def test_its_line_is_counted(node):
    node.slow.ask(SLOW)
    for _ in range(10):
        assert node.looks()
        node.now += 2
    (told,) = node.told
    assert (told.where.rank, told.where.step, told.looks) == (1, 3, 10)
    # it may be asked just as one sleep has ended and the next has not begun
    seen = max(told.lines, key=lambda line: line.count)
    assert (seen.line.function, seen.line.text) == ("load_batch", "time.sleep(float(sys.argv[2]))"), told.lines
    assert sum(line.count for line in told.lines) == 10
    assert seen.line.file.endswith("/train.py")
    assert list(node.slow.told(node.watches[1])) == []
    node.looks()
    (told,) = node.slow.told(node.watches[1])
    assert told.looks == 11


def test_it_is_not_looked_at_while_it_waits_or_does_not_train(node):
    node.slow.ask(SLOW)
    node.is_at(1, RankPhase.PREFLIGHT, step=0)
    assert not node.looks()
    node.is_at(1, RankPhase.FORWARD, step=3)
    fields, field = node.writers[1].groups, GroupField
    fields[field.USED], fields[field.STATE] = 1, GroupPhase.WAITING
    assert not node.looks()
    fields[field.STATE] = GroupPhase.NONE
    assert node.looks()


def test_it_is_asked_once_a_second_at_most_and_so_often_in_all(node):
    node.slow.ask(SLOW)
    assert node.looks()
    node.now += 0.3
    assert not node.looks()
    asked = 1
    for _ in range(2 * MOST_LOOKS):
        node.now += 2
        asked += node.looks()
    assert asked == MOST_LOOKS


@pytest.mark.slow
@pytest.mark.parametrize("node", [2], indirect=True)
def test_a_look_does_not_shorten_a_sleep_of_the_script(node):
    node.slow.ask(SLOW)
    for _ in range(5):
        assert node.looks()
        node.now += 2
    assert float(node.process.stdout.readline()) >= 2


@pytest.mark.parametrize("node", [0], indirect=True)
def test_a_process_that_has_ended_is_not_signalled(node):
    node.process.wait()
    node.slow.ask(SLOW)
    node.told += node.slow.turn(node.watches, time.monotonic())
    assert node.told == []


def line(file, number, function):
    return StackLine(file, number, function)


LOADER = line("/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", 1, "__next__")
POLL = line("/usr/lib/python3.11/selectors.py", 5, "select")
MINE = line("/me/train.py", 33, "main")


def test_the_line_is_the_innermost_of_the_scripts_own_with_what_it_calls():
    assert own_line([POLL, LOADER, MINE, line("/me/start.py", 1, "<module>")]) == (MINE, "__next__ of dataloader.py")
    assert own_line([MINE]) == (MINE, "")
    call = line("/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", 7, "_call_impl")
    linear = line("/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", 9, "forward")
    assert own_line([linear, call, MINE]) == (MINE, "forward of linear.py"), "every call of a module goes through it"
    hook = line("/gpuwatch/worker/hooks/data_loaders.py", 7, "__next__")
    assert own_line([POLL, LOADER, hook, MINE]) == (MINE, "__next__ of dataloader.py")
    assert own_line([POLL, LOADER]) == (None, "")


def test_lines_are_counted_with_what_they_call_most_often():
    counts = LineCounts()
    for stack in ([POLL, LOADER, MINE], [LOADER, MINE], [MINE], [line("/me/train.py", 40, "main")], [POLL]):
        counts.add(stack)
    assert counts.looks == 5
    assert [(each.line.line, each.count, each.calls) for each in counts.lines(8)] == [
        (33, 3, "__next__ of dataloader.py"),
        (40, 1, ""),
    ]
    assert len(counts.lines(1)) == 1
