"""One host that lacks something, in namespaces of its own: 127.0.0.1, files in shared memory, an answer of DNS."""

from __future__ import annotations

import subprocess
import sys

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


def test_a_host_with_ipv6_alone(bench):
    prepare = "ip addr del 127.0.0.1/8 dev lo"
    ended = lacking(bench, prepare, "run", "--", "sh", "-c", "echo hello")
    assert (ended.returncode, ended.stdout) == (6, "hello\n"), ended.stderr
    assert "VERDICT  unknown" in ended.stderr, "its collector has answered"


def test_where_shared_memory_takes_no_more_files_the_recorders_are_elsewhere(bench):
    """Five are free: enough for the folder, and not for what is in it."""
    fill = "for n in 1 2 3 4 5 6 7 8 9; do : > /dev/shm/file$n; done"
    prepare = f"mount -t tmpfs -o nr_inodes=15,size=1g tmpfs /dev/shm && {fill}"
    script = bench.cwd / "script.py"
    script.write_text("import torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2))\n")
    ended = lacking(bench, prepare, "run", "--", sys.executable, str(script))
    assert ended.returncode == 0, ended.stderr
    assert "gpuwatch: /dev/shm has 5 inodes free, and 8 recorders may need 64 and should leave as much" in ended.stderr
    assert "VERDICT  clean" in ended.stderr
