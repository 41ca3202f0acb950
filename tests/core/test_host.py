"""Facts about a host and its processes."""

from __future__ import annotations

import subprocess
import sys


def test_a_low_limit_of_open_files_is_raised_to_the_hosts():
    code = (
        "import resource\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "from gpuwatch.core.host import raise_file_limit\n"
        "most = raise_file_limit()\n"
        "assert most == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 1 << 20)\n"
        "files = [open('/dev/null') for _ in range(200)]\n"
        "assert raise_file_limit() == most\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
