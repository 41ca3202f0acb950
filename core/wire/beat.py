"""How a node and its ranks are: what its agent sends anew with each beat. The next beat replaces a lost one."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Literal, TypeVar

import msgspec

from ..events.agent_events import RankLook

T = TypeVar("T")

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
    has_frames: bool = False
    """It has recorded more than losses, in its last batches or long before. An earlier recorder does not say."""

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
    launch_holds: bool = False
    """The launch holds this connection, too: it is closed once both have ended. An earlier agent does not say."""


def pack_list(found: list[HotModule] | list[GpuNow] | list[HostNow] | list[RankLook]) -> bytes:
    """For a beat; b"" for none."""
    return msgspec.msgpack.encode(found) if found else b""


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
