"""Messages on disk, for when the collector never comes back. Each message follows its length."""

from __future__ import annotations

import struct
from pathlib import Path

from .errors import GpuwatchError
from .messages import MAX_MESSAGE_BYTES, AgentMessage, decode_agent

SUFFIX = ".spool"
_LENGTH = struct.Struct("<I")


def write_spool(folder: Path, agent: str, messages: list[bytes]) -> Path | None:
    """Write the unsent messages. Returns None when there are none, or no place to write them."""
    if not messages:
        return None
    path = folder / f"agent-{agent[:8]}{SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            for data in messages:
                file.write(_LENGTH.pack(len(data)))
                file.write(data)
    except OSError:
        return None
    return path


def read_spool(path: Path) -> list[AgentMessage]:
    """All complete messages of a spool file. Raises GpuwatchError if it is none, OSError if it cannot be read."""
    data = path.read_bytes()
    messages: list[AgentMessage] = []
    at = 0
    while at + _LENGTH.size <= len(data):
        (size,) = _LENGTH.unpack_from(data, at)
        if size > MAX_MESSAGE_BYTES:
            raise GpuwatchError(f"expected a spool file of a gpuwatch agent, found something else in {path}")
        at += _LENGTH.size
        if at + size > len(data):
            break  # the disk was full
        messages.append(decode_agent(data[at : at + size]))
        at += size
    return messages
