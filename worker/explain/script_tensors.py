"""Tensors among the local variables of the script that hold nan or inf, and the lines that assign them.

Read where a backward begins from a bad loss, and where the script ends with an exception that speaks of nan or with
sys.exit: what made the value is no module's, and no frame of a module shows it. Names are kept, and no contents.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType, TracebackType

import torch

from ...core.events.read_tensors import ScriptTensor
from ...core.signal_errors import suppress_own
from ..device.device import is_at_rest, without_modes
from .code_place import function_name, is_users_file
from .operands import has_numbers, numbers_of
from .saved_operands import outside_domain
from .script_lines import AssignedLine, source_of

_MOST_TENSORS = 64
_MOST_KEPT = 16
_MOST_ELEMENTS = 1 << 28
"""Of all that are read."""
_MOST_ITEMS = 32
_MOST_FRAMES = 8
_SPEAKS_OF_NAN = re.compile(r"\b(nan|inf|infinite|infinity|non-?finite|not finite|invalid numeric)\b", re.IGNORECASE)
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|\S*/\S*")
"""Names and paths: `No such file: '/data/inf.txt'`."""

RunningFrame = tuple[FrameType, int]
"""(a frame, the line that it is in)"""


def speaks_of_nan(text: str) -> bool:
    """Whether a message is about a number that is not finite."""
    return _SPEAKS_OF_NAN.search(_QUOTED.sub(" ", text)) is not None


def frames_of(trace: TracebackType | None) -> list[RunningFrame]:
    """Those of a traceback, the innermost first."""
    found = []
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found[::-1]


def running_frames(frame: FrameType | None) -> list[RunningFrame]:
    """A frame and its callers, the innermost first."""
    found = []
    while frame is not None:
        found.append((frame, frame.f_lineno))
        frame = frame.f_back
    return found


def script_tensors(
    frames: Iterable[RunningFrame],
    *,
    waits: bool,
    losses: Sequence[torch.Tensor] | None = None,
    nodes: Sequence[str] = (),
) -> list[ScriptTensor]:
    """The tensors among the local variables of the script's own functions, if one of them holds nan or inf; else [].

    Bad ones first. Raises nothing of its own. `waits`: for the device; else what is on one that is at work is left out.
    `losses`: what a backward began from; None: the script has ended. What its last line depends on counts then, and
    what the innermost line depends on that began a backward. `nodes`: those of the graph of a loss, which the backward
    has freed, that were handed numbers outside of their domain.
    """
    with suppress_own(Exception):
        return without_modes(_script_tensors, frames, waits, losses, nodes)
    return []


def _script_tensors(
    frames: Iterable[RunningFrame], waits: bool, losses: Sequence[torch.Tensor] | None, nodes: Sequence[str]
) -> list[ScriptTensor]:
    own = [each for each in frames if is_users_file(each[0].f_code.co_filename)][:_MOST_FRAMES]
    found: list[ScriptTensor] = []
    read = elements = 0
    for place, (frame, line) in enumerate(own):
        source, code = source_of(frame), frame.f_code
        depends = losses is None or (losses and not place)
        asked = source.names_at(line) if source is not None and depends else set()
        for name, tensor in tensors_in(frame):
            if read == _MOST_TENSORS or elements + tensor.numel() > _MOST_ELEMENTS:
                break
            if not waits and not is_at_rest(tensor.device):
                continue
            read, elements = read + 1, elements + tensor.numel()
            numbers, _ = numbers_of(tensor)
            if not numbers.value:
                continue
            variable = name.partition("[")[0]
            is_loss = any(tensor is loss for loss in losses or ())
            counts = variable in asked or is_loss
            behind = outside_domain(tensor) if numbers.value not in ("finite", "-inf") else []
            behind = behind or (list(nodes) if is_loss else [])
            at = source.assigned(variable, line) if source is not None else AssignedLine(0, "", [], [])
            found.append(ScriptTensor(name, function_name(code), code.co_filename, *at, numbers, behind, counts))
    bad = [each for each in found if each.is_bad]
    finite = [each for each in found if each.numbers.value == "finite"]
    return [*bad, *finite][:_MOST_KEPT] if bad else []


def tensors_in(frame: FrameType) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor): `loss`, or `grads[1]` for one in a short list."""
    for name, value in list(frame.f_locals.items()):
        # of the very classes: code of the script's may stand behind `isinstance` and `len` of others
        if type(value) in (list, tuple) and len(value) <= _MOST_ITEMS:
            found = [(f"{name}[{at}]", each) for at, each in enumerate(value)]
        else:
            found = [(name, value)]
        for known, each in found:
            if type(each) is torch.Tensor and has_numbers(each) and 0 < each.numel() <= _MOST_ELEMENTS:
                yield known, each
