"""What a worker appends to its recorder's log: names, each interned once, and events.

A row or a frame names its module, role and shape by number. The definitions here give the numbers their meaning. New
fields go at the end and have defaults, so that an old worker can talk to a new collector.
"""

from __future__ import annotations

import math
from enum import IntFlag
from pathlib import PurePath
from typing import Literal

import msgspec

from .frames import FramePhase, format_number
from .marked_line import shown_line
from .preflight import BandwidthRow, Grade, InventoryFacts, PreflightFinding
from .text import joined


class RootDef(msgspec.Struct, frozen=True, tag="root"):
    """A root module. `ordinal` counts the roots of one class in the order of their first call."""

    id: int
    cls: str
    ordinal: int = 0

    @property
    def label(self) -> str:
        """`Net`, or `Net#2` for the second root of class Net."""
        return self.cls if self.ordinal == 0 else f"{self.cls}#{self.ordinal + 1}"


def split_label(label: str) -> tuple[str, int]:
    """(class, ordinal) of a root's label.

    >>> split_label("Net#2")
    ('Net', 1)
    """
    cls, _, number = label.partition("#")
    return cls, int(number) - 1 if number.isascii() and number.isdigit() else 0


class ModuleDef(msgspec.Struct, frozen=True, tag="module"):
    """A module under a root, named as the user wrote it ("" is the root itself)."""

    id: int
    root: int
    name: str
    cls: str


class SlotDef(msgspec.Struct, frozen=True, tag="slot"):
    """(module, role): what a row is about."""

    id: int
    module: int
    role: str


class ShapeDef(msgspec.Struct, frozen=True, tag="shape"):
    """A tensor shape."""

    id: int
    dims: tuple[int, ...]


Definition = RootDef | ModuleDef | SlotDef | ShapeDef


class RunPosition(msgspec.Struct, frozen=True):
    """A place in the run. `seq` counts what the rank had issued on all its process groups, messages too.

    -1 is unknown: no batch has begun, or there is no process group. `time_ns` is the host's own clock.
    """

    rank: int
    attempt: int = 0
    step: int = 0
    batch: int = -1
    root: str = ""
    page: int = -1
    seq: int = -1
    time_ns: int = 0
    clock: dict[str, int] = {}
    """Name of a process group -> collectives that the rank had issued on it; -1: it counts nothing."""
    sent: dict[str, dict[int, int]] = {}
    """Name of a process group -> rank of the peer (-1: not known) -> sends that the rank had begun."""
    received: dict[str, dict[int, int]] = {}
    """Likewise the receives that had reached their end."""

    @property
    def collectives(self) -> int:
        """How many collectives the rank had issued on all groups that count; -1 if that is not known.

        Sums of two ranks can stand beside each other, and put nothing in order.
        """
        return sum(max(0, count) for count in self.clock.values()) if self.clock else self.seq


class RankEvent(msgspec.Struct, frozen=True):
    """An event of one rank: each says where in the run it happened."""

    where: RunPosition


class IssuedMoment(msgspec.Struct, frozen=True):
    """What a rank had issued when its frames had the number `seq`: see Where."""

    seq: int
    clock: dict[str, int] = {}
    sent: dict[str, dict[int, int]] = {}
    received: dict[str, dict[int, int]] = {}


class NotedCollective(msgspec.Struct, frozen=True):
    """One of the last collectives that a rank had issued on a process group."""

    group: str
    number: int
    operation: str
    dtype: str
    was_read: bool
    """The script has waited for it, and what came out was read then; or its device reads that."""


class OptimizerStep(msgspec.Struct, frozen=True):
    """The optimizer that stepped on a weight, with the settings that are numbers, as in its parameter group.

    `betas=(0.9, 0.999)` is `betas[0]` and `betas[1]`; True is 1.
    """

    cls: str
    """`torch.optim.adamw.AdamW`"""
    settings: dict[str, float] = {}


class OperandNumbers(msgspec.Struct, frozen=True):
    """A tensor that went into an operation or came out of it, or a number."""

    dtype: str
    """`float32`; `number` of Python's own."""
    shape: list[int] | None
    """None for a number."""
    abs_max: float | None
    """None where it is not finite, or was not read."""
    value: str
    """`finite`, `nan`, `+inf`, `-inf`; "" if it was not read."""

    @property
    def is_bad(self) -> bool:
        """It was read, and is not finite."""
        return self.value not in ("finite", "")


class GraphNode(msgspec.Struct, frozen=True):
    """An operation in autograd's graph on the way from a bad gradient towards the loss (worker/explain/graph_users.py).

    Its backward is handed the gradient of what it returned, and makes a part of the gradient of what it used.
    """

    op: str
    """`NativeLayerNormBackward0`"""
    module: str
    """Name of the module in whose innermost call it ran."""
    call: int
    """Tells that call from others of the list; -1: it ran in no call, and `module` says nothing."""
    users: list[int] = []
    """Positions in the list of the operations that used what it returned. Always empty for an output."""
    output: bool = False
    """It returned an output of that call: a frame shows the gradient that its backward is handed."""
    passes: bool = False
    """Its backward makes finite gradients of finite ones: it moves, masks or adds them."""
    operands: list[str] = []
    """For a sum or an elementwise product: the modules that returned its operands. Others are left out."""
    product: bool = False
    """It is an elementwise product of two tensors of one shape, and modules returned both."""
    opaque: bool = False
    """It is a torch.autograd.Function, in whose forward modules may have been called."""
    exponent: float | None = None
    """Of a power by a number."""


class BadWeight(msgspec.Struct, frozen=True):
    """A weight that was finite when it was last read, and is not now."""

    module: str
    cls: str
    role: str
    value: str
    """`nan`, `+inf`, `-inf`"""
    dtype: str


class OwnCodeModule(msgspec.Struct, frozen=True):
    """A module whose own code may have made a value."""

    module: str
    cls: str
    op: str
    """The earliest node of autograd's graph that it has made there: `MulBackward0`."""


class HeldValue(msgspec.Struct, frozen=True):
    """An attribute of a module, no parameter and no buffer, that holds a bad value."""

    module: str
    cls: str
    name: str
    value: str


class ReducedElement(msgspec.Struct, frozen=True):
    """The first element of a sum over the ranks that is not finite."""

    index: list[int]
    own: float | None = None
    """What this rank had there before the sum; None: not known (`--explain N` keeps large numbers)."""


class ScriptTensor(msgspec.Struct, frozen=True):
    """A tensor in a local variable of the script, and the line that assigned it last, as far as its source tells."""

    name: str
    """`loss`; `grads[1]` in a list."""
    function: str
    """`Trainer.step`; `<module>` outside of functions."""
    file: str
    line: int
    """0: unknown."""
    code: str
    uses: list[str]
    """Names on the right side of that line."""
    ops: list[str]
    """Functions, methods and operators there: `std`, `div`."""
    numbers: OperandNumbers
    nodes: list[str] = []
    """Operations in its graph that were handed numbers outside of their domain: `DivBackward0`."""
    counts: bool = False
    """It is what a backward began from; or the line depends on it that began the backward, or that ended the script, or
    a condition around that."""

    @property
    def is_bad(self) -> bool:
        """It was read, and is not finite. A mask is -inf, too: that is bad in a single number that counts alone."""
        if self.numbers.value == "-inf":
            return self.counts and math.prod(self.numbers.shape or ()) == 1
        return self.numbers.is_bad


class LookedAgain(msgspec.Struct, frozen=True):
    """What was in the module of a rank's first alarm when that was raised: name -> `finite`, `nan`, `+inf`, `-inf`."""

    weights: dict[str, str] = {}
    shards: dict[str, str] = {}
    """Of FSDP2: this rank's own parts of the weights."""
    buffers: dict[str, str] = {}
    """Those that are not finite."""
    autocast: str = ""
    """The dtype that autocast computed in; "" where it was off."""
    optimizer: OptimizerStep | None = None
    """Whose step was the last before, with the settings of its first parameter group."""
    changed: list[str] = []
    """Weights of the whole model that were changed since they were last read: `weight of `enter` (Linear), abs max
    1.00e+00 then, 1.00e+38 now`. A script, or a flipped bit, can do that without a trace."""
    same_step: bool = True
    """No optimizer step has run since. After one, a weight may be bad because of the alarm."""
    graph: list[GraphNode] = []
    """If a gradient is bad: the operations that used its tensor; the first node made it. Empty if they are unknown."""
    loss_scale: float | None = None
    """The scale of the GradScaler that scaled a loss last; None if there was none."""
    bad_weight: BadWeight | None = None
    """The first of `changed` that is not finite."""
    threads: bool = False
    """Modules were called in another thread within that forward. These calls have no frames."""
    computed: list[str] = []
    """Weights of the module that the script has computed, as for `torch.func.functional_call`."""
    own_code: list[OwnCodeModule] = []
    """Modules whose own code lies between the bad value of a forward and what frames show, the earliest first. Empty
    where autograd's graph does not tell."""
    own_code_of: str = ""
    """The role of that value in the alarm's frame."""
    held: list[HeldValue] = []
    """Bad values in attributes, over the whole model. No frame shows attributes."""
    left: bool = False
    """A parameter's gradient was not finite before the backward began that has added to it."""
    closed: list[str] = []
    """Roles of masks on a device that calls of the module were handed in that batch, -inf throughout in a row."""
    without_graph: bool = False
    """Autograd has recorded nothing of the call, whose class is not torch's own: nothing shows what
    it used beside its arguments."""
    bad_before: list[HeldValue] = []
    """Buffers of the whole model that were not finite before its forward, without the -inf and inf that they had from
    the start."""
    element: str = ""
    """Which elements of a gradient, a weight after a step, or a state are not finite, in words."""
    update: str = ""
    """For a weight after a step: what the step had for its first bad element: `gradient 0, exp_avg_sq 0, eps 0: 0/0 at
    [3, 5]`."""
    reduced: ReducedElement | None = None
    """For a gradient that was finite before it was reduced."""
    losses: list[OperandNumbers] = []
    """Of a backward: the tensors that it began from, with a loss scale where there is one. Empty if they are gone."""
    script: list[ScriptTensor] = []
    """Where one of `losses` is not finite, or the script may have changed a gradient before a step: the tensors in its
    variables, bad ones first."""


class Anomaly(RankEvent, frozen=True, tag="anomaly"):
    """The first frame of a batch with a non-finite value that is not an expected one."""

    frame: int
    module: str
    cls: str
    phase: FramePhase
    role: str
    value: str
    dtype: str
    shape: list[int] | None = None
    inputs_finite: bool = True
    weights_finite: bool = True
    aborts: bool = False
    cause: str = ""
    """Why an expected value became an alarm: `GradScaler skipped 12 steps in a row (scale 16)`."""
    collectives: int = 0
    """How many collectives were issued during the module's call."""
    optimizer: OptimizerStep | None = None
    """The optimizer whose step came before a weight was found non-finite, if it is known."""
    again: LookedAgain | None = None
    """What a second look at the module has found. Only a rank's first alarm has it."""
    moments: list[IssuedMoment] = []
    """What the rank had issued before, the latest last. Only a rank's first alarm has it."""
    collectives_before: list[NotedCollective] = []
    """The last ones on each process group when the alarm was raised. Only a rank's first alarm has them."""
    looks: bool = False
    """The rank goes on for up to SECOND_RUN_S: a SecondRun or a ForwardCaptured follows."""


SECOND_RUN_S = 20.0


EVERYTHING = "everything"
"""What `element` says if no element is finite."""
NOTHING, SAMPLES = "nothing", "samples"
"""What a trial of a forward has changed."""


class CauseTrial(msgspec.Struct, frozen=True):
    """An experiment after an alarm: an operation, or a forward, has run once more with one thing changed."""

    of: str
    """`operation`: alone, on its own operands; `forward`: that of the second run."""
    changed: str
    """`nothing`; `float32`, `bfloat16`, `float64`: computed in that dtype; `samples`: those that stand out replaced by
    one that does not."""
    value: str = ""
    """What came out: `finite`, `nan`, `+inf`, `-inf`; "" if it did not run."""
    abs_max: float | None = None
    note: str = ""
    """Why it did not run, as a clause."""


class OddSamples(msgspec.Struct, frozen=True):
    """Indices along dim 0 of one argument of a call that stand out from the others: samples, if dim 0 counts those.

    They are also the only ones along dim 0 of the bad tensor that hold the bad value.
    """

    module: str
    """The module that was handed them."""
    role: str
    """`input[0]`, `kwargs.x`"""
    indices: list[int]
    """Along dim 0."""
    size: int
    """Of dim 0."""
    how: str
    """`large`, `zero`, or `constant`"""
    abs_max: float
    """The largest of theirs."""
    highest: float
    """The largest abs max of the other samples."""
    before: float | None = None
    """The largest abs max of that argument in earlier batches; None if none of them is known."""


class BadOperation(msgspec.Struct, frozen=True):
    """The operation that made a non-finite value in a second run of a forward, or in a batch of --explain N."""

    op: str
    """`aten.mul.Tensor`"""
    module: str
    """Name of the innermost module in whose forward it ran."""
    file: str
    line: int
    """The innermost line of the script's own code, or of a library that is not torch."""
    code: str
    """That line."""
    inputs: list[OperandNumbers]
    output: OperandNumbers
    element: str
    """Which elements are not finite, in words (worker/record/bad_elements.py)."""
    node: str = ""
    """In a backward: `SqrtBackward0`. Then `code` is the line of the forward whose backward it is."""
    handed: list[float] = []
    """What an operation that works element by element was handed for its first bad element, in the order of `inputs`.
    [] for other operations."""
    trials: list[CauseTrial] = []
    """Of the operation alone. [] if none was made."""
    columns: tuple[int, int] | None = None
    """The operation's part of `code`: its first character, and the one behind its last. It ends with the line, if the
    operation goes on in the next one. None: not known. Python 3.10 has none, nor have autograd's notes of a forward."""


def operation_text(found: BadOperation, width: int = 0) -> str:
    """One line: the code, in `width` characters if that is given, its place, the operation, and the numbers.

    `scores = q @ k`, model.py:87, aten.mm.default: abs max 3.20e+20 and 3.00e+36 in, inf out (float32 [8]); everything
    """
    sizes = [format_number(each.abs_max).strip() if each.value == "finite" else each.value for each in found.inputs]
    sizes = list(filter(None, sizes))
    given = f"abs max {joined(sizes)} in, " if sizes else ""
    line = shown_line(found.code, found.columns, width) if width else found.code
    code = f"`{line}`, " if line else ""
    place = f"{code}{PurePath(found.file).name}:{found.line}, " if found.file else ""
    place += f"in its backward ({found.node}), " if found.node else ""
    made = found.output
    return f"{place}{found.op}: {given}{made.value} out ({made.dtype} {made.shape}); {found.element}"


class SecondRun(RankEvent, frozen=True, tag="second_run"):
    """The forward in which a rank's first alarm was raised has run a second time, or could not. Or its batch is that of
    --explain N, and has run under the same watch from the start."""

    operation: BadOperation | None = None
    unknown: str = ""
    """Why it is None: a sentence without its full stop."""
    eagerly: bool = False
    """The call had run compiled code."""
    samples: OddSamples | None = None
    trials: list[CauseTrial] = []
    """Of the forward."""
    cls: str = ""
    """Class of the operation's module; "" where that is not known."""


class CaptureFile(msgspec.Struct, frozen=True):
    """The forward of an alarm as a file, with its weights and its inputs, or why there is none."""

    path: str = ""
    bytes: int = 0
    module: str = ""
    """`attn (model.Attention)`: its name in the model, and its class."""
    needs_trust: bool = False
    """To run it again, code must be imported, or objects unpickled."""
    notes: list[str] = []
    refused: str = ""
    """A clause; "" where there is a file."""


class ForwardCaptured(RankEvent, frozen=True, tag="captured"):
    """`--capture`, at a rank's first alarm."""

    file: CaptureFile


class RangeWarning(RankEvent, frozen=True, tag="warned"):
    """A value near overflow or in underflow: the first of its kind in one row of one module.

    All are finite but a loss of float16 (core/judge.py).
    """

    kind: str
    """`near overflow` or `underflow`"""
    module: str
    cls: str
    phase: FramePhase
    role: str
    dtype: str
    abs_max: float | None = None
    headroom: float | None = None
    zeros: float | None = None
    subnormals: float | None = None


class ScalerSkip(RankEvent, frozen=True, tag="scaler_skip"):
    """A GradScaler has skipped an optimizer step because of non-finite gradients. `scale` is the scale that they had.

    `module`, `role` and `value` are those of the first bad gradient that was seen in the batch.
    """

    scale: float
    in_a_row: int
    module: str | None = None
    cls: str | None = None
    role: str | None = None
    value: str | None = None


class IgnoredAlarm(RankEvent, frozen=True, tag="ignored"):
    """The first alarm of one row of one module that a rule of the user's (`--ignore`) has waived."""

    pattern: str
    module: str
    role: str
    value: str


LedNowhere = Literal["", "taken away", "no gradient", "not trained"]
"""Why a bad value is a notice and no alarm.

"": nan of a mask of -inf, and a call around it took it away. `taken away`: a call around it returned something that
cannot come of it. `no gradient`: a weight that no output shows, and that gets no gradient. `not trained`: a model that
no optimizer holds and no backward reached returned it.
"""


class AbsorbedValue(RankEvent, frozen=True, tag="absorbed"):
    """The first bad value of one row of one module that led nowhere."""

    module: str
    cls: str
    role: str
    value: str
    dtype: str
    by: str = ""
    """Name of the module that took it away."""
    why: LedNowhere = ""


class BatchInputs(RankEvent, frozen=True, tag="batch_inputs"):
    """What the model was handed in the batch of a rank's first alarm: role -> digest (worker/record/names.py)."""

    digests: dict[str, str]
    bad: dict[str, str] = {}
    """Role -> which elements are nan or +inf, in words (worker/record/bad_elements.py)."""


class BatchSource(RankEvent, frozen=True, tag="batch_source"):
    """Which samples the model was handed in the batch of a rank's first alarm (worker/explain/batch_source.py).

    A batch of a DataLoader that holds the same numbers was found.
    """

    dataset: str = ""
    """Its class: `mine.data.Images`; "" where no batch was found."""
    indices: list[int] = []
    """Of the data set, for each position in dim 0 of what the model was handed; [] if they are not known."""
    keys: dict[str, list[str]] = {}
    """Likewise what the batch carries of its samples: `path`, `id`; `index` where the indices are no integers."""
    epoch: int = -1
    """How often the loader had been iterated before; -1: not known."""
    ordinal: int = -1
    """Number of the batch in that epoch, from 0; -1: not known."""
    worker: int = -1
    """The worker that made it; -1: the process of the rank; -2: not known."""
    unknown: str = ""
    """Why `indices` is empty: a clause."""
    among: list[int] = []
    """All indices of the batch, where it is not known which one is where in dim 0."""


MOST_PASSED, MOST_PASSED_ALIKE = 512, 32
"""A rank sends so many PassedTensor in all, and of one operation with one peer in one group, of one size: a metric that
is nan leaves room for others. It may have seen more."""


class PassedTensor(RankEvent, frozen=True, tag="passed"):
    """A tensor that went into a collective, a send or a receive, or came out of it, and was not finite."""

    operation: str
    """As in core/recorder/group_table.py: `all_reduce`, `recv`."""
    group: str
    members: str
    """Ranks as text, `0-6:2,7`; "" is unknown."""
    number: int
    """Counts the collectives of its group; for a message, those between the same sender and receiver with its tag."""
    peer: int = -1
    """Rank in the job of the root, or of whom it is sent to or received from; -1: none, or not known."""
    tag: int = 0
    came_out: bool = False
    """False: it went in."""
    value: str = "nan"
    """`nan`, `+inf`, `-inf`, `inf`"""
    dtype: str = ""
    elements: int = 0
    given: str = ""
    """What this rank has put in: `finite`, `not finite`; "": nothing, or it was not inspected."""
    given_max: float | None = None
    """abs max of that, where it was finite."""
    element: str = ""
    """Which elements are not finite, in words; "" if it was not read again: on a device, or where one of its kind
    was reported before."""
    reduced: ReducedElement | None = None
    """In the batch of `--explain N`, of what came out."""


class NotLookedInto(RankEvent, frozen=True, tag="not_looked_into"):
    """A module in which compiled code runs that no frame shows.

    torch.compile broke its graph in the call around it, or has compiled it again.
    """

    module: str
    cls: str
    around: bool = True
    """A frame shows what goes in and comes out."""


class WatchChoice(RankEvent, frozen=True, tag="watch_choice"):
    """`--every auto`: one step in `every` is watched whole from this batch on, as watching each costs so much.

    With `alert` it is each one for a while, and that is why.
    """

    every: int
    cost: float = 0.0
    """A share of a step's time."""
    margin: float = 0.0
    """The share is within this of the true one in about 19 of 20 cases."""
    alert: str = ""
    """`near overflow in output of head`"""


def choice_text(choice: WatchChoice) -> str:
    """A clause.

    >>> choice_text(WatchChoice(RunPosition(0, batch=52), 8, 0.1432, 0.02))
    'watching every step cost 14 % of its time (give or take 2 %): one step in 8 is watched whole from batch 52 on'
    >>> choice_text(WatchChoice(RunPosition(0, batch=812), 1, alert="a forecast"))
    'every step is watched whole for a while from batch 812 on: a forecast'
    """
    since = f"from batch {choice.where.batch} on"
    if choice.alert:
        return f"every step is watched whole for a while {since}: {choice.alert}"
    which = "every step is" if choice.every == 1 else f"one step in {choice.every} is"
    cost = f"watching every step cost {100 * choice.cost:.0f} % of its time (give or take {100 * choice.margin:.0f} %)"
    return f"{cost}: {which} watched whole {since}"


class CompiledUnseen(RankEvent, frozen=True, tag="compiled_unseen"):
    """Modules were compiled, and gpuwatch cannot see everything inside them with this torch. Once for each process."""

    text: str
    """torch 2.11: gradients inside of compiled modules are not inspected"""
    calls: bool = False
    """The calls of the modules, too, and not their gradients alone."""


class UnmeasuredTensor(RankEvent, frozen=True, tag="unmeasured"):
    """The first tensor with floats that gpuwatch cannot read, such as one of a class of the script's own."""

    module: str
    cls: str
    role: str
    dtype: str
    """`float32`"""


class HashFlag(IntFlag):
    """What happened to a tensor since it was hashed before."""

    REPLACED = 1
    """It is another object, or the first."""
    WRITTEN = 2
    """It was written in place, as far as torch's version counts that."""


class ReplicaHashes(RankEvent, frozen=True, tag="hashes"):
    """Hashes of the weights and buffers that a rank holds whole, when a batch of a root began, or at the end.

    Ranks that hold replicas have equal hashes. Shards have none.
    """

    table: int
    """Counts the tables of a root from 1."""
    hashes: bytes
    """uint32, little-endian, one for each line of the table."""
    flags: bytes
    """`HashFlag`, one byte for each."""
    tensors: list[str] = []
    """The table, where it is a new one: lines such as `w fc1.weight float32 [4, 4]`; `b` is a buffer."""


class LooseParameters(RankEvent, frozen=True, tag="loose_parameters"):
    """An optimizer steps on parameters of the script's own: no module has them that was called. Once for each class."""

    optimizer: str
    """Its class."""
    parameters: int
    unread: int = 0
    """How many of `parameters` are on a device: nobody reads them."""


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


class UnreadStates(RankEvent, frozen=True, tag="unread_states"):
    """An optimizer was freed before what it keeps in 16 bits or less was read after its last step."""

    optimizer: str
    """Its class."""
    steps: int
    """How many steps since it was read."""


class ReplacedFunctions(RankEvent, frozen=True, tag="replaced"):
    """All functions of torch and Python that gpuwatch has replaced in this rank."""

    names: dict[str, list[str]]
    """Class or module -> its attributes."""


class ScriptError(RankEvent, frozen=True, tag="script_error"):
    """The user's script raised; `module` is the innermost module that was running."""

    error: str
    message: str
    traceback: str
    module: str | None = None
    peer_failure: bool = False
    """The exception says only that another rank is gone."""
    tensors: list[ScriptTensor] = []
    """Those in the script's variables, bad ones first, if the message speaks of nan and one of them is not finite."""


class ScriptExit(RankEvent, frozen=True, tag="script_exit"):
    """The user's script ended or called sys.exit."""

    code: int
    tensors: list[ScriptTensor] = []
    """As in ScriptError; [] for code 0."""
    handler: int = 0
    """The signal whose handler called sys.exit; 0: none."""


class LeftGroup(RankEvent, frozen=True, tag="left_group"):
    """The script has destroyed its default process group by itself, and every number of before was judged."""


class MeshCoordinates(RankEvent, frozen=True, tag="mesh"):
    """Where the rank is in a DeviceMesh whose dimensions have names."""

    coordinates: dict[str, int]


class PreflightBegan(RankEvent, frozen=True, tag="preflight_began"):
    """A stage of the preflight began on this rank. The rank hangs or died in a stage that has not ended."""

    stage: str
    limit_s: float = 0.0
    """Its deadline on this rank."""


class PreflightStage(RankEvent, frozen=True, tag="preflight_stage"):
    """A stage of the preflight ended on this rank."""

    stage: str
    seconds: float
    detail: str = ""
    grade: Grade = "ok"


class RankOutcome(msgspec.Struct, frozen=True):
    """The result of the preflight for one rank, in the words of `PreflightResult`."""

    rank: int
    outcome: str
    stage: str = ""
    detail: str = ""


class PreflightResult(RankEvent, frozen=True, tag="preflight_result"):
    """This rank's conclusion. `outcome` is ok, failed (its own fault), victim (it waited for others) or skipped."""

    outcome: str
    stage: str = ""
    detail: str = ""
    stops: bool = False
    backend: str = ""
    device: str = ""
    peers: list[RankOutcome] = []
    """The other ranks that failed or waited. torchrun stops ranks when the first one ends, so some cannot write."""
    findings: list[PreflightFinding] = []
    """What the preflight found in all ranks. Each rank has the same list."""


class BandwidthRows(RankEvent, frozen=True, tag="bandwidth"):
    """What this rank measured in the bandwidth test, one row per size."""

    rows: list[BandwidthRow]


class RankInventoryEvent(RankEvent, frozen=True, tag="inventory"):
    """What the rank runs on, read after torch was imported."""

    device: str
    versions: dict[str, str]
    facts: InventoryFacts | None = None


_COST_FRAMES = (
    "forward pre-hook, forward hook, before the optimizer step, after the optimizer step, an optimizer of RPC, "
    "GradScaler, gradient hook, parameter hook, end of the backward, a compiled forward, compiled modules, "
    "compiled backward, detect_overflow, process groups, what passes, device, graph, a second look, "
    "the weights of a step, the step of a weight, attach, settle, run, recorder"
)
_COST_EVIDENCE = "preflight, collectives, stacks, signals, a second run, buffers, data loaders"
"""Without them an explanation has less evidence."""
SELF_CHECK = "self-check"
"""The part of a fault that says that a kernel, or a copy, gave wrong numbers on a device, and is off."""
_NOTES = f"hooks, names of torch, device note, native frame writer, log_to, meshes, {SELF_CHECK}"
"""About how frames are read and written, and what else is reported about a rank."""
_LOOK_BACK = "step times, history, forecasts, hottest modules, pages at rest"
"""The node agent's: they look back at frames that it has."""
FAULT_PARTS = dict.fromkeys(_COST_FRAMES.split(", "), True) | dict.fromkeys(
    ", ".join((_COST_EVIDENCE, _NOTES, _LOOK_BACK)).split(", "), False
)
"""The parts of gpuwatch that can fail, and whether frames may be missing after that: one may be bad, or the maker."""


def costs_frames(part: str) -> bool:
    """Whether frames may be missing after a fault of this part, or of one that only another version has.

    >>> costs_frames("forward hook"), costs_frames("stacks")
    (True, False)
    """
    return FAULT_PARTS.get(part, True)


class OwnFault(RankEvent, frozen=True, tag="fault"):
    """An error of gpuwatch itself. It is recorded and shown, and the training goes on."""

    part: str
    """One of FAULT_PARTS; of another version, a word of its own."""
    message: str


class IssuedOperation(msgspec.Struct, frozen=True):
    """One operation that a rank has begun on a process group."""

    number: int
    """Counts the group's collectives from 1 on; below 0: the group's sends and receives, from -1 on."""
    operation: str
    """`all_reduce`, `send`; "" is unknown."""
    dtype: str = ""
    """`float32`; "" is unknown, or there is no tensor."""
    elements: int = 0
    peer: int = -1
    """Rank within the group: the root, or whom it sends to or receives from; -1 is none or any."""
    began_ns: int = 0
    """When it began, by the host's own clock; 0: not known."""
    took_ns: int = 0
    """From then until the host saw its end; 0: it did not."""


class GroupState(msgspec.Struct, frozen=True):
    """What a rank shows of its communication in one process group."""

    name: str
    members: str
    """Ranks as text, `0-6:2,7` (core/recorder/group_table.py); "" is unknown."""
    size: int
    begun: int = 0
    """Number of the last collective that it has begun."""
    ended: int = 0
    """Highest number that it has waited for to its end."""
    phase: str = "none"
    """`issuing`, `waiting`, `failed` (the call or the wait has raised) or `none`."""
    at: int = 0
    """What it issues or waits for now, or did last: see `IssuedOperation.number`."""
    since_s: float = 0.0
    """How long it has been there, in seconds."""
    recent: list[IssuedOperation] = []
    """The last few, by number."""
    pending: int | None = None
    """Number of the first operation that its device has not completed, by NCCL's flight recorder; 0: none; None: not
    known."""
    pending_s: float = 0.0
    """How long its device has had that, in seconds."""
    timeout_s: float = 0.0
    """After how long a wait in it ends the rank, in seconds; 0: not known."""


class StackLine(msgspec.Struct, frozen=True):
    """One call of a stack. Line 0: of a native function."""

    file: str
    line: int
    function: str
    text: str = ""
    """The source, where it could be read."""

    @property
    def shown(self) -> str:
        """`/home/me/train.py:41 in main: dist.all_reduce(loss)`"""
        return f"{self.file}:{self.line} in {self.function}" + (f": {self.text}" if self.text else "")

    @property
    def short(self) -> str:
        """`train.py:41 in main: dist.all_reduce(loss)`, `memcpy of libc.so.6`"""
        name = self.file.rpartition("/")[2]
        return (
            f"{self.function} of {name}" if not self.line else self.shown.removeprefix(self.file[: -len(name) or None])
        )


class ThreadSeen(msgspec.Struct, frozen=True):
    """One thread of a rank, as it was seen from outside."""

    name: str
    state: str = ""
    """A letter as in /proc/PID/stat; "" is unknown."""
    kernel: str = ""
    """The function of the kernel in which it waits: `hrtimer_nanosleep`; "" is none, or not to be seen."""
    system_call: str = ""
    """`clock_nanosleep`; "" as above."""
    at: str = ""
    """`data.py:7 in load`; "" is unknown."""


class HeardSignal(msgspec.Struct, frozen=True):
    """A signal has reached a handler of a rank's script (core/recorder/heard_signals.py). Times by its host's clock."""

    number: int
    time_ns: int = 0
    """When it first came from outside of the rank, and not from its launcher; 0: it did not."""
    batch: int = -1
    """The rank's batch then; -1: before the first one."""
    sender: int = 0
    """The process that sent it; 0: the kernel, or one of another namespace of processes."""
    parent_ns: int = 0
    """When it first came from the rank's parent, its launcher; 0: it did not."""


class WorkerExit(RankEvent, frozen=True, tag="worker_exit"):
    """A worker process ended. `by` is `itself` or `torchrun`. A negative code is a signal."""

    code: int | None
    by: str
    phase: str = ""
    module: str | None = None
    cls: str | None = None
    groups: list[GroupState] = []
    """Where it stood in its process groups."""
    memory_kills: int = 0
    """If SIGKILL ended the rank: how many processes of its node's memory cgroup the kernel has killed for lack of
    memory since the run began."""
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


class RankStall(RankEvent, frozen=True, tag="stalled"):
    """A node agent saw a rank not move for longer than its limit."""

    limit_s: float
    timeout_s: float = 0.0
    """Of its process group, which ends the job before its own limit would be reached; 0: the limit is its own."""


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


class NodeSignal(msgspec.Struct, frozen=True, tag="node_signal"):
    """`gpuwatch launch` ended because of a signal."""

    signal: int
    time_ns: int = 0
    reason: str = ""
    """Why the scheduler ends the job, if it gives a reason: `SLURM: the job has reached its time limit`."""
    down_nodes: list[str] = []
    """Nodes of the job that the scheduler has lost."""
    told_by: str = ""
    """The scheduler's command that reported it: `sinfo`."""


class AttemptNodes(msgspec.Struct, frozen=True, tag="attempt_nodes"):
    """All nodes of an attempt, as their launches have told each other in torchrun's store: of two and more."""

    attempt: int
    name: str
    """Drawn anew for each attempt, and the same on all its nodes: no other job has it."""
    hosts: list[str]
    """By node rank."""


class GpuXid(msgspec.Struct, frozen=True, tag="xid"):
    """The driver reported an XID of a GPU. NVML has no history, so these are only the XIDs since the run began."""

    device: str
    """UUID of the whole GPU."""
    number: int
    time_ns: int = 0
    meaning: str = ""
    next: str = ""
    grade: str = "unknown"
    """What it says of the GPU: ok (the script's own fault), warn, fail, unknown."""
    mig: str = ""
    """`GPU instance/compute instance`, where the XID is about one."""


class GpuCounters(msgspec.Struct, frozen=True, tag="gpu_counters"):
    """The error counters of one GPU. The difference between two readings is what the run added (core/gpu)."""

    device: str
    """UUID of the whole GPU."""
    moment: str
    """`before` the training, after an `anomaly`, or at the `end`."""
    counters: dict[str, int]
    unknown: dict[str, str] = {}
    """Counter -> why it could not be read."""
    time_ns: int = 0
    mig: list[str] = []
    """UUIDs of the MIG devices on it. A rank may know its GPU by one of them."""


class GpuHealth(msgspec.Struct, frozen=True, tag="gpu_health"):
    """Whether NVML watches the node's GPUs. Sent when that begins, and once more if it ends too early."""

    grade: str
    """`ok`, or `unknown` with the reason in `detail`."""
    detail: str = ""
    driver: str = ""
    devices: dict[str, str] = {}
    """UUID -> name"""
    unwatched: dict[str, str] = {}
    """UUID -> why its XIDs could not be registered"""
    time_ns: int = 0


WorkerEvent = (
    Anomaly
    | SecondRun
    | ForwardCaptured
    | RangeWarning
    | ScalerSkip
    | IgnoredAlarm
    | AbsorbedValue
    | PassedTensor
    | NotLookedInto
    | WatchChoice
    | CompiledUnseen
    | UnmeasuredTensor
    | LooseParameters
    | UnreadStates
    | ReplicaHashes
    | BatchInputs
    | BatchSource
    | ReplacedFunctions
    | ScriptError
    | ScriptExit
    | LeftGroup
    | MeshCoordinates
    | PreflightBegan
    | PreflightStage
    | PreflightResult
    | BandwidthRows
    | RankInventoryEvent
    | OwnFault
)
Event = (
    WorkerEvent
    | WorkerExit
    | RankStall
    | RankLook
    | SlowRankLooks
    | StepTimes
    | LimitForecast
    | ZeroedGradients
    | UnmovedWeights
    | NodeSignal
    | AttemptNodes
    | GpuXid
    | GpuCounters
    | GpuHealth
)
LogEntry = Definition | WorkerEvent
