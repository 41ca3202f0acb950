"""What NCCL's watchdog does to a rank that stands still, without a GPU."""

import ctypes
import os
import signal
import sys
import time


def wait_until_still(thread, seconds):
    """Until that thread has stood at one place for so long."""
    since, before = time.monotonic(), None
    while time.monotonic() - since < seconds:
        time.sleep(0.1)
        frame = sys._current_frames()[thread]
        if (id(frame), frame.f_lasti) != before:
            since, before = time.monotonic(), (id(frame), frame.f_lasti)


def fault_when_still(thread, seconds):
    """End the process by SIGSEGV, once that thread has stood still for so long."""
    wait_until_still(thread, seconds)
    os.kill(os.getpid(), signal.SIGSEGV)


def abort_when_still(thread, seconds):
    """Abort the process from a thread without Python, once that thread has stood still for so long."""
    wait_until_still(thread, seconds)
    library, number = ctypes.CDLL(None), ctypes.c_ulong()
    library.pthread_create(ctypes.byref(number), None, ctypes.cast(library.abort, ctypes.c_void_p), None)
    time.sleep(3600)
