"""An agent's own record of what it has to send: written as it goes, for a collector that never comes back.

    4 bytes    length
    4 bytes    crc32
    ...        one AgentMessage, as it goes over the wire

Append only, private, definitions included: a report can be made of it alone.
"""

from __future__ import annotations

import os
import shutil
import struct
import zlib
from contextlib import suppress
from pathlib import Path

from ..codes import Code
from ..errors import GpuwatchError
from ..guest.own_files import read_regular
from .messages import MAX_MESSAGE_BYTES, AgentHello, AgentMessage, WireError, decode_agent

SUFFIX = ".spool"
MAX_BYTES = 128 << 20
"""Pages get half of it, events and names all."""
_MAGIC = b"gpuwatch spool 1\n"
_HEAD = struct.Struct("<II")
_BEGINNING = b"\x83\xa1n"
"""Every AgentMessage begins so: a map of three, and its first key. The reader finds the next message behind a damaged
one by it."""


class SpoolWriter:
    """One agent's spool. Nothing here raises: a spool that cannot be written is incomplete, and says so."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self.left_out = 0
        """Messages that are not in it."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._fd: int | None = None
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            self._write(_MAGIC)
        except OSError:
            self.close()

    def append(self, message: bytes, *, is_page: bool) -> None:
        """Write one encoded AgentMessage, if there is room."""
        size = _HEAD.size + len(message)
        room = self._max_bytes // 2 if is_page else self._max_bytes
        if self._fd is None or self._bytes + size > room:
            self.left_out += 1
            return
        try:
            self._write(_entry(message))
        except OSError:  # a part that was written is cut off, or its checksum shows it
            self.left_out += 1

    def _write(self, data: bytes) -> None:
        assert self._fd is not None
        written = os.write(self._fd, data)
        if written < len(data):
            os.ftruncate(self._fd, self._bytes)
            os.lseek(self._fd, self._bytes, os.SEEK_SET)
            raise OSError("no room")
        self._bytes += len(data)

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _entry(message: bytes) -> bytes:
    return _HEAD.pack(len(message), zlib.crc32(message)) + message


def keep_spools(spools: list[Path], folder: Path, agent: str, more: list[bytes]) -> Path | None:
    """Put the spools of one launch's agents into one private file in `folder`, and `more` messages behind them.

    None when there is nothing, or nowhere to write it.
    """
    if not spools and not more:
        return None
    path = folder / f"agent-{agent[:8]}{SUFFIX}"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(_MAGIC)
            for spool in spools:
                with suppress(OSError), spool.open("rb") as source:
                    if source.read(len(_MAGIC)) == _MAGIC:
                        shutil.copyfileobj(source, file)
            for message in more:
                file.write(_entry(message))
        return path
    return path if path.exists() else None


def read_spool(path: Path) -> list[AgentMessage]:
    """All whole messages of a spool. Damaged ones are left out.

    Raises GpuwatchError when it is no spool, or cannot be read.
    """
    try:
        data = read_regular(path, 16 * MAX_BYTES)
    except OSError as error:
        raise GpuwatchError(
            Code.UNREADABLE, f"expected a spool file of a gpuwatch agent, {path} cannot be read: {error.strerror}"
        ) from error
    if not data.startswith(_MAGIC) and not _MAGIC.startswith(data):
        raise GpuwatchError(
            Code.UNREADABLE, f"expected a spool file of a gpuwatch agent, found something else in {path}"
        )
    messages: list[AgentMessage] = []
    view = memoryview(data)
    at, checked = len(_MAGIC), 0
    while at + _HEAD.size <= len(data) and checked < 4 * len(data) + MAX_MESSAGE_BYTES:
        size, checksum = _HEAD.unpack_from(data, at)
        start = at + _HEAD.size
        if 0 < size <= min(MAX_MESSAGE_BYTES, len(data) - start):
            checked += size
            if zlib.crc32(view[start : start + size]) == checksum:
                at = start + size
                with suppress(WireError):  # of a later version
                    messages.append(decode_agent(data[start:at]))
                continue
        found = data.find(_BEGINNING, start + 1)
        at = found - _HEAD.size if found > 0 else len(data)
    return messages


def agent_of(messages: list[AgentMessage], path: Path) -> str:
    """Whose spool it is: as its Hello says, else by the file's name."""
    hellos = [message.body for message in messages if isinstance(message.body, AgentHello)]
    return hellos[-1].agent if hellos else path.stem.removeprefix("agent-")
