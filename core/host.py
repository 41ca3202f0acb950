"""Facts about this host and process that several parts report."""

from __future__ import annotations

import platform
import socket
from contextlib import suppress
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

DISTRIBUTION = "gpuwatch-cluster"


def host_name() -> str:
    """The host's own name."""
    return socket.gethostname()


def loopback() -> str:
    """The address at which this host alone reaches itself: 127.0.0.1, or ::1 where there is IPv6 alone."""
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((address, 0))
            return address
    return "127.0.0.1"


def versions() -> dict[str, str]:
    """The versions of gpuwatch, Python and the torch that is installed. Ranks that have a preflight say theirs."""
    found = {"gpuwatch": gpuwatch_version(), "python": platform.python_version()}
    torch = installed_torch()
    return {**found, "torch": torch} if torch else found


def gpuwatch_version() -> str:
    """The installed distribution's version; "unknown" when run from a checkout that was never installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


def installed_torch() -> str:
    """The version of torch in this environment, without an import of it; "" if there is none that pip knows."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def has_part_in_c() -> bool:
    """Whether worker/native was compiled for this Python. Where there was no C compiler, Python does the same."""
    folder = Path(__file__).parents[1] / "worker" / "native"
    return any((folder / f"core{suffix}").exists() for suffix in EXTENSION_SUFFIXES)
