"""CURVE keys from a shared secret: every node derives the same key pairs, and nothing secret crosses the network.

The private keys are scrypt (RFC 7914) of the secret, salted with the job's rendezvous: one for the collector, one for
all agents, one for viewers. Without the secret, nobody can pose as the collector or connect to it. A viewer is given
its own pair and not the secret: the collector lets it in and reads nothing that it sends.

All agents of a job share a key pair, so it tells no node from another. Each has a random identity as well, which it
shows to the collector alone, in the encrypted part of the handshake. What it is called everywhere else is a hash of
that: who knows the name can neither speak as that agent nor take its connection.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import msgspec
import zmq
from zmq.utils import z85

from ..codes import Code
from ..errors import UsageError
from ..guest.own_files import write_whole
from ..settings import WorkerSettings
from ..text import from_json, to_json
from .pipe import AgentConfig

SECRET_VARIABLE = "GPUWATCH_SECRET"
MIN_SECRET_CHARACTERS = 16
_NAME_CHARACTERS = 32


class KeyPair(NamedTuple):
    """A CURVE key pair, both halves in Z85 (40 characters)."""

    public: bytes
    private: bytes


class JobKeys(NamedTuple):
    """The key pairs of a job."""

    collector: KeyPair
    agent: KeyPair
    viewer: KeyPair


def derive_keys(secret: str, job: str) -> JobKeys:
    """Keys of the job named `job` (its rendezvous) from `secret`."""
    salts = (f"gpuwatch/{job}/{role}".encode() for role in JobKeys._fields)
    seeds = (hashlib.scrypt(secret.encode(), salt=salt, n=1 << 12, r=8, p=1, dklen=32) for salt in salts)
    return JobKeys(*(KeyPair(zmq.curve_public(private), private) for private in map(z85.encode, seeds)))


def meeting_key(keys: JobKeys) -> str:
    """What the ranks of a job seal the values with that they meet by (core/preflight.py)."""
    return hashlib.sha256(b"gpuwatch meeting " + keys.agent.private).hexdigest()


def random_secret() -> str:
    """A random secret, for a job that shares it with its own child processes only."""
    return secrets.token_urlsafe(32)


def agent_name(identity: bytes) -> str:
    """What the agent with this identity, `random.life`, is called. Raises UnicodeDecodeError.

    >>> agent_name(b"8f3c.2")
    '4e2fa0bee00b2b0281df712a0b2f30a6.2'
    """
    unique, dot, life = identity.partition(b".")
    return hashlib.sha256(b"gpuwatch agent " + unique).hexdigest()[:_NAME_CHARACTERS] + (dot + life).decode()


def read_secret(secret_file: str | None) -> str | None:
    """The user's secret, from a file or the environment; None without one. Raises UsageError on an unusable one."""
    if secret_file is not None:
        try:
            secret = Path(secret_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", error)
            raise UsageError(
                Code.SECRET_WRONG, f"--secret-file: expected a readable text file, found {secret_file}: {why}"
            ) from error
        source = f"--secret-file {secret_file}"
    elif SECRET_VARIABLE in os.environ:
        secret, source = os.environ[SECRET_VARIABLE].strip(), SECRET_VARIABLE
    else:
        return None
    if len(secret) < MIN_SECRET_CHARACTERS:
        raise UsageError(
            Code.SECRET_WRONG,
            f"{source}: expected a secret of at least {MIN_SECRET_CHARACTERS} characters, found {len(secret)}; "
            'make one with: python3 -c "import secrets; print(secrets.token_urlsafe(32))"',
        )
    return secret


def others_may_read(secret_file: str | None) -> str:
    """A sentence where other users of the host may read the secret's file, with the mend; "" where they may not."""
    if secret_file is None:
        return ""
    with suppress(OSError):  # it was read a moment ago
        if (mode := Path(secret_file).stat().st_mode & 0o777) & 0o077:
            mend = f"chmod 600 {quote(secret_file)}"
            return f"--secret-file: other users may read {secret_file} (mode {mode:04o}): {mend}"
    return ""


# What lets ranks of other hosts join a run: a file of the run's folder, for its user alone. It has the job's keys.

NAME = "join.json"


class RunInvitation(msgspec.Struct, frozen=True):
    """`addresses` are those of the collector: a host takes one at which it answers."""

    addresses: list[str]
    agent: AgentConfig
    """The settings of the run's own agent. Another host changes the collector's address and the folders in them."""
    settings: WorkerSettings
    meeting_key: str = ""
    """What the ranks seal the values of their preflight with."""


def write_join(folder: Path, join: RunInvitation) -> Path:
    """Returns its path. Raises OSError."""
    write_whole(folder / NAME, to_json(join))
    return folder / NAME


def read_join(path: Path) -> RunInvitation:
    """Raises UsageError with what there is instead."""
    try:
        return from_json(path.read_bytes(), RunInvitation)
    except OSError as error:
        raise UsageError(
            Code.UNREADABLE,
            f"{path} cannot be read here ({error.strerror}): the run is over, or its folder is not shared with this "
            "host; share it, or copy that file here",
        ) from error
    except msgspec.DecodeError as error:
        raise UsageError(Code.VERSIONS_APART, f"{path} is of another version of gpuwatch: {error}") from error


def set_options(socket: zmq.Socket[bytes], **options: Any) -> None:
    """Set options of a socket, each by its name in small letters: `ipv6=True`. Raises zmq.ZMQError."""
    for name, value in options.items():
        setattr(socket, name, value)
