"""The kernel's counter of processes that it has ended for lack of memory. Samples of real files."""

from __future__ import annotations

import pytest
from gpuwatch.launcher.agent.host_figures import memory_kills

EVENTS = "low 0\nhigh 0\nmax 12\noom 1\noom_kill 2\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"


def put(root, path, text):
    (root / path).parent.mkdir(parents=True)
    (root / path).write_text(text)


def test_version_2(tmp_path):
    put(tmp_path, "user.slice/job/memory.events", EVENTS)
    assert memory_kills("0::/user.slice/job\n", tmp_path) == 2


def test_version_1_beside_an_empty_version_2(tmp_path):
    put(tmp_path, "memory/job/memory.oom_control", CONTROL)
    assert memory_kills("4:cpu:/\n3:memory,hugetlb:/job\n0::/\n", tmp_path) == 3


@pytest.mark.parametrize("text", ["", "oom_kill\n", "oom_kill many\n"])
def test_what_cannot_be_read_is_unknown(tmp_path, text):
    put(tmp_path, "job/memory.events", text)
    assert memory_kills("0::/job\n", tmp_path) is None
    assert memory_kills("", tmp_path) is None
    assert memory_kills("x\n:::\n", tmp_path) is None
