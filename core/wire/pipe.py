"""The messages between a launch and its node agent, and between a launch and its collector: JSON lines over pipes.

`write_line` writes one, and `from_json(line, FromAgent)` (core/text.py) reads it.
"""

from __future__ import annotations

import os
from typing import IO, TypeVar

import msgspec

from ..codes import Code
from ..events.rank_standing import StackLine
from ..settings import OnHang
from ..text import from_json, to_json
from .messages import AgentHello, NodeBye, StopRanks
from .messages import JobResult as JobResult


class AgentConfig(msgspec.Struct, frozen=True, tag="config"):
    """First line to a node agent. The keys travel here and nowhere else: not in argv, not in the environment."""

    collector: str
    server_key: str
    public_key: str
    private_key: str
    recorder_dir: str
    spool_dir: str
    hello: AgentHello
    """What it says first: the agent puts in its name, its host and its process."""
    identity: str = ""
    """Random, of the node agents of one launch. The collector alone is shown it; their name is made from it."""
    life: int = 0
    """Counts them: one that has ended is started again."""
    hang_timeout_s: float | None = 0.0
    """A rank that has not moved for this long is reported; 0: never; None: learned from its steps."""
    ends_ranks: bool = False
    """It ends what its launch leaves behind, should that be killed."""
    telemetry_s: float = 0.0
    """How often the figures of the node are read; 0: never."""
    launch_fd: int = -1
    """Descriptor through which it hands its connections to its launch; -1: it has none."""


class WorkersStarted(msgspec.Struct, frozen=True, tag="started"):
    """torchrun has started the ranks of this node."""

    attempt: int
    pids: dict[int, int]
    """rank -> pid"""
    name: str = ""
    """This and the next are for AttemptNodes: the attempt's, and the hosts of all its nodes."""
    hosts: list[str] = []


class LastLook(msgspec.Struct, frozen=True):
    """Where a rank stood just before torchrun stopped it. The fields are those of WorkerExit."""

    main: list[StackLine] = []
    state: str = ""
    busy: float = 0.0
    still_s: float = 0.0


class WorkersEnded(msgspec.Struct, frozen=True, tag="ended"):
    """All ranks of this node have ended. Those in `failed` ended badly before torchrun stopped the others."""

    attempt: int
    codes: dict[int, int | None]
    failed: list[int]
    looks: dict[int, LastLook] = {}
    """Of those that torchrun stopped."""


class LaunchDone(NodeBye, frozen=True, tag="done"):
    """torchrun, or the command, has ended: what the agent says as its goodbye, and why it did."""

    reason: str = ""
    """This and the next two are for a NodeSignal."""
    down_nodes: list[str] = msgspec.field(default_factory=list)
    told_by: str = ""


ToAgent = AgentConfig | WorkersStarted | WorkersEnded | LaunchDone


class UserNotice(msgspec.Struct, frozen=True, tag="notice"):
    """One sentence for the user."""

    text: str


class VerdictWait(msgspec.Struct, frozen=True, tag="waiting"):
    """The job is over, and the node agent is at work or waits for a verdict that is being made."""


class NodeWelcomed(msgspec.Struct, frozen=True, tag="welcomed"):
    """The collector has taken this node into its run."""

    run: str


class ConnectionHanded(msgspec.Struct, frozen=True, tag="handed"):
    """A connection with the collector is there for the launch to hold, or it is held no more (held_connection.py)."""


FromAgent = UserNotice | StopRanks | JobResult | VerdictWait | NodeWelcomed | ConnectionHanded


class CollectorConfig(msgspec.Struct, frozen=True, tag="config"):
    """First line to a collector."""

    bind: str
    public_key: str
    private_key: str
    agent_public_key: str
    viewer_public_key: str
    runs_dir: str
    rdzv_id: str
    max_frames: int = 21
    run_name: str = ""
    """The name of the run's folder; "" makes one from the time."""
    resume: str = ""
    """Folder of a run whose collector has ended, to go on with; "" for a new run."""
    on_hang: OnHang = "report"
    """What follows when no rank moves any more: a report, or the end of the job, too; `auto`: if it cannot go on."""
    ends_at_overflow: bool = False
    """An overflow ends the job: `--on-overflow abort`."""
    fallback: str = ""
    """Another folder for the store, should the runs' folder take no more; "" for none."""
    viewer_private_key: str = ""
    """Goes into the run's folder, for `gpuwatch top`; "" shows the run to nobody."""
    metrics: str = ""
    """`HOST:PORT` where a Prometheus scrapes; "": nowhere."""
    notify: tuple[str, ...] = ()
    """Addresses and commands that get a JSON at the verdict, a stall and a forecast."""


class CollectorBound(msgspec.Struct, frozen=True, tag="bound"):
    """The collector listens at `address`; its run is in `run_dir`."""

    address: str
    run_dir: str
    metrics: str = ""
    """URL of its metrics; "": none."""


class CannotBind(msgspec.Struct, frozen=True, tag="cannot_bind"):
    """The port is taken, or the address is not one of this host's."""

    in_use: bool
    reason: str
    code: Code | None = None
    """With one, `reason` is the whole sentence for the user."""
    may_pass: bool = False
    """The machine has run out of something; nothing that the user has asked for is wrong."""


class StageLine(msgspec.Struct, frozen=True, tag="stage"):
    """How far a stage of the preflight is. A later line of a stage replaces the earlier ones."""

    stage: str
    done: int
    ranks: int
    grade: str = ""
    """The worst of all ranks, once the stage is over; "" while it runs."""
    seconds: float = 0.0
    """How long the slowest rank took, once the stage is over."""


class PreflightOver(msgspec.Struct, frozen=True, tag="preflight_over"):
    """The preflight has ended on all ranks, or never will."""

    grade: str = ""
    """Worst of all; "" where there was none."""
    text: str = ""
    """One line."""
    warnings: list[str] = []


FromCollector = CollectorBound | CannotBind | UserNotice | StageLine | PreflightOver

Config = TypeVar("Config", AgentConfig, CollectorConfig)


def write_line(pipe: IO[bytes], message: msgspec.Struct) -> bool:
    """Send one message. Returns False if it has not gone out: the other side is gone, or the pipe fails.

    What the pipe did not take is still in its buffer, and goes out in front of the next message, if it can.
    """
    try:
        pipe.write(to_json(message) + b"\n")
        pipe.flush()
    except (OSError, ValueError):
        return False
    return True


def read_config(fd: int, kind: type[Config]) -> Config | None:
    """The first line of a child's stdin, and not a byte more. None if the launch died before it wrote the line."""
    line = bytearray()  # a command line may be 2 MB
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            return None
        line += byte
    return from_json(bytes(line), kind)
