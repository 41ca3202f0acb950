"""The wire between a node agent (DEALER) and the collector (ROUTER): msgpack structs, never pickle.

An agent numbers its messages. The collector acknowledges the highest number up to which it has everything.
What must not be lost (hello, events, definitions, bye) is kept by the agent until then. Definitions and pages are sent
when there is credit: every acknowledgement says how many bytes of them may be on the way. Pages that wait may be
dropped, oldest first; how many is in every beat. Beats are not numbered: the next one replaces a lost one.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from ..codes import Code, VerdictKind
from ..errors import GpuwatchError
from ..events.definitions import Definition
from ..events.log_entries import Event
from ..events.run_position import RankEvent
from ..text import carried, given_back
from .batch_job import SchedulerJob
from .beat import NodeBeat

T = TypeVar("T")


SCHEMA = 1
MAX_MESSAGE_BYTES = 32 << 20
FIRST_CREDIT = 256 << 10
"""Bytes of definitions and pages that an agent may send before the collector has said how many."""
VERDICT_PATIENCE_S = 60.0
"""How long, at the end of the job, an agent waits for a silent collector, and the collector for an agent that has said
goodbye and not taken the verdict. Packets may be lost meanwhile, or the collector be started again."""


class AgentHello(msgspec.Struct, frozen=True, tag="hello"):
    """An agent's first message: who it is. Its launch has written the rest (`AgentConfig`)."""

    agent: str
    host: str
    nproc: int
    """Ranks of the node; 0: not known beforehand."""
    min_nodes: int
    max_nodes: int
    command: list[str]
    versions: dict[str, str]
    rdzv_id: str
    schema: int = SCHEMA
    cwd: str = ""
    trace_batches: list[int] = []
    check_only: bool = False
    """`gpuwatch check`: there is a preflight and no script."""
    job: SchedulerJob | None = None
    """The scheduler's job that it runs in; None outside of one."""
    run: str = ""
    """The run that has welcomed its launch; "" before. No other run's collector takes it."""
    starter: str = "torchrun"
    """Who starts the ranks, for a sentence."""
    starts_all: bool = False
    """The ranks of all nodes come from what this one has started: they end with it."""


class EventMessage(msgspec.Struct, frozen=True, tag="event"):
    """An event of one rank or of the node."""

    event: Event


class NameDefinitions(msgspec.Struct, frozen=True, tag="definitions"):
    """Names that the pages after it refer to."""

    rank: int
    attempt: int
    entries: list[Definition]


class PageSegment(msgspec.Struct, frozen=True):
    """A stretch of a page as the recorder holds it (recorder/layout.py); the bases count from the start of the page."""

    index: int
    frame_base: int
    value_base: int
    frames: bytes
    rows: bytes
    values: bytes


class PageMessage(msgspec.Struct, frozen=True, tag="page"):
    """One batch of one rank, or what the recorder still held of it."""

    rank: int
    attempt: int
    number: int
    root: int
    batch: int
    step: int
    complete: bool
    segments: list[PageSegment]


class RankHistoryMessage(msgspec.Struct, frozen=True, tag="history"):
    """abs max of what the modules below one root of one rank returned, over its batches (core/wire/columns.py).

    Sent once, when the rank has ended. It decides nothing.
    """

    rank: int
    attempt: int
    root: int
    batches: list[int]
    """In their order; the older, the further apart."""
    steps: list[int]
    slots: list[int]
    """What the columns are about."""
    dtypes: bytes
    """A byte for each column: an index into DTYPE_NAMES."""
    codes: bytes
    """Batches by columns, packed."""


class SeriesName(msgspec.Struct, frozen=True):
    """What one series of a node's telemetry is about."""

    of: str
    """A GPU's UUID, `rank 3`, `mlx5_0/1`, `runs-dir`; "" is the host itself."""
    what: str
    """A key of METRICS (core/wire/columns.py)."""


class TelemetryMessage(msgspec.Struct, frozen=True, tag="telemetry"):
    """How a node has done since its agent began: samples, the older, the further apart (launcher/agent/telemetry.py).

    Sent when a rank stalls, when one meets an overflow, and when the run ends; a later one has all of those before it.
    It decides nothing.
    """

    began_ns: int
    """The first sample, by the host's own clock."""
    sent_ns: int
    series: list[SeriesName]
    samples: bytes
    """By series, packed (core/wire/columns.py)."""
    troubles: list[str] = []
    """What could not be read, and why: a sentence each."""


class NodeBye(msgspec.Struct, frozen=True, tag="bye"):
    """torchrun has ended on this node. Everything that was recorded was sent before this message."""

    outcome: str
    """ok, failed, or signal."""
    signal: int = 0
    note: str = ""
    """Why no rank was heard, where that is known."""
    unwatched: list[str] = []
    """Python processes that could not be watched: `process 4242 was not watched (...)`."""
    error: str = ""
    """What torchrun, or the command, raised itself: `DistNetworkError: ...`."""
    runs_on: bool = False
    """The launch was killed, and ranks that it has started run on: as under torchrun nothing is stopped for it."""


def node_of(agent: str) -> str:
    """What the agents of one launch have in common: one that had ended is started again with another number.

    >>> node_of("8f3c.2")
    '8f3c'
    """
    return agent.partition(".")[0]


def life_of(agent: str) -> int:
    """How many agents of the same launch were before it.

    >>> life_of('8f3c.2')
    2
    """
    life = agent.partition(".")[2]
    return int(life) if life.isascii() and life.isdigit() and len(life) < 10 else 0


class AgentLeaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The agent has the verdict. Not numbered."""


AgentBody = (
    AgentHello
    | EventMessage
    | NameDefinitions
    | PageMessage
    | RankHistoryMessage
    | TelemetryMessage
    | NodeBeat
    | NodeBye
    | AgentLeaving
)


def ranks_of(body: AgentBody) -> list[tuple[int, int]]:
    """(attempt, rank) of all that a message is about."""
    if isinstance(body, NodeBeat):
        return [(state.attempt, state.rank) for state in body.ranks]
    if isinstance(body, NameDefinitions | PageMessage | RankHistoryMessage):
        return [(body.attempt, body.rank)]
    if isinstance(body, EventMessage) and isinstance(body.event, RankEvent):
        return [(body.event.where.attempt, body.event.where.rank)]
    return []


Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A message's number: what SQLite can hold."""


class AgentMessage(msgspec.Struct, frozen=True):
    """An envelope: `n` counts from 1; 0 is not numbered.

    `after` is the number of the message before it that the agent still has. A collector that has not seen that message
    knows that something was lost, and asks for it again.
    """

    n: Number
    body: AgentBody
    after: Number = 0


class RunWelcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The collector of this run."""

    run_id: str
    schema: int = SCHEMA


class MessageAck(msgspec.Struct, frozen=True, tag="ack"):
    """Everything up to and including `n` is stored; `resend` asks for all that came after it."""

    n: int
    resend: bool = False
    time_ns: int = 0
    """The collector's clock."""
    echo_ns: int = 0
    """`sent_ns` of the beat that this answers."""
    received: int = -1
    """In answer to a beat: everything up to this number had arrived before it, stored or not. -1: unknown."""
    credit: int = -1
    """How many bytes of definitions and pages may be on the way; one message always may. -1: as before."""
    looks: bool = False
    """Somebody watches live: beats should name the modules closest to their limit."""


class WantedBatch(msgspec.Struct, frozen=True, tag="want"):
    """Send what the recorders of your ranks still hold of this batch."""

    attempt: int
    root_cls: str
    root_ordinal: int
    batch: int


SHOWN_LOOK = 0
"""The number of a look that nothing is decided by: it comes with a beat."""


class LookAtRanks(msgspec.Struct, frozen=True, tag="look_at_ranks"):
    """A rank has stalled somewhere: tell where the ranks of your node stand, one `RankLook` each."""

    number: int
    """Counts how often the collector has asked; SHOWN_LOOK: for a viewer."""


class WatchSlowRank(msgspec.Struct, frozen=True, tag="slow_rank"):
    """The others wait for this rank: look at it now and then, if it is one of your node's."""

    attempt: int
    rank: int = -1
    """-1: none is slow any more."""


class StopRanks(msgspec.Struct, frozen=True, tag="stop"):
    """End the ranks of this node, because the job has ended elsewhere. The agent hands it to its launch."""

    reason: str
    restart: bool = False
    """The job hangs: torchrun may start the ranks again, if `--max-restarts` allows it."""


class JobResult(msgspec.Struct, frozen=True, tag="final"):
    """The verdict: what to print, and the exit code. The agent hands it to its launch as its last message."""

    exit_code: int
    kind: VerdictKind
    text: str
    report: str
    overflow_in: str = ""
    """The spool that has an overflow of this node; "" where the verdict came from a collector, or there is none."""


class AgentRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The collector refuses this agent. `reason` says why."""

    reason: str


CollectorMessage = (
    RunWelcome | MessageAck | WantedBatch | LookAtRanks | WatchSlowRank | StopRanks | JobResult | AgentRefused
)


class WireError(GpuwatchError):
    """Bytes that are not one of these messages."""


_encoder = msgspec.msgpack.Encoder()
_agent_decoder = msgspec.msgpack.Decoder(AgentMessage)
_collector_decoder: msgspec.msgpack.Decoder[CollectorMessage] = msgspec.msgpack.Decoder(CollectorMessage)


def encode(message: msgspec.Struct) -> bytes:
    """Bytes for one ZeroMQ frame; of a body alone, to be put in its envelope when it is sent."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:  # a name of a file
        return _encoder.encode(carried(message))


def envelope(n: int, after: int, body: bytes) -> bytes:
    """An AgentMessage around an encoded body."""
    return _encoder.encode(AgentMessage(n, msgspec.Raw(body), after))  # type: ignore[arg-type]


def decode_agent(data: bytes) -> AgentMessage:
    """Read what an agent sent. Raises WireError on anything else."""
    return _decode(_agent_decoder, data)


def decode_collector(data: bytes) -> CollectorMessage:
    """Read what a collector sent. Raises WireError on anything else."""
    return given_back(_decode(_collector_decoder, data), data, CollectorMessage)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(Code.UNREADABLE, f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(Code.UNREADABLE, f"not a gpuwatch message: {error}") from error
