"""What is read of this host, of real processes, and of files as Linux writes them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpuwatch.launcher.agent.host_figures import read_cgroup, read_disks, read_host, read_infiniband, read_ranks

MIB = 1 << 20


def write(root: Path, **files: str) -> Path:
    """Files below `root`; in a name `__` is a slash and `_DOT_` a dot."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


GROWS = """
import sys
data = []
for line in sys.stdin:
    what, number = line.split()
    if what == "bytes":
        data.append(b"x" * int(number))
    else:
        data += [open("/dev/null") for _ in range(int(number))]
    print("done", flush=True)
"""


def test_a_rank_that_allocates_and_opens_files_is_seen():
    with subprocess.Popen(
        [sys.executable, "-c", GROWS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def after(command: str):
            process.stdin.write(command + "\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"
            return read_ranks([(3, process.pid)])

        before = after("bytes 0")
        grown = after(f"bytes {200 * MIB}")
        opened = after("files 17")
        process.stdin.close()
        process.wait()
        gone = read_ranks([(3, process.pid)])
    assert 190 * MIB < grown["rank 3", "rss"] - before["rank 3", "rss"] < 220 * MIB
    assert opened["rank 3", "open_files"] == before["rank 3", "open_files"] + 17
    assert opened["rank 3", "open_files_limit"] > opened["rank 3", "open_files"]
    assert grown["rank 3", "rank_cpu"] >= before["rank 3", "rank_cpu"]
    assert gone == {}


def test_the_processor_that_is_used_is_counted():
    before, used = read_host()["", "cpu"], time.process_time()
    while (now := read_host()["", "cpu"]) == before and time.process_time() - used < 5.0:
        pass
    assert now > before


def test_this_host_has_its_figures(tmp_path):
    found = {what: value for (_, what), value in read_host().items()}
    assert 0 < found["memory_used"] < found["memory_total"]
    assert {"steal", "iowait", "swap_used", "swap_in", "swap_out"} <= set(found)
    disk = read_disks({"runs-dir": tmp_path, "scratch": tmp_path / "none"})
    assert 0 <= disk["runs-dir", "disk_free"] <= disk["runs-dir", "disk_size"]
    assert not any(of == "scratch" for of, _ in disk)


STAT = """cpu  400 0 200 3000 100 20 80 300 0 0
cpu0 200 0 100 1500 50 10 40 150 0 0
cpu1 200 0 100 1500 50 10 40 150 0 0
intr 1
"""
DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier
    lo: 9999 1 9 0 0 0 0 0 9999 1 9 0 0 0 0 0
  eth0: 1000 1 2 0 0 0 0 0 500 1 1 0 0 0 0 0
  veth: 7777 1 5 0 0 0 0 0 7777 1 5 0 0 0 0 0
"""


def test_the_files_of_a_virtual_machine(tmp_path):
    ticks = os.sysconf("SC_CLK_TCK")
    root = write(
        tmp_path,
        proc__stat=STAT,
        proc__net__dev=DEV,
        sys__class__net__eth0__device__vendor="0x15b3",
        proc__vmstat="pgpgin 5\npswpin 3\npswpout 4\n",
        proc__meminfo="MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\nSwapTotal: 50 kB\nSwapFree: 20 kB\n",
    )
    page = os.sysconf("SC_PAGE_SIZE")
    assert {what: value for (_, what), value in read_host(root).items()} == {
        "cpu": pytest.approx(700 / 2 / ticks),
        "steal": pytest.approx(300 / 2 / ticks),
        "iowait": pytest.approx(100 / 2 / ticks),
        "memory_used": 600 * 1024,
        "memory_total": 1000 * 1024,
        "swap_used": 30 * 1024,
        "swap_in": 3 * page,
        "swap_out": 4 * page,
        "net_received": 1000,
        "net_sent": 500,
        "net_errors": 3,
    }


@pytest.mark.parametrize("damaged", ["", "\n", "cpu", "cpu x\n", "MemTotal\n", "\x00\xff"])
def test_files_that_are_damaged_are_left_out(tmp_path, damaged):
    names = ("proc__stat", "proc__meminfo", "proc__vmstat", "proc__net__dev", "proc__self__cgroup")
    root = write(tmp_path, **dict.fromkeys(names, damaged))
    write(root, proc__7__stat=damaged, proc__7__statm=damaged, proc__7__limits=damaged)
    assert read_host(root) == {}
    assert read_cgroup(root) == {}
    assert read_ranks([(0, 7)], root) == {}


def test_a_port_of_infiniband(tmp_path):
    counters = {"port_rcv_data": "100", "port_xmit_data": "50", "symbol_error": "2", "link_downed": "1"}
    folder = "sys__class__infiniband__mlx5_0__ports__1__counters__"
    root = write(tmp_path, **{folder + name: f"{value}\n" for name, value in counters.items()})
    write(root, **{folder + "port_xmit_discards": "N/A (no PMA)\n"})
    port = "mlx5_0/1"
    assert read_infiniband(root) == {(port, "ib_received"): 400, (port, "ib_sent"): 200, (port, "ib_errors"): 3}


def test_the_limit_of_the_job_above_the_step_counts(tmp_path):
    job = "sys__fs__cgroup__job_7__"
    root = write(
        tmp_path,
        proc__self__cgroup="0::/job_7/step_0\n",
        **{
            job + "memory_DOT_max": "1000\n",
            job + "memory_DOT_current": "900\n",
            job + "memory_DOT_stat": "anon 500\nactive_file 100\ninactive_file 200\n",
            job + "step_0__memory_DOT_max": "max\n",
            job + "cpu_DOT_max": "200000 100000\n",
            job + "cpu_DOT_stat": "usage_usec 5\nnr_periods 100\nnr_throttled 30\nthrottled_usec 9\n",
        },
    )
    assert {what: value for (_, what), value in read_cgroup(root).items()} == {
        "job_memory_used": 600,
        "job_memory_limit": 1000,
        "job_cpu_held": 3.0,
    }


def test_a_limit_of_version_1_counts_beside_an_empty_version_2(tmp_path):
    job = "sys__fs__cgroup__memory__job_7__memory_DOT_"
    root = write(
        tmp_path,
        proc__self__cgroup="4:memory:/job_7\n0::/\n",
        **{
            job + "limit_in_bytes": "1000\n",
            job + "usage_in_bytes": "900\n",
            job + "stat": "active_file 1\ntotal_active_file 100\ntotal_inactive_file 200\n",
        },
    )
    found = {what: value for (_, what), value in read_cgroup(root).items()}
    assert found == {"job_memory_used": 600, "job_memory_limit": 1000}


def test_a_cgroup_without_a_limit_says_nothing(tmp_path):
    root = write(tmp_path, proc__self__cgroup="0::/\n", sys__fs__cgroup__memory_DOT_max="max\n")
    assert read_cgroup(root) == {}
