"""Queries to dynamo while it traces, and the places that its graphs write to.

The queries use private names of dynamo, which differ between versions of torch.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch._dynamo import mark_static_address
from torch._dynamo.resume_execution import ContinueExecutionCache
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._inductor import config as inductor_config

from ...core.signal_errors import from_outside, suppress_own
from ..device import device as devices
from ..device.torch_reader import GRAPH_NUMBERS
from ..record.tensor_stats import NOT_MEASURABLE, TensorReading, TensorStats, measure


def current_output() -> Any:
    """The output graph of the frame that dynamo traces. A restarted trace makes a new one."""
    return InstructionTranslator.current_tx().output


def traced_value(name: str) -> Any:
    """The argument `name` of the function that is being traced. It adds no guard, unlike a read of its id."""
    found = _traced_argument(name)
    key = getattr(found, "module_key", None)
    if key is not None:  # a module that dynamo specializes its graph for, as an older torch may
        return current_output().get_submodule(key)
    return getattr(found, "value", None)


def traced_class(name: str) -> type | None:
    """The class of the argument `name` of the function that is being traced. None if dynamo does not say.

    It adds no guard, unlike `type(argument) is torch.Tensor`. Dynamo guards any object that it finds under two names
    with a function in Python, and drops what a signal's handler raises there.
    """
    try:
        found: type | None = _traced_argument(name).python_type()
        return found
    except NotImplementedError as error:
        if from_outside(error):
            raise
        return None


def _traced_argument(name: str) -> Any:
    """What dynamo knows of the argument `name` of the function that is being traced; None if there is none."""
    tx = current_output().current_tx
    while tx is not None and name not in tx.symbolic_locals:
        tx = tx.parent
    return tx.symbolic_locals[name].realize() if tx is not None else None


def traced_method(running: torch.nn.Module | None) -> tuple[types.CodeType | None, torch.nn.Module | None]:
    """The code of the frame that dynamo compiles, and the module whose method it is, if it can be found.

    `running` is the innermost module whose call hooks see. A function that a decorator puts around its `forward` counts
    as its method, too. After a graph break, dynamo continues with generated code, which has other arguments; then the
    method's own code is returned.
    """
    frame = getattr(current_output(), "root_tx", None)
    known = getattr(frame, "f_locals", None)
    if frame is None or known is None:  # an older torch
        return None, None
    code = frame.f_code
    owner = next((known[name] for name in ("self", *code.co_varnames[:1]) if name in known), None)
    if isinstance(owner, tuple):  # of `*args`
        owner = next(iter(owner), None)
    with suppress_own(AttributeError, KeyError):
        code = ContinueExecutionCache.generated_code_metadata[code].code
    if not isinstance(owner, torch.nn.Module):
        owner = running if _is_called_in(getattr(running, "forward", None), code, known) else None
    return code, owner


def _is_called_in(call: Any, code: types.CodeType, known: Mapping[str, Any]) -> bool:
    """Whether a frame, of this code and with these variables, is a call of this function or of one that it wraps."""
    for _ in range(_MOST_WRAPPED):
        if not callable(call):
            break
        function = call if hasattr(call, "__code__") else type(call).__call__
        if getattr(function, "__code__", None) is code:
            if function is not call:  # an object's method
                return known.get(code.co_varnames[0]) is call
            # other modules may have the same decorator's code around another function
            cells = zip(code.co_freevars, getattr(call, "__closure__", None) or (), strict=False)
            return all(name not in known or known[name] is cell.cell_contents for name, cell in cells)
        call = getattr(call, "__wrapped__", None)
    return False


def is_for_inductor() -> bool:
    """Whether inductor compiles the graph that is traced now. It writes to a tensor without a new version of it."""
    return _inductor() is not None


def uses_cuda_graphs() -> bool:
    """Whether inductor makes a CUDA graph of the graph that is being traced."""
    return bool(_option("triton.cudagraphs"))


def is_for_compiled_autograd() -> bool:
    """Whether compiled autograd is on by its setting, and so within calls of compiled code alone.

    Dynamo then hands the hook of a gradient to compiled autograd. A backward outside of such a call runs without that,
    and ends in "BackwardState requires CompiledAutograd". (torch 2.13, torch/_dynamo/variables/tensor.py and
    eval_frame.py)
    """
    return bool(getattr(torch._dynamo.config, "compiled_autograd", False))


def is_lite() -> bool:
    """Whether the graph that is being traced is for torch.compile(mode="lite"), which torch 2.11 has.

    Without all of Inductor's passes gpuwatch::look is an error, and a backward drops what it writes to a place.
    """
    return bool(_option("selective_decompose")) or _option("use_post_grad_passes") is False


def _option(name: str) -> Any:
    """Inductor's option for the graph that is traced now; None if this torch does not have it."""
    given = getattr(_inductor(), "config", None)
    if isinstance(given, dict) and name in given:
        return given[name]
    value: Any = inductor_config
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _inductor() -> Any:
    """The backend of the graph that is traced now, where it is inductor's; else None."""
    backend = getattr(current_output(), "compiler_fn", None)
    for _ in range(_MOST_WRAPPED):
        inner = next((getattr(backend, name) for name in _WRAPPED_AS if hasattr(backend, name)), None)
        named = "inductor" in (getattr(backend, "compiler_name", ""), getattr(backend, "__name__", ""))
        if named and (inner is None or hasattr(backend, "config")):
            return backend
        backend = inner
    return None


_WRAPPED_AS = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable", "backend_compile_fn", "__self__")
"""Attributes in which dynamo and DDP keep the backend that they call."""
_MOST_WRAPPED = 8


def is_split_by_ddp() -> bool:
    """Whether dynamo may split the current trace into several graphs: one for each bucket of DDP."""
    if not torch.distributed.is_available():
        return False
    return getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None) is not None


def is_closed() -> bool:
    """Whether dynamo traces the body of a higher-order function, which must not write to our buffers.

    Such a function is one of `torch.func` (vmap has no rule for a write) or a higher-order operator (`torch.cond`).
    The body of an activation checkpoint is not closed: dynamo allows writes in it.
    """
    if devices.has_transforms():
        return True
    tracer = _tracer()
    while tracer is not None and tracer.parent is not None:
        if tracer.source_target is not tag_activation_checkpoint:
            return True
        tracer = tracer.parent
    return False


def _tracer() -> Any:
    """Dynamo's tracer of the current graph or body; None in a torch version without this attribute."""
    try:
        tracer = current_output().current_tracer
        return tracer if hasattr(tracer, "parent") and hasattr(tracer, "source_target") else None
    except AttributeError as error:
        if from_outside(error):
            raise
        return None


def current_graph() -> torch.fx.Graph | None:
    """The graph that dynamo adds to; None in a torch version that keeps it elsewhere."""
    found = getattr(_tracer(), "graph", None)
    return found if isinstance(found, torch.fx.Graph) else None


_NOTES: list[Any] = []
"""The objects in which dynamo notes the traced code's assignments, while it traces the hook of a gradient."""


def hook_begins() -> None:
    """The traced code is about to register a hook on a tensor."""
    with suppress_own(Exception):
        _NOTES.append(current_output().side_effects)


def hook_ends() -> None:
    """Make dynamo continue with the object in which it notes assignments, instead of its copy.

    To trace a hook's body separately, torch 2.13 copies that object and continues with the copy. If an object already
    had attributes set, its `__dict__` still reads the original and misses later assignments. That breaks the graphs of
    transformers with `use_cache=True`, its default: "'DynamicLayer' object has no attribute 'dtype'".
    """
    with suppress_own(Exception):
        output, first = current_output(), _NOTES.pop()
        if first is not output.side_effects:
            vars(first).update(vars(output.side_effects))
            output.side_effects = first


# The places that graphs write numbers of tensors to, and the operator by which a graph reads host memory.
#
#     gpuwatch::look(Tensor x, Tensor(a!) token, int place) -> ()      writes the tensor's numbers into SEEN[place]
#
# The numbers of a tensor on a device are reduced in the graph itself. In host memory, reductions traced into the graph
# would be slower. The compiler makes them a separate loop, which recomputes the tensors that are not kept (around a
# dropout, its whole backward) and handles nan in floating point. On the CPU, with torch 2.13, this takes ten times as
# long as reading the memory once.
#
# The operator is declared to change its token. A compiler therefore does not remove the call.

try:
    from ..native.core import Look
except ImportError:  # gpuwatch was installed without a C compiler
    Look = None  # type: ignore[assignment,misc]


SEEN: list[TensorReading | None] = []
"""place -> the numbers that a graph wrote there. The reader sets it back to None."""


def new_place() -> int:
    """A new index into SEEN."""
    SEEN.append(None)
    return len(SEEN) - 1


def _look(tensor: torch.Tensor, token: torch.Tensor, place: int) -> None:
    try:
        seen = TensorReading(measure(tensor), tuple(tensor.shape))
    except Exception as error:  # an error here must not end the training
        if from_outside(error):
            raise
        seen = TensorReading(NOT_MEASURABLE, ())
    if 0 <= place < len(SEEN):
        SEEN[place] = seen


def _native_look() -> object:
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if Look is None or exchange is None:
        return _look
    try:
        return Look(
            exchange=exchange, seen=SEEN, cls=TensorReading, numbers=TensorStats, tensor=torch.Tensor, otherwise=_look
        )
    except (TypeError, ValueError) as error:  # a torch version whose internals differ
        if from_outside(error):
            raise
        return _look


_library: Any = torch.library.Library("gpuwatch", "DEF")  # type: ignore[no-untyped-call]  # torch has no annotation
_library.define("look(Tensor x, Tensor(a!) token, int place) -> ()", tags=(torch.Tag.needs_fixed_stride_order,))
_library.impl("look", _native_look(), "CPU")
_library.impl("look", lambda tensor, token, place: None, "Meta")  # as in tracing: it has no numbers


class _GraphBuffers:
    """The tensors that graphs write to, one attribute each. A graph has guards only on those that it uses.

    place_7 holds the `graph_numbers` of a tensor on a device. token_8 is the token of the `gpuwatch::look` that writes
    SEEN[8]. Each read has its own token: DDP may split a trace into several graphs. If two of these changed the same
    tensor, autograd would refuse the backward of the first, which has saved the tensor.
    """


BUFFERS = _GraphBuffers()


def on_device(place: int) -> torch.Tensor | None:
    """The buffer of a place whose tensor is on a device. None if it is in host memory: its numbers are in SEEN."""
    buffer: torch.Tensor | None = vars(BUFFERS).get(f"place_{place}")
    return buffer


def token(place: int) -> torch.Tensor:
    """The tensor that a read of host memory at this place is declared to change."""
    found: torch.Tensor = vars(BUFFERS)[f"token_{place}"]
    return found


def in_host_memory(device: str) -> bool:
    """Whether tensors on `device` are read by `gpuwatch::look`. Others are reduced in the graph itself."""
    return device == "cpu" and devices.late_device() is None


def place_on(device: str) -> int:
    """A new place for the numbers of a tensor on `device`."""
    place = new_place()
    if in_host_memory(device):
        _keep(f"token_{place}", torch.zeros(1))
    else:
        _keep(f"place_{place}", torch.zeros(GRAPH_NUMBERS, dtype=torch.float64, device=device))
    return place


def forget(places: Iterable[int]) -> None:
    """Discard the numbers of tensors in host memory."""
    for place in places:
        SEEN[place] = None


def renewed(place: int) -> torch.Tensor:
    """Have the next run of a graph write this place to another tensor. Returns the one that the last run was given."""
    name = f"token_{place}" if on_device(place) is None else f"place_{place}"
    given: torch.Tensor = vars(BUFFERS)[name]
    with torch.inference_mode(False):
        setattr(BUFFERS, name, torch.zeros_like(given))
    return given


def _keep(name: str, tensor: torch.Tensor) -> None:
    mark_static_address(tensor)
    setattr(BUFFERS, name, tensor)
