"""What a second look at the module of a rank's first alarm has found."""

from __future__ import annotations

import msgspec

from .read_tensors import OperandNumbers, ReducedElement, ScriptTensor


class OptimizerStep(msgspec.Struct, frozen=True):
    """The optimizer that stepped on a weight, with the settings that are numbers, as in its parameter group.

    `betas=(0.9, 0.999)` is `betas[0]` and `betas[1]`; True is 1.
    """

    cls: str
    """`torch.optim.adamw.AdamW`"""
    settings: dict[str, float] = {}


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
    gradient: str = ""
    """For a parameter of no module after a step: what its gradient held, `nan`, as one backward had made it. "" if that
    was finite, or may have been changed since."""
    losses: list[OperandNumbers] = []
    """Of a backward: the tensors that it began from, with a loss scale where there is one. Empty if they are gone."""
    proved: bool = False
    """Of a loss: an operation of its graph has made the value of finite operands, as its arithmetic shows."""
    script: list[ScriptTensor] = []
    """Where one of `losses` is not finite, or the script may have changed a gradient before a step: the tensors in its
    variables, bad ones first."""
