"""A disk without room, for the recorders of the workers."""

import errno
import os
import sys

if "-mgpuwatch.worker" in " ".join(sys.orig_argv):

    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    os.posix_fallocate = full
