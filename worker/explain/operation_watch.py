"""Looks at every operation of a forward that runs a second time, and finds the one that made a bad value.

A bad value is followed from operation to operation through the memory that it lies in: each storage has the bad values
that were written into it. An operation that made one of finite operands is its origin. An -inf that the code writes
itself (`masked_fill(mask, -inf)`), or that was there before, is no origin: then the operation that made something else
of it is.

    scores.masked_fill_(mask, -inf)    -inf, a constant
    probs = scores.softmax(-1)         nan, its origin: a row was -inf throughout
    out = probs @ v                    nan, of the same origin
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...core.events.alarm_evidence import BadOperation
from ...core.events.read_tensors import OperandNumbers
from ...core.signal_errors import from_outside, suppress_own
from ...core.torch_names import name_in_torch
from ...core.values import NonFinite
from ..device.device import without_modes
from ..record.bad_elements import pattern_of
from ..record.names import CALL
from ..record.plain_tensor import is_foreign, local_part
from .code_place import CallSite, CodePlace, is_of_user, place_of
from .operands import BATCH_NORM, has_numbers, number_of, numbers_of, operation_name, plain_numbers, written_by
from .operation_trials import MOST_BYTES, operands_with, with_trials

_MOST_KEPT = 1 << 30
"""Bytes of a storage that is copied before the run changes it."""
_EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_OVERWRITES = ("copy_", "fill_", "zero_", "index_copy_", "index_put_", "_index_put_impl_", "scatter_", "masked_fill_")
"""Operations that write in place and read nothing of what was there before."""
_WHOLLY = ("copy_", "fill_", "zero_")
_weak = name_in_torch("torch.UntypedStorage._weak_ref")
_free_weak = name_in_torch("torch.UntypedStorage._free_weak_ref")


class SecondRunStopped(Exception):
    """The second run may not go on. The message says why, as a clause."""


@dataclass(eq=False, slots=True)
class MadeValue:
    """A bad value that an operation has written, or that was there before the run."""

    flags: int
    order: int = -1
    span: tuple[int, int] = (0, 0)
    """First and last byte in its storage."""
    place: Any = None
    """Its elements in its storage."""
    constant: bool = False
    """The code has written it as a number: `full(..., -inf)`."""
    unwritten: bool = False
    """`torch.empty`: no operation has written it. A kernel that torch does not dispatch may have."""
    of_backward: bool = False
    """torch's own derivative of an operation, or an autograd.Function's, has written it."""
    operation: BadOperation | None = None
    """Set if it made the value of operands that explain nothing."""
    origin: MadeValue | None = None
    """Itself, or that of an operand; None: it was there before the run."""


@dataclass(eq=False, slots=True)
class _StorageRecord:
    held: int
    """A weak reference in C++: its address is given to no other storage until `forget` gives this back. torch's
    StorageWeakRef does that in a `__del__`: what a signal's handler raises there is lost."""
    given: bool
    """It was there before the run."""
    unknown: bool
    """It was given, or nobody has written it: what it holds must be read."""
    bad: list[MadeValue] = field(default_factory=list)


class HandedTensor(NamedTuple):
    """What an operation is handed."""

    numbers: OperandNumbers
    flags: int
    made: MadeValue | None


class HandedOperands(NamedTuple):
    """What an operation is handed: tensors, those that it writes, and what both hold before, by id."""

    given: list[torch.Tensor]
    written: list[torch.Tensor]
    before: dict[int, HandedTensor]
    operands: dict[int, HandedTensor]
    copies: dict[int, torch.Tensor]
    """Of those that it writes, by id: what trials need."""


def made_by(handed: HandedOperands, result: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    """(tensor, whether its memory is new) of those that an operation has written or returned; a view is none."""
    inside, written = {storage_key(leaf) for leaf in handed.given}, {id(leaf) for leaf in handed.written}
    returned = [leaf for leaf in _pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    for leaf in {id(leaf): leaf for leaf in [*handed.written, *returned]}.values():
        is_new = id(leaf) not in written
        if has_numbers(leaf) and not (is_new and storage_key(leaf) in inside):
            yield leaf, is_new


class OperationWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no annotation there
    """A mode that is entered around the second run."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: else torch imports all of torch._dynamo at the first operation, which takes seconds."""
        return False

    def __init__(self, module: str, names: dict[int, str], caller: CallSite | None) -> None:
        """`caller` has called `module`; None: not known. `names`: id of a module inside it -> its name."""
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._module, self._names, self._caller = module, names, caller
        self._storages: dict[int, _StorageRecord] = {}
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """What the run has changed -> (its bytes, as they were)."""
        self._order = 0
        self.changed: list[int] = []
        """Storages that were there before and got something else in place, that depends on what they held."""
        self.on_output: Callable[[str, CodePlace, OperandNumbers], None] | None = None
        """Called with what each operation has written."""
        self.stopped = ""
        """Set from outside: the run ends at its next operation."""
        self.tries = False
        """Whether an operation that makes a bad value runs again, alone and in other dtypes."""

    # -- one operation ------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.stopped:
            raise SecondRunStopped(self.stopped)
        if "c10d" in func.namespace:
            raise SecondRunStopped("it would have issued a collective")
        foreign = foreign_class(types)
        if foreign is not None:
            raise SecondRunStopped(f"it works on tensors of a class of its own ({foreign.__name__})")
        handed = self._handed_to(func, args, kwargs)
        result = func(*args, **kwargs)
        self._look_at(func, args, kwargs, handed, result)
        return result

    def _handed_to(self, func: Any, args: Any, kwargs: Any) -> HandedOperands:
        given = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        written = written_by(func, args, kwargs)
        before = {id(leaf): self._operand(leaf, read=True) for leaf in written}
        name = operation_name(func)
        for leaf in written:
            self._keep(leaf, name)
        operands = {id(leaf): before.get(id(leaf)) or self._operand(leaf) for leaf in given if has_numbers(leaf)}
        copied = [leaf for leaf in written if self.tries and leaf.nbytes <= MOST_BYTES and not is_foreign(type(leaf))]
        copies = {id(leaf): leaf.detach().clone() for leaf in copied}
        return HandedOperands(given, written, before, operands, copies)

    def _look_at(self, func: Any, args: Any, kwargs: Any, handed: HandedOperands, result: Any) -> None:
        self._order += 1
        for leaf, is_new in made_by(handed, result):
            self._wrote(leaf, func, args, kwargs, handed, is_new=is_new)

    def _operand(self, tensor: torch.Tensor, *, read: bool = False) -> HandedTensor:
        """What an operation is handed. Finite without a look, where only finite values were written into it."""
        record = self._record(tensor)
        if not (read or record is None or record.unknown or record.bad):
            return HandedTensor(OperandNumbers("", None, None, ""), 0, None)
        numbers, flags = numbers_of(tensor)
        return HandedTensor(numbers, flags, self._maker(record, tensor, flags) if flags else None)

    def _record(self, tensor: torch.Tensor, *, is_new: bool = False) -> _StorageRecord | None:
        key = storage_key(tensor)
        if key is None:
            return None
        record = self._storages.get(key)
        if record is None or is_new:
            before = record
            record = self._storages[key] = _StorageRecord(_weak(tensor.untyped_storage()), not is_new, not is_new)
            if before is not None:
                _free_weak(before.held)
        return record

    def _maker(self, record: _StorageRecord | None, tensor: torch.Tensor, flags: int) -> MadeValue:
        """Who has written the bad value that is in a tensor; one without an origin if it was there before."""
        bad = record.bad if record is not None else []
        first, last = span_in_storage(tensor)
        over = [made for made in bad if made.span[0] < last and first < made.span[1]]
        over.sort(key=lambda made: (made.unwritten, not made.flags & flags, made.order))
        return over[0] if over else MadeValue(flags)

    def _wrote(
        self,
        tensor: torch.Tensor,
        func: Any,
        args: Any,
        kwargs: Any,
        handed: HandedOperands,
        *,
        is_new: bool,
    ) -> None:
        record, name = self._record(tensor, is_new=is_new), operation_name(func)
        if record is None:
            return
        numbers, flags = numbers_of(tensor)
        if self.on_output is not None and name not in _EMPTY:
            self.on_output(str(func), self._place(), numbers)
        span = span_in_storage(tensor)
        place, all_of_it = place_in_storage(tensor), tensor.is_contiguous()
        record.bad = [  # what was there is gone
            made
            for made in record.bad
            if not (made.place == place or (all_of_it and span[0] <= made.span[0] and made.span[1] <= span[1]))
        ]
        record.unknown |= name in _EMPTY
        if not flags:
            return
        made = MadeValue(flags, self._order, span, place)
        made.constant = any(isinstance(each, float) and not math.isfinite(each) for each in plain_numbers(args, kwargs))
        known = {which: operand.made for which, operand in handed.operands.items() if operand.made is not None}
        others = [maker for which, maker in known.items() if which != id(tensor)]
        is_out = func._schema.arguments[-1].name == "out" and func._schema.arguments[-1].kwarg_only
        if is_out or (name in _OVERWRITES and (others or made.constant or name in _WHOLLY)):
            made.origin = _origin(made, others)
        else:
            made.origin = _origin(made, list(known.values()))
        if name in _EMPTY:
            made.unwritten = True
            made.origin = None
        if made.origin is made:
            made.operation = self._describe(tensor, func, args, kwargs, handed, numbers)
            if made.operation is None:
                made.origin = None
        record.bad.append(made)
        self._has_made(tensor, made)

    def _has_made(self, tensor: torch.Tensor, made: MadeValue) -> None:
        """For a subclass: a bad value was written into a tensor."""

    # -- the origin ---------------------------------------------------------------------------------------------

    def origin_of(self, tensor: torch.Tensor) -> tuple[MadeValue | None, int]:
        """(the origin of the bad value in a tensor, its flags). None if it came from outside of the run."""
        tensor = local_part(tensor)
        _, flags = without_modes(numbers_of, tensor)
        if not flags:
            return None, 0
        return self._maker(self._storages.get(storage_key(tensor) or -1), tensor, flags).origin, flags

    def _describe(
        self, tensor: torch.Tensor, func: Any, args: Any, kwargs: Any, handed: HandedOperands, output: Any
    ) -> BadOperation | None:
        """None if an operand is not finite that nobody was seen to make: a kernel of Triton's is not dispatched."""
        inputs = []
        kinds = {argument.name: str(argument.type) for argument in func._schema.arguments}
        names = [argument.name for argument in func._schema.arguments]
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and kinds.get(name) in ("number", "Tensor") and (name, value) != ("alpha", 1):
                inputs.append(number_of(float(value)))
            for leaf in _pytree.tree_leaves(value):
                if isinstance(leaf, torch.Tensor) and has_numbers(leaf):
                    known, flags = handed.operands[id(leaf)].numbers, 0
                    if not known.value:
                        known, flags = numbers_of(leaf)
                    if flags:
                        return None
                    inputs.append(known)
        at, element = self._place(), without_modes(pattern_of, tensor)
        found = BadOperation(
            str(func), at.module, at.file, at.line, at.code, inputs, output, element, columns=at.columns
        )
        return self._with_trials(found, tensor, func, args, kwargs, handed) if self.tries else found

    def _with_trials(
        self, found: BadOperation, tensor: torch.Tensor, func: Any, args: Any, kwargs: Any, handed: HandedOperands
    ) -> BadOperation:
        if len(handed.copies) < len({id(leaf) for leaf in handed.written}):
            return found
        with suppress_own(Exception):  # no memory for a trial: the operation is known all the same
            own_args, own_kwargs = operands_with(args, kwargs, handed.copies)
            return without_modes(with_trials, found, tensor, func, own_args, own_kwargs)
        return found

    def _place(self) -> CodePlace:
        """The innermost module, and the innermost line that is not torch's."""
        module, found = self._in_python()
        module = self._module if module is None else module
        running = found if found is not None else self._caller
        return CodePlace(module) if running is None else place_of(module, running)

    def _in_python(self, until: str = "") -> tuple[str | None, FrameType | None]:
        """(name of the innermost module, the innermost frame that is not torch's), inside the function `until`."""
        module, found = None, None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (module is None or found is None):
            if until and frame.f_code.co_name == until:
                break
            if module is None and frame.f_code is CALL:
                module = self._names.get(id(frame.f_locals.get("self")))
            if found is None and is_of_user(frame):
                found = frame
            frame = frame.f_back
        return module, found

    # -- what the run changes -----------------------------------------------------------------------------------

    def _keep(self, tensor: torch.Tensor, name: str) -> None:
        """Copy what was there before the run and is about to be changed."""
        record, key = self._record(tensor), storage_key(tensor)
        if record is None or not record.given or key is None or key in self._kept:
            return
        storage = tensor.untyped_storage()
        if storage.nbytes() > _MOST_KEPT:
            raise SecondRunStopped(f"it changes {storage.nbytes() / _MOST_KEPT:.1f} GiB in place")
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        self._kept[key] = flat, flat.clone()
        if tensor.is_floating_point() and name not in _OVERWRITES and BATCH_NORM not in name:
            self.changed.append(key)

    def restore(self) -> None:
        """Put back what the run has changed in place."""
        for flat, before in self._kept.values():
            flat.copy_(before)

    def forget(self) -> None:
        """Nobody asks for an origin from now on."""
        storages, self._storages = self._storages, {}
        for record in storages.values():
            _free_weak(record.held)

    def has_changed(self, tensors: list[torch.Tensor]) -> bool:
        """Whether the run has changed one of these in place."""
        return any(storage_key(tensor) in self._kept for tensor in tensors)


def foreign_class(types: Any) -> type | None:
    """The first class of an operation's tensors that has operations of its own."""
    return next(filter(is_foreign, types), None)


def _origin(made: MadeValue, operands: list[MadeValue]) -> MadeValue | None:
    """Follow the worst operand. An -inf that the code meant explains an -inf alone."""
    if not operands:
        return made
    bad = [operand for operand in operands if operand.flags & ~NonFinite.NEGINF] or operands
    worst = min(bad, key=lambda operand: operand.origin.order if operand.origin is not None else -1)
    is_new = bool(made.flags & ~worst.flags)
    if worst.origin is None:
        return made if is_new and worst.flags == NonFinite.NEGINF else None
    return made if is_new and worst.origin.constant else worst.origin


def storage_key(tensor: torch.Tensor) -> int | None:
    """Which storage a tensor lies in; None for one without."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError) as error:  # sparse, or without memory
        if from_outside(error):
            raise
        return None


def span_in_storage(tensor: torch.Tensor) -> tuple[int, int]:
    """(first, last) byte that a tensor has in its storage."""
    if not tensor.numel() or tensor.layout is not torch.strided:
        return 0, sys.maxsize
    size = tensor.element_size()
    reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.storage_offset() * size
    return int(first), int(first + (reach + 1) * size)


def place_in_storage(tensor: torch.Tensor) -> Any:
    """Which elements of its storage a tensor has; None where that is not known."""
    strided = tensor.layout is torch.strided
    return (tensor.storage_offset(), tuple(tensor.shape), tensor.stride()) if strided else None
