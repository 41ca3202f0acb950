"""Facts about this host and process that several parts report."""

from __future__ import annotations

import platform
import socket
from importlib import metadata

DISTRIBUTION = "gpuwatch-cluster"


def host_name() -> str:
    """The host's own name."""
    return socket.gethostname()


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
