"""A torchrun that does not see its ranks end is left; one that still has a rank running is not."""

import subprocess
import sys
import threading

import psutil
from gpuwatch.launcher.signals import watch_torchrun


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
