"""A rank's memory cgroup, and what the kernel did in it. Samples of real files."""

from __future__ import annotations

import pytest
from gpuwatch.launcher.agent.memory_group import MemoryGroup, MemoryLack, MemoryWatch

EVENTS = "low 0\nhigh 0\nmax 12\noom 1\noom_kill 2\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
V1_NONE = "9223372036854771712\n"


def put(root, **files):
    """`job__memory_DOT_max` is job/memory.max."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_version_2(tmp_path):
    put(tmp_path, job__step__memory_DOT_events=EVENTS, job__step__memory_DOT_max="max\n")
    put(tmp_path, job__memory_DOT_max="1000\n", job__memory_DOT_peak="999\n", memory_DOT_max="5000\n")
    group = MemoryGroup.of("0::/job/step\n", tmp_path)
    assert group is not None
    assert (group.kills(), group.limit()) == (2, (1000, tmp_path / "job"))
    assert (group.peak(tmp_path / "job"), group.peak(tmp_path)) == (999, 0)


def test_version_1_beside_an_empty_version_2(tmp_path):
    put(tmp_path, memory__job__memory_DOT_oom_control=CONTROL, memory__job__memory_DOT_limit_in_bytes="700\n")
    put(tmp_path, memory__memory_DOT_limit_in_bytes=V1_NONE, memory__job__memory_DOT_max_usage_in_bytes="700\n")
    put(tmp_path, memory__job__memory_DOT_usage_in_bytes="650\n")
    put(tmp_path, memory__job__memory_DOT_stat="active_file 1\ntotal_active_file 30\ntotal_inactive_file 20\n")
    group = MemoryGroup.of("4:cpu:/\n3:memory,hugetlb:/job\n0::/\n", tmp_path)
    assert group is not None
    folder = tmp_path / "memory" / "job"
    assert (group.kills(), group.limit(), group.peak(folder), group.used(folder)) == (3, (700, folder), 700, 600)


def test_a_container_that_sees_the_path_of_its_host_has_its_own_cgroup_at_the_top(tmp_path):
    put(tmp_path, memory__memory_DOT_oom_control=CONTROL, memory__memory_DOT_limit_in_bytes=V1_NONE)
    group = MemoryGroup.of("3:memory:/docker/0123\n", tmp_path)
    assert group is not None
    assert (group.kills(), group.limit()) == (3, None)


@pytest.mark.parametrize("text", ["", "oom_kill\n", "oom_kill many\n"])
def test_what_cannot_be_read_is_unknown(tmp_path, text):
    put(tmp_path, job__memory_DOT_events=text, job__memory_DOT_max=text)
    group = MemoryGroup.of("0::/job\n", tmp_path)
    assert group is not None
    assert (group.kills(), group.limit()) == (None, None)
    for membership in ("", "x\n:::\n", "0::/../other\n", "3:cpu:/job\n"):
        assert MemoryGroup.of(membership, tmp_path) is None


def test_a_rank_is_told_what_the_kernel_did_while_it_lived(tmp_path):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroups"
    put(proc, **{"7__cgroup": "0::/a\n", "8__cgroup": "0::/b\n"})
    put(cgroups, a__memory_DOT_events=EVENTS, b__memory_DOT_events=EVENTS, memory_DOT_max="max\n")
    put(cgroups, a__memory_DOT_max="1000\n", a__memory_DOT_peak="1000\n", b__memory_DOT_max="max\n")
    watch = MemoryWatch(proc, cgroups)
    watch.watch((0, 0), 7)
    watch.watch((1, 0), 8)
    watch.watch((2, 0), 9)  # it has ended
    put(cgroups, a__memory_DOT_events=EVENTS.replace("oom_kill 2", "oom_kill 3"))
    watch.watch((0, 1), 7)
    assert watch.lack_of((0, 0)) == MemoryLack(1, 1000, 1000)
    assert [watch.lack_of(key) for key in ((1, 0), (2, 0), (0, 1), (9, 9))] == [MemoryLack()] * 4
