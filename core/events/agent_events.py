"""What a node agent tells of a rank: how it ended or stalled, and what it saw in the rank's recorder."""

from __future__ import annotations

import msgspec

from .rank_standing import EndedPart, GroupState, HeardSignal, StackLine, ThreadSeen
from .run_position import RankEvent


class WorkerExit(RankEvent, frozen=True, tag="worker_exit"):
    """A worker process ended, or nobody watches it any more. A negative code is a signal.

    `by` is `itself` or `torchrun`. Where the launch was killed, it is `unknown` for a process that was gone by then,
    and `running` for one that was not. Then `code` is None.
    """

    code: int | None
    by: str
    phase: str = ""
    module: str | None = None
    cls: str | None = None
    groups: list[GroupState] = []
    """Where it stood in its process groups."""
    memory_kills: int = 0
    """If the rank ended badly: how many processes of its memory cgroup the kernel has killed for lack of memory since
    the rank began."""
    stack: list[StackLine] = []
    """If a fatal signal ended the rank: the stack of the thread that received it, innermost call first."""
    main: list[StackLine] = []
    """The main thread's, if another one got the signal, or as it was just before the rank's launcher stopped it, as
    another rank had failed."""
    state: str = ""
    """Of a rank that its launcher stopped: the process's state before, a letter as in /proc/PID/stat; "" is unknown."""
    busy: float = 0.0
    """And the share of one core that it used."""
    still_s: float = 0.0
    """Seconds since it had last recorded anything, when it was asked, or as it ended by itself; 0: unknown."""
    shm_free: int = -1
    """If SIGBUS ended the rank: bytes that were left in /dev/shm; -1: not known."""
    ended_ns: int = 0
    """By the host's own clock: when a fatal signal came, if the rank left its stack; else when its agent saw the
    process ending, or its launcher reported the end. 0: unknown."""
    alive_ns: int = 0
    """When its agent last saw the process not ending; 0: unknown. It ended between this and `ended_ns`."""
    heard: list[HeardSignal] = []
    """Signals that had reached handlers of its script."""
    memory_limit: int = 0
    """Where `memory_kills` is not 0: bytes that the cgroup may use; 0: it has no limit."""
    memory_peak: int = 0
    """And the most bytes that it has used; 0: unknown."""
    resident: int = 0
    """If the rank ended badly: the most bytes that its agent has seen it to have in memory; 0: unknown."""
    after: EndedPart = ""
    """In phase `script`: what ended last in its last batch."""

    @property
    def runs_on(self) -> bool:
        """Whether the process had not ended when its launch was killed. It has no end that is known."""
        return self.by == "running"


class RankStall(RankEvent, frozen=True, tag="stalled"):
    """A node agent saw a rank not move for longer than its limit, or wait for what cannot come."""

    limit_s: float
    timeout_s: float = 0.0
    """Of its process group, which ends the job before its own limit would be reached; 0: the limit is its own."""
    mismatch_s: float = 0.0
    """How long all members of a group of its node had stood in operations that do not match, before the limit was
    reached; 0: that is not why it is told."""


class RankLook(RankEvent, frozen=True, tag="look"):
    """Where a rank stood when all ranks were asked, because one of them had stalled. Its node agent writes it."""

    number: int
    """Which time of asking."""
    still_s: float
    """Seconds since the rank last moved, as its agent saw it."""
    phase: str
    module: str | None = None
    cls: str | None = None
    state: str = ""
    """The process's state, a letter as in /proc/PID/stat; "" is unknown."""
    busy: float = 0.0
    """Share of one core that it used meanwhile."""
    stack: list[StackLine] = []
    """The main thread's calls, innermost first; [] if it did not answer."""
    groups: list[GroupState] = []
    """Where it stands in its process groups."""
    limit_s: float = 0.0
    """How long it may rest where it stands; 0: unknown."""
    native: list[StackLine] = []
    """If the rank did not answer: native calls inside the innermost call of `stack`, as py-spy reads them."""
    threads: list[ThreadSeen] = []
    """If the rank did not answer: its threads, as Linux lists them, the main thread first."""
    after: EndedPart = ""
    """As of WorkerExit."""
    moved: bool = False
    """It moved while it was looked at: the stack is of another moment than all else."""


class SeenLine(msgspec.Struct, frozen=True):
    """A line of the script at which a rank was seen."""

    line: StackLine
    count: int
    calls: str = ""
    """What it called there in most of these looks, if that has frames of Python: `__next__ of dataloader.py`."""


class SlowRankLooks(RankEvent, frozen=True, tag="slow_rank_looks"):
    """Where a slow rank was in its own time, in which it waits for nobody. Its node agent sends it now and then, with
    all looks so far."""

    looks: int
    lines: list[SeenLine] = []
    """The most frequent ones first."""


class StepTimes(RankEvent, frozen=True, tag="step_times"):
    """How long the parts of a rank's steps took on its host. Its node agent sends it when the rank has ended."""

    timed: int
    """Steps that were timed."""
    total_s: list[float]
    """Sum over all timed steps: seconds in each part (core/recorder/layout.py)."""
    steps: bytes
    """A sample of them, packed (core/wire/columns.py)."""
    began_ns: int = 0
    """When the first of all began, by the host's clock, to about 0.1 s; 0: not known, as some steps were not read."""
    starts: bytes = b""
    """When each of the sample began after that, packed; b"" where it is not known."""


class LimitForecast(RankEvent, frozen=True, tag="forecast"):
    """What a module returns grows, and passes its dtype's limit soon if it goes on so (launcher/agent/forecast.py).

    Its node agent sends it while the rank runs, once for each module, in the batch of `where`. It decides nothing.
    """

    module: str
    cls: str
    dtype: str
    limit: float
    abs_max: float
    """In that batch."""
    after: int
    """The limit is passed this many batches later,"""
    earliest: int
    latest: int
    since: int = 0
    """The first batch that it was made from."""


class ZeroedGradients(RankEvent, frozen=True, tag="zeroed_gradients"):
    """An optimizer was handed nothing but zeros, where the backward had made others. `where` is the first such batch.

    From `module` on it is about the largest of these gradients, and about the batch that has it.
    """

    batches: int
    """In how many batches, of those with a step that were read."""
    of: int
    """How many these are."""
    last: int
    """The last such batch."""
    module: str
    cls: str
    role: str
    """`grad weight`"""
    dtype: str
    abs_max: float
    """As the backward made it."""
    norm_least: float = 0.0
    """The norm of all gradients of that dtype in that batch is at least this,"""
    norm_most: float = 0.0
    """and at most this."""
    is_scaled: bool = False
    """A GradScaler has scaled the loss: these numbers contain its scale."""


class UnmovedWeights(RankEvent, frozen=True, tag="unmoved_weights"):
    """The weights of a root had the same numbers over many steps, with gradients all the time. `where`: the first."""

    steps: int
    """After how many of them the weights were seen,"""
    of: int
    """of this many."""
    weights: int
    """How many have a gradient, and were compared."""
    module: str
    """From here on: the weight with the largest number."""
    cls: str
    role: str
    dtype: str
    abs_max: float
    abs_min: float
    is_stepped: bool = False
    """The optimizer that stepped has these weights, or one of them."""


class StoppedGradient(RankEvent, frozen=True, tag="stopped_gradient"):
    """A gradient reached an activation and none passed it, in many batches up to the last. `where`: the first of them.

    So the weights of the module in front of it got gradients that were exactly zero (core/recorder/gradient_stops.py).
    """

    batches: int
    """In how many of those that were read."""
    last: int
    """The last one."""
    module: str
    """The one whose weights got nothing."""
    cls: str
    activation: str
    """What it handed its output to; "" if that is no module of its own: a function, or one that is called again."""
    activation_cls: str
    behind: str
    """Then: the next module, which was handed nothing but zeros."""
    behind_cls: str
    given: float
    """abs max of what the module returned, in the last one;"""
    least: float = 0.0
    """of what the activation made of it, abs min"""
    most: float = 0.0
    """and abs max, in all of them."""
    arrived: float = 0.0
    """abs max of the gradient that reached the activation, or the module behind it."""


class UnmovedParts(RankEvent, frozen=True, tag="unmoved_parts"):
    """Weights that many steps have left as they were, with gradients, while each moved others. `where`: the first."""

    batches: int
    """With such a step, of those that were read: the fewest of any of these weights."""
    last: int
    """The last one."""
    moved: int
    """How many weights have moved."""
    names: list[str]
    """`fc1.weight`: those that have not. From here on the first of them."""
    dtype: str
    abs_max: float
    gradient: float
    """abs max of its gradient that a step was handed, in all these batches."""


AgentEvent = (
    WorkerExit
    | RankStall
    | RankLook
    | SlowRankLooks
    | StepTimes
    | LimitForecast
    | ZeroedGradients
    | UnmovedWeights
    | StoppedGradient
    | UnmovedParts
)
