"""The wire between a node agent (DEALER) and the collector (ROUTER): msgpack structs, never pickle.

An agent numbers its messages. The collector acknowledges the highest number up to which it has everything.
What must not be lost (hello, events, definitions, bye) is kept by the agent until then. Definitions and pages are sent
when there is credit: every acknowledgement says how many bytes of them may be on the way. Pages that wait may be
dropped, oldest first; how many is in every beat. Beats are not numbered: the next one replaces a lost one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated, Literal, TypeVar

import msgspec

from ..errors import Code, GpuwatchError
from ..events.agent_events import RankLook
from ..events.definitions import Definition
from ..events.log_entries import Event
from ..events.run_position import RankEvent
from ..text import carried, given_back
from ..verdicts import VerdictKind

# The job of a batch scheduler that a node runs in, in the scheduler's own words. The launcher's module for that
# scheduler fills it in; who reads it knows no scheduler by name.

T = TypeVar("T")
_BLANK = re.compile(r"\{(nodes|reason)\}")


class SchedulerJob(msgspec.Struct, frozen=True):
    """A scheduler's job, as one node sees it. The two command texts have the placeholders `{nodes}` and `{reason}`."""

    scheduler: str
    """What users call it: `SLURM`."""
    job: str
    """The job's id."""
    node: str = ""
    """What the scheduler calls this node; "" if it does not say."""
    nodes: list[str] = []
    """What it calls the nodes of the job, in its order."""
    drain: str = ""
    """The command that takes nodes out of service: `scontrol update nodename={nodes} state=drain reason={reason}`."""
    exclude: str = ""
    """The option of a next submission that leaves nodes out: `--exclude={nodes}`."""
    daemon: str = ""
    """Its process on a node: `slurmd`."""


def fill_command(text: str, nodes: list[str], reason: str) -> str:
    """A command text with its blanks filled, quoted for a shell.

    >>> fill_command("--exclude={nodes}", ["gpu-1", "gpu-2"], "")
    '--exclude=gpu-1,gpu-2'
    """
    values = {"nodes": shlex.quote(",".join(nodes)), "reason": shlex.quote(reason)}
    return _BLANK.sub(lambda blank: values[blank[1]], text)


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


HooksText = Literal["none", "attached", "failed", "detached"]
"""Whether a rank's modules are watched; `none`: torch has not been imported, `detached`: errors of gpuwatch itself."""


class RankState(msgspec.Struct, frozen=True):
    """Where a rank is, as its recorder says. The rank itself need not answer."""

    rank: int
    local_rank: int
    attempt: int
    pid: int
    phase: str
    step: int
    batch: int
    seq: int
    module: str | None = None
    cls: str | None = None
    rows_lost: int = 0
    records_lost: int = 0
    age_s: float = 0.0
    """Seconds since its recorder last moved."""
    ignored: int = 0
    """Rows that would have been an alarm and that a rule of the user's waived."""
    scaler_skips: int = 0
    """Optimizer steps that a GradScaler has skipped."""
    warned: int = 0
    """Rows near overflow or in underflow. The first of each kind and place is an event, too."""
    batches_skipped: int = 0
    """Batches that `--every` skipped."""
    world_size: int = 0
    """Ranks of the job; 0: not known."""
    hooks: HooksText = "none"
    overflow: bool = False
    """Whether the rank has written an anomaly into its recorder's header."""
    final: bool = False
    """The rank has ended: nothing in here changes any more."""
    pending: int = 0
    """Numbers that had not come back from their device when the rank ended."""
    absorbed: int = 0
    """Bad values that led nowhere, such as nan out of masks of -inf that the model has taken away again."""
    steps_timed: int = 0
    """Steps whose times are in `parts_us`."""
    parts_us: list[int] = []
    """Microseconds of all of them in each part (core/recorder/layout.py); [] without one."""
    begun: int = -1
    """Collectives that it has begun in its largest process group, if it has rested for seconds; else -1."""
    waits: bool = False
    """It is in one of them."""
    faults: int = 0
    """Errors of gpuwatch itself that may have cost frames. Each is an event, too, where its log had room."""
    names_lost: int = 0
    """How many of `records_lost` were names."""
    calls_left_out: int = 0
    """Module calls without a frame: another thread was in a forward."""
    left_out_page: int = -1
    """The page that was being written at the first of them; it says nothing where there is none."""
    hooks_gone: int = 0
    """How often its hooks were found removed from torch's global tables: the script, or a library, can do that."""
    gone_page: int = -1
    """The page that had been begun last when they were first found so; it says nothing where they never were."""
    left: bool = False
    """Its script has called os._exit between two batches, when every number had been judged."""
    unseen_child: int = 0
    """Process id of a child process of it that has trained and was not watched; 0: there was none."""
    passed_unseen: bool = False
    """Tensors that pass between it and other ranks are not inspected: they are on a device, or `--watch` says so."""
    traces_thinned: int = 0
    """Pages of `--trace-batches` that were not sent: the job's store has no room for all."""
    groups_not_shown: int = 0
    """Process groups that found no room in its table of them: a hang in one is explained with less."""
    calling_child: int = 0
    """Process id of a child process of it that has called a module and was not watched; 0: there was none."""
    rows_interrupted: int = 0
    """Rows that were being read on a device when a signal's handler raised."""
    loss: float = -1.0
    """The absolute value of the loss of the newest batch that its agent has read, to 8 bits; -1: none."""

    @property
    def rows_gone(self) -> int:
        """Rows that were lost, for whatever reason."""
        return self.rows_lost + self.rows_interrupted

    @property
    def events_lost(self) -> int:
        """Lost records that may have reported something bad. Names cannot."""
        return max(0, self.records_lost - self.names_lost)


class HotModule(msgspec.Struct, frozen=True):
    """A module whose output was close to its dtype's limit in the last batch inspected."""

    rank: int
    batch: int
    module: str
    dtype: str
    abs_max: float
    left: float
    """Powers of two up to the limit."""
    change: float
    """Powers of two a batch, over the last few batches."""


class GpuNow(msgspec.Struct, frozen=True, array_like=True):
    """How NVML found a GPU last."""

    uuid: str
    use: float
    """Share of the time in which a kernel ran on it; -1: not known."""
    memory: float
    """Share of its memory that is in use; -1: not known."""
    temperature: float = -1.0
    """In degrees Celsius; -1: not known."""
    power: float = -1.0
    """In watts; -1: not known."""


class HostNow(msgspec.Struct, frozen=True, array_like=True):
    """How a node's processors and memory were read last: shares that are in use; -1: not known."""

    cpu: float = -1.0
    memory: float = -1.0


class NodeBeat(msgspec.Struct, frozen=True, tag="beat"):
    """The node is alive. It says where its ranks are."""

    ranks: list[RankState]
    pages_dropped: dict[int, int]
    sent_ns: int = 0
    """This host's clock. The acknowledgement returns it."""
    clock_offset_ns: int | None = None
    """By how much the collector's clock is ahead of this host's; None: not measured yet. It decides nothing."""
    clock_round_trip_ns: int | None = None
    """Duration of the exchange that measured the offset. The offset is uncertain by half of this."""
    hot: bytes = b""
    """Its ranks' modules closest to their limit (`pack_list` of HotModule), while somebody watches live. It decides
    nothing."""
    gpus: bytes = b""
    """Its GPUs (`pack_list` of GpuNow), while somebody watches live. It decides nothing."""
    figures: bytes = b""
    """Its processors and memory (`pack_list` of one HostNow), while somebody watches live. It decides nothing."""
    looks: bytes = b""
    """Where its ranks stand (`pack_list` of RankLook), where a viewer has asked. It decides nothing."""


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


def pack_list(found: list[HotModule] | list[GpuNow] | list[HostNow] | list[RankLook]) -> bytes:
    """For a beat; b"" for none."""
    return _encoder.encode(found) if found else b""


def closest_modules(found: Iterable[HotModule], most: int) -> list[HotModule]:
    """The `most` modules with the least left, the closest first. A module that several ranks report counts once."""
    chosen: dict[str, HotModule] = {}
    for hot in sorted(found, key=lambda hot: hot.left):
        chosen.setdefault(hot.module, hot)
    return list(chosen.values())[:most]


def unpack_list(data: bytes, kind: type[T]) -> list[T]:
    """Unpack such a list from a beat. [] for bytes that no agent sends."""
    with suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return msgspec.msgpack.decode(data, type=list[kind]) if data else []  # type: ignore[valid-type]
    return []


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
