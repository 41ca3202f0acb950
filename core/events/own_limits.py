"""What gpuwatch did not see in a rank, what it has replaced there, and its own faults."""

from __future__ import annotations

from .run_position import RankEvent


class NotLookedInto(RankEvent, frozen=True, tag="not_looked_into"):
    """A module in which compiled code runs that no frame shows.

    torch.compile broke its graph in the call around it, or has compiled it again.
    """

    module: str
    cls: str
    around: bool = True
    """A frame shows what goes in and comes out."""


class CompiledUnseen(RankEvent, frozen=True, tag="compiled_unseen"):
    """Modules were compiled, and gpuwatch cannot see everything inside them with this torch. Once for each process."""

    text: str
    """torch 2.11: gradients inside of compiled modules are not inspected"""
    calls: bool = False
    """The calls of the modules, too, and not their gradients alone."""


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


class UnmeasuredTensor(RankEvent, frozen=True, tag="unmeasured"):
    """The first tensor with floats that gpuwatch cannot read, such as one of a class of the script's own."""

    module: str
    cls: str
    role: str
    dtype: str
    """`float32`"""


class LooseParameters(RankEvent, frozen=True, tag="loose_parameters"):
    """An optimizer steps on parameters of the script's own: no module has them that was called. Once for each class."""

    optimizer: str
    """Its class."""
    parameters: int
    unread: int = 0
    """How many of `parameters` are on a device: nobody reads them."""


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
_NOTES = f"hooks, names of torch, device note, native frame writer, log_to, meshes, teardown, {SELF_CHECK}"
"""About how frames are read and written, and what else is reported about a rank."""
_LOOK_BACK = "step times, history, forecasts, hottest modules, pages at rest, step position"
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


LimitEvent = (
    NotLookedInto
    | CompiledUnseen
    | WatchChoice
    | UnmeasuredTensor
    | LooseParameters
    | UnreadStates
    | ReplacedFunctions
    | OwnFault
)
