"""Facts about this host and process that several parts report."""

from __future__ import annotations

import platform
import socket
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

DISTRIBUTION = "gpuwatch-cluster"


def host_name() -> str:
    """The host's own name."""
    return socket.gethostname()


def versions() -> dict[str, str]:
    """The versions of gpuwatch and Python. The ranks report torch's, because they have imported it."""
    return {"gpuwatch": gpuwatch_version(), "python": platform.python_version()}


def gpuwatch_version() -> str:
    """The installed distribution's version; "unknown" when run from a checkout that was never installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


def has_part_in_c() -> bool:
    """Whether worker/native was compiled for this Python. Where there was no C compiler, Python does the same."""
    folder = Path(__file__).parents[1] / "worker" / "native"
    return any((folder / f"core{suffix}").exists() for suffix in EXTENSION_SUFFIXES)
