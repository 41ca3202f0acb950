"""One host that lacks something, in namespaces of its own: 127.0.0.1, files in shared memory, an answer of DNS."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("namespaces")


def lacking(bench, prepare: str, *command: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    """The real command after `prepare`, a shell's, has been done to its own network and mounts."""
    words = ["unshare", "--net", "--mount", "sh", "-c", f'ip link set lo up && {prepare} && exec "$@"', "sh"]
    return subprocess.run(
        [*words, sys.executable, "-m", "gpuwatch.cli.main", *command],
        cwd=bench.cwd,
        env=bench.environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.mark.slow
def test_a_host_with_ipv6_alone(bench):
    prepare = "ip addr del 127.0.0.1/8 dev lo"
    ended = lacking(bench, prepare, "run", "--", "sh", "-c", "echo hello")
    assert (ended.returncode, ended.stdout) == (6, "hello\n"), ended.stderr
    assert "VERDICT  unknown" in ended.stderr, "its collector has answered"


@pytest.mark.slow
def test_where_shared_memory_takes_no_more_files_the_recorders_are_elsewhere(bench):
    """Five are free: enough for the folder, and not for what is in it."""
    fill = "for n in 1 2 3 4 5 6 7 8 9; do : > /dev/shm/file$n; done"
    prepare = f"mount -t tmpfs -o nr_inodes=15,size=1g tmpfs /dev/shm && {fill}"
    script = bench.cwd / "script.py"
    script.write_text("import torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2))\n")
    ended = lacking(bench, prepare, "run", "--", sys.executable, str(script))
    assert ended.returncode == 0, ended.stderr
    assert "gpuwatch: /dev/shm has 5 inodes free, and 8 recorders may need 64, and the script should" in ended.stderr
    assert "VERDICT  clean" in ended.stderr


NO_ANSWER = """
import os, socket, sys
resolver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)  # which nobody reads
resolver.bind(("127.0.0.1", 53))
resolver.set_inheritable(True)
os.execv(sys.executable, [sys.executable, "-m", "gpuwatch.cli.main", *sys.argv[1:]])
"""
ASKS = "0100007F:0035"
"""Of a socket that is connected to 127.0.0.1, port 53 (proc(5), /proc/net/udp)."""


@pytest.mark.slow
@pytest.mark.sample(1, of="a host that lacks something")
def test_a_signal_ends_a_launch_that_waits_for_dns(bench):
    """torch asks for the address of the rendezvous in C, where Python hears nothing; DNS takes many minutes here."""
    resolv, switch = bench.cwd / "resolv.conf", bench.cwd / "nsswitch.conf"
    resolv.write_text("search a.example b.example\nnameserver 127.0.0.1\noptions timeout:30 attempts:5\n")
    switch.write_text("hosts: files dns\n")
    mounts = f"mount --bind {resolv} /etc/resolv.conf && mount --bind {switch} /etc/nsswitch.conf"
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "a-head:29400", "--rdzv-id", "job", "--rdzv-conf", "is_host=0")
    command = ("launch", "--nnodes", "2", "--nproc-per-node", "1", *meet, bench.script("clean.py"))
    words = ["unshare", "--net", "--mount", "sh", "-c", f'ip link set lo up && {mounts} && exec "$@"', "sh"]
    process = subprocess.Popen(
        [*words, sys.executable, "-c", NO_ANSWER, *command],
        cwd=bench.cwd,
        env=bench.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    bench.started.append(process)
    sockets = Path(f"/proc/{process.pid}/net/udp")
    while process.poll() is None and sockets.read_text().count(ASKS) < 3:  # the launch's own, torch's, the node agent's
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    run = bench.finish(process)

    assert run.code == 128 + signal.SIGTERM
    assert "gpuwatch: got SIGTERM; writing the report" in run.stderr
    assert "this node's records are in" in run.stderr
