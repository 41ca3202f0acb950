"""A forward that runs once more in a thread of its own, and leaves everything as it was; and `explain`."""

from __future__ import annotations

import atexit
import contextvars
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from shlex import quote
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from ...core.events.alarm_evidence import SECOND_RUN_S, BadOperation, operation_text
from ...core.events.read_tensors import OperandNumbers
from ...core.frames import Row, format_number
from ...core.guest.tell import is_leaving
from ...core.guest.threads import SECOND_RUN, AwaitedThread
from ...core.marked_line import CODE_WIDTH, shown_line
from ...core.roles import RoleKind
from ...core.signal_errors import suppress_own, then_put_back
from ...core.torch_names import name_in_torch
from ...core.values import NonFinite, headroom
from ..device.accelerator import GeneratorState, gpu_in_use
from ..device.device import has_function_modes, without_modes
from ..hooks.global_hooks import without_any_of_ours
from ..record.names import inputs_of, outputs_of, parts_of, unwrap, walk
from .code_place import CodePlace, call_site
from .operation_watch import OperationWatch, SecondRunStopped

_set_stance: Any = getattr(torch.compiler, "set_stance", None)
"""Since torch 2.6."""
ContextMaker = Callable[[], AbstractContextManager[Any]]
T = TypeVar("T")
_mode_stack = name_in_torch("torch.overrides._get_current_function_mode_stack", list)


class ForwardTarget(NamedTuple):
    """The tensor that was bad: an argument or a result of a module's call."""

    module: nn.Module
    row: Row

    @property
    def is_output(self) -> bool:
        """Whether the call returned it."""
        return self.row.role_kind is RoleKind.OUTPUT

    def is_like(self, tensor: Any, flags: int) -> bool:
        """Whether a tensor of the second run holds what was seen in the first."""
        alike = flags & (NonFinite.POSINF | NonFinite.NEGINF if self.row.flags & NonFinite.INF else self.row.flags)
        return bool(alike) and (self.row.shape is None or list(tensor.shape) == list(self.row.shape))


class ForwardThread:
    """One forward of `module`, or of another method, under a watch.

    `reached`: the bad value came where it had been seen before. `seen`: what came there.
    """

    what = "a second run of the forward"

    def __init__(
        self, module: nn.Module, method: str, target: ForwardTarget, args: Any, kwargs: Any, watch: OperationWatch
    ) -> None:
        self._module, self._method, self._target, self._watch = module, method, target, watch
        self._args, self._kwargs = args, kwargs
        self.reached, self.lacked_memory, self.why = False, False, ""
        self.operation: BadOperation | None = None
        self.seen: torch.Tensor | None = None

    def run(self, limit_s: float, contexts: Sequence[ContextMaker]) -> None:
        """Run it, and wait for it at most this long. A thread that goes on ends at its next operation."""
        run, has_ended = contextvars.copy_context().run, True
        thread = AwaitedThread(partial(run, self._forward, contexts), SECOND_RUN)
        try:
            thread.begin()
            has_ended = thread.ends_within(limit_s)
            why = f"took longer than {limit_s:g} s"
            if thread.refused is not None:
                raise thread.refused
        except BaseException:  # a signal's handler has raised: what the thread works with is about to be put back
            why = self._watch.stopped = "was interrupted"
            thread.give_up()
            has_ended = thread.ends_within(limit_s)
            raise
        finally:
            if not has_ended:
                self._watch.stopped = self.why = f"{self.what} {why}"
                atexit.register(_wait_for, thread)

    def _forward(self, contexts: Sequence[ContextMaker]) -> None:
        why = ""
        try:
            with ExitStack() as stack:
                for make in contexts:
                    stack.enter_context(make())
                stack.enter_context(self._watch)
                self._call()
        except SecondRunStopped as stopped:
            why = f"{self.what} was stopped: {stopped}"
        except BaseException as error:  # SystemExit, too: the script's code runs here
            is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)
            self.lacked_memory = is_memory
            what = "ran out of memory" if is_memory else f"raised {type(error).__name__}"
            why = f"{self.what} {what}"
        self._watch.forget()
        self.why = self.why or why

    def _call(self) -> None:
        hook = None
        module, target = self._module, self._target
        try:
            if not target.is_output:
                # nn.Module's own method: a ScriptModule calls such hooks, but refuses to register one
                hook = nn.Module.register_forward_pre_hook(target.module, self._handed, with_kwargs=True)
            elif target.module is not module or self._method != "forward":
                hook = nn.Module.register_forward_hook(target.module, self._returned, prepend=True)
            output = getattr(module, self._method)(*self._args, **self._kwargs)
            if target.module is module and target.is_output:
                self._look(outputs_of(output))
        finally:
            if hook is not None:
                hook.remove()

    def _handed(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._look(inputs_of(args, kwargs))

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        self._look(outputs_of(output))

    def _look(self, leaves: list[tuple[str, Any]]) -> None:
        leaf = next((leaf for role, leaf in leaves if role == self._target.row.role), None)
        if self.reached or not isinstance(leaf, torch.Tensor):
            return
        self.seen = leaf
        origin, flags = self._watch.origin_of(leaf)
        self.reached = self._target.is_like(leaf, flags)
        self.operation = origin.operation if self.reached and origin is not None else None


def _wait_for(thread: AwaitedThread) -> None:
    """As Python ends, it ends a daemon thread that asks for its lock. Inside of torch's C++ that aborts the process."""
    if not is_leaving():
        thread.ends_within(SECOND_RUN_S)


# What torch and Python keep beside the tensors.


def runs_eagerly() -> ContextMaker | None:
    """A context in which compiled code runs eagerly; None where this torch has none."""
    if "torch._dynamo" not in sys.modules:  # it would be imported
        return nullcontext
    return partial(_set_stance, "force_eager") if _set_stance is not None else None


def function_modes() -> list[Any]:
    """The modes of torch functions that are on in this thread, the innermost last."""
    return _mode_stack() if has_function_modes() else []


def contexts_of_this_thread(modes: list[Any]) -> list[ContextMaker]:
    """Contexts that give another thread what torch keeps for this one. They are made and entered there.

    `modes`: this thread's `function_modes`.
    """
    found: list[ContextMaker] = [torch.inference_mode if torch.is_inference_mode_enabled() else torch.no_grad]
    devices, gpu = ["cpu"], gpu_in_use()
    if gpu is not None:
        devices.append(gpu.type)
        found += gpu.contexts()
    if modes:
        found += [partial(torch.device, mode.device) for mode in modes if hasattr(mode, "device")]
    for device in devices:
        if torch.is_autocast_enabled(device):
            found.append(partial(torch.autocast, device, torch.get_autocast_dtype(device)))
    return found


class RandomNumbers(NamedTuple):
    """The state of torch's generators: that of the CPU, and seed and offset of the current GPU."""

    cpu: torch.Tensor
    gpu: GeneratorState | None = None


def random_numbers() -> RandomNumbers:
    """The state now. Waits for no device."""
    gpu = gpu_in_use()
    # torch makes this tensor without an operation that a mode could see
    state = torch.default_generator.get_state()
    return RandomNumbers(state, without_modes(gpu.random_state) if gpu is not None else None)


def same_numbers(one: RandomNumbers, other: RandomNumbers) -> bool:
    """Whether nothing was drawn between two states."""
    return torch.equal(one.cpu, other.cpu) and one.gpu == other.gpu


class _KeptState:
    """What a forward changes beside its result: random numbers, and the attributes and buffers of its modules."""

    def __init__(self, module: nn.Module, watch: OperationWatch) -> None:
        self._watch, self._gpu, self._numpy = watch, gpu_in_use(), sys.modules.get("numpy")
        self._of_python = random.getstate()
        self._of_numpy = self._numpy.random.get_state() if self._numpy is not None else None
        self._of_torch = random_numbers()
        holders = [table for part in parts_of(module) for table in (vars(part), part._buffers, part._modules)]
        self._tables = [(table, dict(table)) for table in holders]
        self._fast = torch.backends.mha.get_fastpath_enabled()
        self._warnings = warnings.catch_warnings()

    def begin(self, start: RandomNumbers | None) -> None:
        """No warning is shown from now on. torch's generators begin at `start`."""
        self._warnings.__enter__()
        warnings.simplefilter("ignore")
        torch.backends.mha.set_fastpath_enabled(self._fast and not torch.is_grad_enabled())
        if start is not None:
            self._set_of_torch(start)

    def _set_of_torch(self, numbers: RandomNumbers) -> None:
        torch.set_rng_state(numbers.cpu)
        if numbers.gpu is not None and self._gpu is not None:
            self._gpu.set_random_state(numbers.gpu)

    def put_back(self) -> None:
        """May be called again where a signal's handler has raised within it."""
        torch.backends.mha.set_fastpath_enabled(self._fast)
        without_modes(self._watch.restore)
        for table, before in self._tables:
            for key in table.keys() - before.keys():
                table.pop(key, None)
            for key, value in before.items():  # one by one: the tables of a ScriptModule have no `update`
                if key not in table or table[key] is not value:
                    table[key] = value
        self._set_of_torch(self._of_torch)
        random.setstate(self._of_python)
        if self._numpy is not None:
            self._numpy.random.set_state(self._of_numpy)
        with suppress_own(RuntimeError, AttributeError):  # it was not begun, or only in part
            self._warnings.__exit__(None, None, None)


def kept_as_it_is(module: nn.Module, watch: OperationWatch, start: RandomNumbers | None, run: Callable[[], T]) -> T:
    """Call `run`. Afterwards all is as before: random numbers, attributes and buffers of a module and of those in it.

    Within it torch's generators begin at `start`.
    """
    kept = _KeptState(module, watch)

    def go() -> T:
        kept.begin(start)
        return run()

    return then_put_back(go, kept.put_back)


# `gpuwatch.explain(module, x)`: which operation of this forward makes inf or nan, and which come close to it.

_MOST_SHOWN = 20


@dataclass(frozen=True, slots=True)
class SeenOperation:
    """What one operation of a forward returned. `headroom`: powers of two up to the largest number of its dtype."""

    op: str
    place: CodePlace
    output: OperandNumbers
    headroom: float | None
    """None if the output is not finite, or 0 throughout."""


@dataclass(frozen=True, slots=True)
class ForwardExplanation:
    """What `explain` has found. `print` shows the operation, and the operations with the least headroom."""

    operation: BadOperation | None
    """The first operation that made the bad value of the output; None if the output is finite, or nobody knows it."""
    unknown: str
    """Why it is not known; "" if it is, or the output is finite."""
    operations: list[SeenOperation]
    """All that returned floating point numbers, in their order."""

    def __str__(self) -> str:
        if self.operation is not None:
            first = operation_text(self.operation, CODE_WIDTH)
        else:
            first = f"not known: {self.unknown}" if self.unknown else "the output is finite"
        lines = [first, "headroom    abs max  operation"]
        by_headroom = sorted(self.operations, key=lambda seen: -1.0 if seen.headroom is None else seen.headroom)
        shown = [seen for seen in by_headroom if seen.headroom is not None or seen.output.value != "finite"]
        for seen in shown[:_MOST_SHOWN]:
            finite = seen.output.value == "finite"
            room = f"{seen.headroom:8.1f}" if seen.headroom is not None else f"{'-':>8}"
            size = format_number(seen.output.abs_max) if finite else f"{seen.output.value:>8}"
            place = seen.place
            code = shown_line(place.code, place.columns, CODE_WIDTH)
            at = f", {PurePath(place.file).name}:{place.line}: {code}" if place.file else ""
            lines.append(f"{room}   {size}  {seen.op}{at}")
        return "\n".join(lines)


def explain(module: nn.Module, *args: Any, **kwargs: Any) -> ForwardExplanation:
    """Call `module(*args, **kwargs)` once without gradients, and look at what each of its operations returns.

    Returns the operation that made an inf or nan of the output, with its line and the sizes of its operands, and all
    operations by their headroom. Buffers, attributes and random numbers are then as before. It waits for the device.
    Errors of the forward are raised. Compiled modules run eagerly where torch can (2.6 and later). A watch does not see
    the call, nor calls of other threads meanwhile: it raises nothing and counts no batch.

    The text of a message's code is told by the command: gpuwatch explain GW104
    """
    if isinstance(module, str):
        raise TypeError(
            f"explain: expected a module and what it is called with, found {module!r}; what a code means is told by: "
            f"gpuwatch explain {quote(module)}"
        )
    run = unwrap(module)
    watch = OperationWatch("", {id(part): name for name, part in walk(run)}, call_site(sys._getframe(1)))
    seen: list[SeenOperation] = []

    def note(op: str, place: CodePlace, output: OperandNumbers) -> None:
        room = headroom(output.abs_max, output.dtype) if output.abs_max else None
        seen.append(SeenOperation(op, place, output, room))

    watch.on_output = note

    def call() -> ForwardExplanation:
        operation, unknown = None, ""
        with torch.no_grad(), (runs_eagerly() or nullcontext)():
            try:
                with watch:
                    result = run(*args, **kwargs)
            except SecondRunStopped as stopped:
                return ForwardExplanation(None, str(stopped), seen)
            leaves = [leaf for _, leaf in outputs_of(result) if isinstance(leaf, torch.Tensor)]
            found = [origin for origin, flags in map(watch.origin_of, leaves) if flags]
        watch.forget()
        if found:
            operation = next((origin.operation for origin in found if origin is not None), None)
            unknown = "" if operation is not None else "it was in what the module was handed or holds"
        return ForwardExplanation(operation, unknown, seen)

    return without_any_of_ours(partial(kept_as_it_is, run, watch, None, call))
