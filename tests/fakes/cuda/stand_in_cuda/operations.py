"""torch's operations on "cuda", computed: each takes the place of the kernel that torch has registered for CUDA.

The caller gets tensors of the right shape at once. The numbers come when the stream gets there: torch's kernel for the
CPU runs on views of the same addresses. So the arithmetic is the CPU's, memory that was freed too early has somebody
else's numbers, and an index out of range is an assertion of the device.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch

from .fused_kernels import KERNELS
from .library import callbacks, library
from .random_numbers import cpu_generator, dropout
from .views import Shape, View, each, view

_NATIVE = {  # torch's own code: it allocates, describes, or calls the driver
    *("empty.memory_format", "empty_strided", "set_", "resize_", "record_stream", "is_set_to", "is_pinned"),
    *("_local_scalar_dense", "_pin_memory", "_fused_sdp_choice", "_resize_output_", "_efficientzerotensor"),
    *("_use_cudnn_ctc_loss", "_use_miopen_ctc_loss", "_cudnn_init_dropout_state"),
}
_CPU_KEYS = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_MORE = ("convolution", "convolution_backward", "convolution_overrideable", "copy_", *KERNELS)
"""Registered for all devices by torch: its code for CUDA lies below; and those that the CPU does not have."""
_WAITING = {  # the size of what comes out depends on numbers
    *("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "equal"),
    *("repeat_interleave", "bincount", "_embedding_bag", "histc", "nonzero_static"),
}
_NORMS = tuple(f"native_{kind}_norm_backward" for kind in ("layer", "group", "batch"))
_BATCH_NORMS = ("native_batch_norm", "_native_batch_norm_legit")
_STATISTICS = ("mean", "rstd", "save_mean", "save_invstd")
_MASKS = (torch.bool, torch.uint8)
_INFERRED: dict[Any, Any] = {}
"""Key of a call -> sizes, strides and dtypes of what comes out"""


@functools.cache
def install() -> None:
    """Replace torch's kernels for CUDA in this process."""
    callbacks()
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    ours = torch.library.Library("aten", "IMPL")
    _kept.append(ours)
    registered = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    for name in names:
        _, _, short = name.partition("::")
        base, _, overload = short.partition(".")
        is_known = any(registered(name, key) for key in _CPU_KEYS)  # else torch's own kernel is refused, by its name
        ours_to_do = registered(name, "CUDA") and base not in _NATIVE and short not in _NATIVE and is_known
        if short in _MORE or ours_to_do:
            schema = torch._C._get_schema(name.partition(".")[0], overload)
            if not _is_view(schema):
                ours.impl(short, _kernel(base, overload, schema), "CUDA", allow_override=True)


_kept: list[Any] = []


def _is_view(schema: Any) -> bool:
    return any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)


def _kernel(base: str, overload: str, schema: Any) -> Callable[..., Any]:
    if base == "copy_":
        return _copy
    if base == "native_dropout" and not overload:
        return dropout
    if base in KERNELS and not overload:
        return KERNELS[base]
    return Operation(base, overload, schema)


class Operation:
    """One operation of torch, as a kernel for CUDA."""

    def __init__(self, base: str, overload: str, schema: Any) -> None:
        self._base, self._overload = base, overload or "default"
        self._names = [argument.name for argument in schema.arguments]
        self._tensors = [argument.name for argument in schema.arguments if str(argument.type) == "Tensor"]
        self._written = [
            argument.name
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self._outs = [  # that may have to grow; those in a list have their size already
            argument.name for argument in schema.arguments if argument.is_out and str(argument.type) == "Tensor"
        ]
        self._returns = schema.returns
        self._is_in_place = all(result.alias_info is not None for result in schema.returns)
        self._answers = bool(schema.returns) and not any("Tensor" in str(result.type) for result in schema.returns)
        self._is_random = "generator" in self._names
        self._call: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run({**dict(zip(self._names, args, strict=False)), **kwargs})

    @property
    def call(self) -> Any:
        """The operation itself."""
        if self._call is None:
            self._call = getattr(getattr(torch.ops.aten, self._base), self._overload)
        return self._call

    def _run(self, given: dict[str, Any]) -> Any:
        device = _device_of(given)
        for name in self._tensors:
            if isinstance(given.get(name), (bool, int, float, complex)):
                given[name] = _tensor_of_number(given[name], given)
        cpu = {name: each(value, _seen) for name, value in given.items()}
        if self._is_random and (generator := cpu_generator(given.get("generator"), device)) is not None:
            cpu["generator"] = generator
        if self._answers or self._base in _WAITING or _has_mask(self._base, given):
            return self._waits(given, cpu, device)
        shapes = self._shapes(given, device)
        if shapes is None:
            return self._waits(given, cpu, device)
        if self._is_in_place:
            for name, shape in zip(self._outs, shapes, strict=False):
                if tuple(given[name].shape) != shape.size:
                    given[name].resize_(shape.size)
                    cpu[name] = view(given[name])
            targets: Any = None
            found = self._own(given)
        else:
            found = each(shapes, lambda shape: shape and _empty(shape, device))
            targets = each(found, lambda tensor: view(tensor) if tensor is not None else None)
        issue(device, functools.partial(self._compute, cpu, targets))
        return _returned(found, len(self._returns))

    def _own(self, given: dict[str, Any]) -> Any:
        """What an operation in place returns: the arguments that it has written."""
        return [given[name] for name in self._written][: len(self._returns)] if self._returns else None

    def _compute(self, cpu: dict[str, Any], targets: Any) -> None:
        given = {name: each(value, _cpu_tensor) for name, value in cpu.items()}
        if self._base in _NORMS:
            _with_statistics_of_the_cpu(given)
        results = self.call(**given)
        if self._base in _BATCH_NORMS and not given["training"]:
            results = [results[0], *_statistics_of_cuda(given)]
        if targets is not None:
            _write(targets, [results] if len(self._returns) == 1 else list(results))

    def _waits(self, given: dict[str, Any], cpu: dict[str, Any], device: int) -> Any:
        """As torch's own code does it: the host waits for the stream, and then knows."""
        _tell_of_wait()
        library().synchronize(device, torch._C._cuda_getCurrentRawStream(device))  # a stack shows this line
        outs = dict.fromkeys(self._outs)
        for name in outs:
            cpu[name] = torch.empty(0, dtype=given[name].dtype)
        results = self.call(**{name: each(value, _cpu_tensor) for name, value in cpu.items()})
        if self._answers:
            return results
        if self._outs:
            for name in outs:
                given[name].resize_(cpu[name].shape)
                view(given[name]).tensor().copy_(cpu[name])
            return _returned(self._own(given), len(self._returns))
        if self._is_in_place:
            return _returned(self._own(given), len(self._returns))
        results = [results] if len(self._returns) == 1 else list(results)
        found = each(results, lambda tensor: _like(tensor, device))
        return _returned(found, len(self._returns))

    # -- shapes, by torch's own kernels for "meta" -------------------------------------------------------------------

    def _shapes(self, given: dict[str, Any], device: int) -> Any:
        """The shape of each result, or of each `out`; None if torch cannot tell without numbers."""
        if self._is_in_place and not self._outs:
            return []
        key = self._base, self._overload, device, *((name, _key(value)) for name, value in given.items())
        try:
            known = _INFERRED.get(key, False)
        except TypeError:
            return self._inferred(given)
        if known is False:
            known = _INFERRED[key] = self._inferred(given)
        return known

    def _inferred(self, given: dict[str, Any]) -> Any:
        meta = {name: each(value, _meta) for name, value in given.items() if name != "generator"}
        try:
            results = self.call(**meta)
        except NotImplementedError:
            return [_shape(given[name]) for name in self._outs] if self._outs else None
        if self._outs:
            return [_shape(meta[name]) for name in self._outs]
        if isinstance(results, torch.Tensor) and results.is_quantized:
            raise NotImplementedError(f"{self._base}: the stand-in for CUDA has no quantized tensors")
        return each([results] if len(self._returns) == 1 else list(results), _shape)


def _with_statistics_of_the_cpu(given: dict[str, Any]) -> None:
    """CUDA keeps the statistics of 16-bit numbers in 32 bits, and the CPU, whose numbers they are, in 16."""
    dtype = given["input"].dtype
    others = [given[name] for name in ("weight", "running_mean") if given.get(name) is not None]
    if all(tensor.dtype == dtype for tensor in others):
        for name in _STATISTICS:
            if given.get(name) is not None:
                given[name] = given[name].to(dtype)


def _statistics_of_cuda(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Those that a batch norm in eval mode has applied. CUDA returns them, and the CPU two empty tensors."""
    return given["running_mean"], (given["running_var"].double() + given["eps"]).rsqrt()


def issue(device: int, compute: Callable[[], None]) -> None:
    """Have `compute` called when the current stream of the device gets there."""

    def run() -> None:
        collects = gc.isenabled()  # a collection here could free the script's memory, on a thread that must not wait
        gc.disable()
        try:
            with torch.no_grad():
                compute()
        finally:
            if collects:
                gc.enable()

    callbacks().issue(device, torch._C._cuda_getCurrentRawStream(device), run)


def _copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """torch's own code where it calls the driver: between host and device, and where the layout is the same."""
    with torch._C.DisableTorchFunction():
        if to.is_cuda and source.is_cuda and to.device != source.device and not _is_same_layout(to, source):
            here = torch.empty(to.shape, dtype=to.dtype, device=source.device)
            there = torch.empty_like(here, device=to.device)
            _copy(here, source)
            _copy(there, here)
            return _copy(to, there)
        if to.is_cuda and source.is_cuda and not _is_same_layout(to, source):
            if to.numel():
                bits = to.is_conj() != source.is_conj(), to.is_neg() != source.is_neg()
                issue(to.get_device(), functools.partial(_copy_views, view(to), view(source), *bits))
            return to
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # the same code, without our kernel in front of it
        torch.ops.aten.copy_.default.redispatch(keys, to, source, non_blocking)
        return to


def _copy_views(to: View, source: View, conjugates: bool, negates: bool) -> None:
    found = source.tensor()
    found = found.conj() if conjugates else found
    to.tensor().copy_(-found if negates else found)


def _is_same_layout(to: torch.Tensor, source: torch.Tensor) -> bool:
    same = to.dtype == source.dtype and to.shape == source.shape and to.stride() == source.stride()
    same = same and to.is_conj() == source.is_conj() and to.is_neg() == source.is_neg()
    return same and torch.ops.aten.is_non_overlapping_and_dense(to)


def _write(targets: Any, results: Any) -> None:
    for target, result in zip(targets, results, strict=True):
        if isinstance(target, list):
            _write(target, result)
        elif target is not None:
            target.tensor().copy_(result)


def _seen(value: Any) -> Any:
    """An argument as the operation has it when its turn comes."""
    if isinstance(value, torch.Tensor):
        return view(value) if value.is_cuda else value.clone()
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return None if isinstance(value, torch.Generator) else value


def _tensor_of_number(number: Any, given: dict[str, Any]) -> torch.Tensor:
    """torch passes a number of Python where the operation wants a tensor. Its type promotes nothing."""
    first = next(value for value in given.values() if isinstance(value, torch.Tensor))
    dtype = torch.result_type(first, number)
    if not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool:
        limits = torch.iinfo(dtype)
        dtype = dtype if limits.min <= number <= limits.max else torch.int64
    return torch.tensor(number, dtype=dtype, device="cpu")


def _cpu_tensor(value: Any) -> Any:
    return value.tensor() if isinstance(value, View) else value


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if not value.is_cuda and value.dim() == 0:
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _shape(tensor: torch.Tensor | None) -> Shape | None:
    return None if tensor is None else Shape(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.is_cuda
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    return type(value), value


def _device_of(given: dict[str, Any]) -> int:
    """The index of the one device of all tensors. Raises RuntimeError as torch does."""
    found: set[int] = set()

    def look(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            found.add(value.get_device())
        elif isinstance(value, torch.device) and value.type == "cuda":
            found.add(torch.cuda.current_device() if value.index is None else value.index)

    for value in given.values():
        each(value, look)
    if len(found) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two: {sorted(found)}")
    return found.pop() if found else torch.cuda.current_device()


def _has_mask(base: str, given: dict[str, Any]) -> bool:
    indices = given.get("indices") if base == "index" else None
    return bool(indices) and any(index is not None and index.dtype in _MASKS for index in indices)


def _empty(shape: Shape, device: int) -> torch.Tensor:
    return torch.empty_strided(shape.size, shape.stride, dtype=shape.dtype, device=torch.device("cuda", device))


def _like(tensor: Any, device: int) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return tensor
    new = _empty(Shape(tuple(tensor.shape), tensor.stride(), tensor.dtype), device)
    view(new).tensor().copy_(tensor)
    return new


def _returned(found: Any, number: int) -> Any:
    if found is None or number == 0:
        return None
    return found[0] if number == 1 else tuple(found)


def _tell_of_wait() -> None:
    """What torch says where the script has asked it to (torch.cuda.set_sync_debug_mode)."""
    mode = torch._C._cuda_get_sync_debug_mode()
    if mode == 2:
        raise RuntimeError("called a synchronizing CUDA operation")
    if mode == 1:
        import warnings

        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
