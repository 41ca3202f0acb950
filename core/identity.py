"""Who a process is: a rank, as torchrun's environment says, or a process that is none."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from .signal_errors import from_outside

_DEVICE = "GPUWATCH_DEVICE"
_NUMBERS = {name: name.upper() for name in ("rank", "local_rank", "world_size", "local_world_size", "master_port")}
"""Field -> variable."""


@dataclass(frozen=True)
class RankIdentity:
    """A rank as torchrun describes it."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    agent_store: bool
    """A store answers at this address already: torchrun's agent hosts it, or rank 0 for its preflight."""
    node: int = 0
    device: int | None = None
    """Index of the rank's GPU among the visible ones; None: its local rank."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> RankIdentity:
        """Read torchrun's variables. Raises KeyError for a missing one."""
        return cls(
            **{field: int(environ[variable]) for field, variable in _NUMBERS.items()},
            master_addr=environ["MASTER_ADDR"],
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True",
            node=int(environ.get("GROUP_RANK", "0")),
            device=int(environ[_DEVICE]) if _DEVICE in environ else None,
        )

    def to_environment(self) -> dict[str, str]:
        """The variables for a process that is to read them."""
        return {
            **{variable: str(getattr(self, field)) for field, variable in _NUMBERS.items()},
            "MASTER_ADDR": self.master_addr,
            "TORCHELASTIC_USE_AGENT_STORE": str(self.agent_store),
            "GROUP_RANK": str(self.node),
            **({_DEVICE: str(self.device)} if self.device is not None else {}),
        }


# Errors of a rank that failed only because another rank had ended.

_WORDS = (
    # gloo
    "Connection closed by peer",
    "Connection reset by peer",
    "Socket Timeout",
    "Broken pipe",
    "Timed out waiting",
    "timed out",
    "Application timeout caused pair closure",
    # torch's store
    "wait timeout",
    "got 0 bytes",
    "Connection was likely closed",
    # NCCL
    "remote process exited or there was a network error",
    "communicator was aborted",
    "Watchdog caught collective operation timeout",
    # DDP's constructor, when the collective that compares the models did not end
    "has inconsistent 0 params",
)
_SOURCES = ("gloo", "nccl", "c10d", "tcpstore", "processgroup")
"""Words in the errors of torch.distributed. A script's own downloads and data loaders time out, too."""
_DISTRIBUTED = "/torch/distributed/"


def is_peer_failure(message: str) -> bool:
    """Whether a message of torch.distributed only says that another rank has ended or does not answer."""
    return any(words in message for words in _WORDS)


def is_from_peer_failure(error: BaseException) -> bool:
    """Whether this exception is a peer failure of torch.distributed, or was raised because of one or while handling it.

    An exception that the script raises in its place, as in `except RuntimeError as error: raise TrainingFailed from
    error`, means the same.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if _is_of_torch_distributed(link):
            return True
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return False


def _is_of_torch_distributed(error: BaseException) -> bool:
    try:
        message = str(error)
    except Exception as failure:  # the exception's __str__ raises
        if from_outside(failure):
            raise
        return False
    if not is_peer_failure(message):
        return False
    if type(error).__module__.startswith("torch.distributed") or any(word in message.lower() for word in _SOURCES):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and _DISTRIBUTED in trace.tb_frame.f_code.co_filename.replace("\\", "/")


# A process of a run that has trained, or called a module, and is no rank: where a rank has its number, it has one below
# 0, made of its process id and its host.

_PID_BITS = 22
"""/proc/sys/kernel/pid_max is never larger."""
_HOST_BITS = 20


def number_of_process(pid: int, host: str) -> int:
    """What stands for it where a rank has its number.

    >>> pid_of_number(number_of_process(4242, "node7"))
    4242
    """
    return -((zlib.crc32(host.encode()) % (1 << _HOST_BITS)) << _PID_BITS | pid)


def is_rank(number: int) -> bool:
    """False for a process that is none."""
    return number >= 0


def pid_of_number(number: int) -> int:
    """The process id of one that is no rank."""
    return -number % (1 << _PID_BITS)


def rank_name(number: int) -> str:
    """How a sentence calls it: `rank 3`, `process 4242 (no rank)`."""
    return f"rank {number}" if is_rank(number) else f"process {pid_of_number(number)} (no rank)"
