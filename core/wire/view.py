"""What a collector shows to those who look on: a picture of the job, once a second, to all of them at once.

It is published (ZeroMQ's PUB and SUB) under the job's CURVE keys. A viewer's key opens this socket; nobody speaks
there.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from ..codes import Code
from ..errors import GpuwatchError
from ..events.agent_events import RankLook
from .beat import HotModule

SCHEMA = 1
FILE = "view.json"
"""Name of a file in a run's folder while its collector runs: whoever can read it may watch live."""


class ViewerKeys(msgspec.Struct, frozen=True):
    """Contents of FILE."""

    address: str
    server_key: str
    public_key: str
    private_key: str
    schema: int = SCHEMA


class RankView(msgspec.Struct, frozen=True, array_like=True):
    """One rank, as its recorder said last."""

    rank: int
    host: str
    phase: str
    step: int
    batch: int
    begun: int
    """Collectives that it has begun in its largest process group, if it rests; -1: it moves, or that is unknown."""
    module: str
    still_s: float
    """Seconds since its recorder moved."""
    overflow: bool
    warned: int
    exit: int | None = None
    ended: bool = False
    waits: bool = False
    """It rests in a collective."""
    gpu_use: float = -1.0
    """Share of the time in which a kernel ran on its GPU; -1: not known."""
    gpu_memory: float = -1.0
    """Share of its GPU's memory that is in use; -1: not known."""
    stopped: bool = False
    """Its launcher has ended it, once another rank had failed."""
    loss: float = -1.0
    """As in RankState."""
    runs_on: bool = False
    """It had not ended when its launch was killed. Nobody watches it since then: it is among those that `ended`."""


class NodeView(msgspec.Struct, frozen=True):
    """One node."""

    host: str
    lost: bool
    gpus: str
    """`ok`, or what NVML could not tell; "" is not known."""
    xids: list[int] = []
    """XIDs of all its GPUs, the newest last."""
    cpu: float = -1.0
    """Share of its processors in use; -1, here and below: not known."""
    memory: float = -1.0
    """Share of its memory in use."""
    gpu_use: float = -1.0
    """Mean share of the time in which a kernel ran on its GPUs."""
    gpu_memory: float = -1.0
    """Share of its memory that is in use on the GPU that has the least left."""
    temperature: float = -1.0
    """Its hottest GPU's, in degrees Celsius."""
    power: float = -1.0
    """All its GPUs', in watts."""


class ViewStraggler(msgspec.Struct, frozen=True):
    """The rank that the others wait for in their steps, as the last comparisons have shown."""

    rank: int
    host: str
    cost: float
    """Share of the job's time."""


class LimitPassing(msgspec.Struct, frozen=True):
    """A module's output that passes its dtype's limit, if it goes on so: the batches in which it does."""

    module: str
    dtype: str
    batch: int
    earliest: int
    latest: int


class ViewEvent(msgspec.Struct, frozen=True):
    """An event."""

    time_ns: int
    text: str
    loud: bool = False


class JobView(msgspec.Struct, frozen=True):
    """The job."""

    time_ns: int
    """The collector's clock."""
    run: str
    command: list[str]
    world_size: int
    attempt: int
    nodes: list[NodeView]
    ranks: list[RankView]
    hot: list[HotModule]
    """The closest to its limit first."""
    events: list[ViewEvent]
    """The newest last."""
    verdict: str = ""
    """The verdict so far, where a rank has overflowed."""
    kind: str = ""
    """Its kind; "" as long as there is none."""
    slow: ViewStraggler | None = None
    passing: list[LimitPassing] = []
    """The soonest first, one for each module."""
    events_by_kind: dict[str, int] = {}
    """How many there were, of all attempts."""
    anomalies_by_value: dict[str, int] = {}
    lost: dict[str, int] = {}
    """What was lost for want of room: `frames`, `rows`, `records`, `pages`."""
    schema: int = SCHEMA
    processes: list[RankView] = []
    """Some of those that have called a module and are no rank; `rank` is below 0 (core/identity.py)."""
    more_processes: int = 0
    """How many more there are."""
    started_ns: int = 0
    """When the run began, by the collector's clock; 0: not known."""
    hang: str = ""
    """The last finding about ranks that rest, in this attempt. They may have gone on since."""
    hang_ranks: list[int] = []
    """Those that the others wait for."""
    asks: bool = False
    """No rank moves, and all are being asked where they are: a later picture tells who waits for whom."""


STACKS, STACKS_WORD_BYTES = b"stacks:", 8
"""A subscription to this and a random word in hexadecimal digits asks for the ranks' stacks. They are published under
it, once."""


class StacksView(msgspec.Struct, frozen=True):
    """Where all ranks stand."""

    time_ns: int
    """The collector's clock."""
    run: str
    world_size: int
    hosts: dict[int, str]
    """rank -> host, of the ranks that run."""
    looks: list[RankLook]
    """Those that an agent has seen in time, by rank."""
    schema: int = SCHEMA


def read_viewer_keys(folder: Path) -> ViewerKeys | None:
    """None if nobody shows this run. Raises GpuwatchError for a file that is none of ours."""
    path = folder / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=ViewerKeys)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise GpuwatchError(
            Code.NOT_RUNNING, f"expected the address of a collector in {path}, it cannot be read: {error}"
        ) from error


_decoder = msgspec.msgpack.Decoder(JobView)
_stacks_decoder = msgspec.msgpack.Decoder(StacksView)


def decode_view(data: bytes) -> JobView | None:
    """What `encode` (messages.py) has made; None for bytes that are no view."""
    with suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return _decoder.decode(data)
    return None


def decode_stacks(data: bytes) -> StacksView | None:
    """As `decode_view`, behind the topic that it was published under."""
    with suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return _stacks_decoder.decode(data[len(STACKS) + 2 * STACKS_WORD_BYTES :])
    return None
