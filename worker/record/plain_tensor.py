"""The ordinary tensor behind any other one: of another class, layout or dtype, of a transform or a collective."""

from __future__ import annotations

from typing import Any

import torch

from ...core.signal_errors import from_outside
from ...core.torch_names import name_in_torch
from .float_formats import FLOATS

_TENSOR, _PARAMETER = torch.Tensor, torch.nn.Parameter
_is_wrapped = name_in_torch("torch._C._functorch.is_functorch_wrapped_tensor", lambda tensor: False)
_unwrap = name_in_torch("torch._C._functorch.get_unwrapped")
_is_functional = name_in_torch("torch._is_functional_tensor", lambda tensor: False)
has_storage = name_in_torch("torch._C._has_storage", lambda tensor: True)
"""False for sparse tensors, and for those of torch.func: asked for an address they raise, which takes long."""
_FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the numbers of one that a transform of torch.func (vmap, grad) has wrapped; any other itself.

    Stops at one of functionalize: it may hold back changes in place.
    """
    while _is_wrapped(tensor) and not _is_functional(tensor):
        tensor = _unwrap(tensor)
    return tensor


def version_of(tensor: torch.Tensor) -> int:
    """The number of in-place changes; -1 for an inference tensor, which does not count them."""
    try:
        tensor = unwrapped(tensor)
        return -1 if tensor.is_inference() else tensor._version  # which raises for such a tensor, and takes 20 us
    except RuntimeError as error:
        if from_outside(error):
            raise
        return -1


def hides_floats(tensor: torch.Tensor) -> bool:
    """Whether a tensor that is not measurable has floats nevertheless. Empty, traced, meta and freed ones have none."""
    try:
        tensor = local_part(unwrapped(tensor))
        if _is_functional(tensor):
            tensor = unwrapped(torch._from_functional_tensor(tensor))
        inner = sole_inner(tensor)
        if inner is not None:
            return hides_floats(inner)
        if tensor.device.type == "meta" or type(tensor).__name__ in ("FakeTensor", "FunctionalTensor"):
            return False
        dtype = tensor.dtype
        if not (dtype.is_floating_point or dtype.is_complex) or dtype is _FLOAT4:
            return False  # a float4 has no inf and no nan
        plain = type(tensor) is _TENSOR or type(tensor) is _PARAMETER
        return tensor.numel() > 0 and not (plain and tensor.layout is torch.strided and not has_memory(tensor))
    except Exception as error:  # an unknown class
        if from_outside(error):
            raise
        return True


def has_numbers(tensor: torch.Tensor) -> bool:
    """Whether a tensor has floats that `measure` reads. Reads none of them, so it does not wait for a device."""
    try:
        plain = to_plain(tensor)
        return plain is not None and plain.dtype in FLOATS and has_memory(plain)
    except Exception as error:  # an unknown class
        if from_outside(error):
            raise
        return False


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor lies within its storage. FSDP frees the storage of parameters; their views remain."""
    if tensor.numel() == 0:
        return True
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.itemsize
    return tensor.data_ptr() != 0 and tensor.untyped_storage().nbytes() >= end


def is_foreign(kind: type) -> bool:
    """Whether a class of tensors has operations of its own: the script's, or those of a DTensor."""
    return kind.__torch_dispatch__ is not _TENSOR.__torch_dispatch__  # type: ignore[attr-defined]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, whose own operations may be collectives; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def is_unfinished(tensor: torch.Tensor) -> bool:
    """Whether a collective may still write into it, and the script has not waited for that yet.

    A wait of ours would take away what the script does meanwhile: and another rank may take part in the collective only
    after that. torch has a class for such results: AsyncCollectiveTensor (torch/distributed/_functional_collectives.py)
    """
    if type(tensor) is _TENSOR or type(tensor) is _PARAMETER:
        return False
    tensor = local_part(unwrapped(tensor))
    return hasattr(tensor, "trigger_wait") and not getattr(tensor, "completed", False)


def wait_for(tensor: torch.Tensor) -> None:
    """Wait for the collective that writes into a tensor, if any."""
    if is_unfinished(tensor):
        local_part(unwrapped(tensor)).trigger_wait()  # type: ignore[attr-defined]  # AsyncCollectiveTensor


def sole_inner(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that a wrapper of the script's class holds the numbers in, as torchao's weights do; else None.

    It must be the wrapper's only tensor, of the same dtype and shape, with no factor beside it. No operation of the
    class is called. `__tensor_flatten__` of a wrapper with a second tensor may wait for the device: it is not asked.
    """
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None or not tensor.dtype.is_floating_point:
        return None
    held = [(name, value) for name, value in vars(tensor).items() if isinstance(value, torch.Tensor)]
    if len(held) != 1:
        return None
    ((name, inner),) = held
    names, context = flatten(tensor)
    if list(names) != [name] or _has_factor(context) or inner is tensor:
        return None
    is_same = inner.dtype is tensor.dtype and inner.device == tensor.device and inner.shape == tensor.shape
    return inner if is_same else None


def _has_factor(context: Any) -> bool:
    """Whether what `__tensor_flatten__` returns beside the tensors may be what they are multiplied by."""
    values = tuple(context.values()) if isinstance(context, dict) else context
    return any(isinstance(each, float | complex) for each in (values if isinstance(values, list | tuple) else [values]))


def to_plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """A strided tensor of a measurable dtype with the numbers of `tensor`. None if it has none, is float4 or was freed.

    Sparse: the stored values. Nested: the values of all parts. Quantized: the dequantized values. DTensor: the local
    shard. A wrapper: see `sole_inner`. Complex: the magnitudes. float8: converted to float32, which is exact. Under
    vmap: those of all calls. None for one that `is_unfinished`.
    """
    if tensor.device.type == "meta":
        return None
    tensor = local_part(unwrapped(tensor))
    if is_unfinished(tensor):
        return None
    if hasattr(tensor, "trigger_wait"):  # the script has waited for it: this returns the tensor in it
        tensor = tensor.trigger_wait()
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        if type(tensor).__name__ == "FakeTensor":
            return None
        inner = sole_inner(tensor)
        if inner is not None:
            return to_plain(inner)
        tensor = _parts(tensor) if tensor.is_nested else tensor.as_subclass(torch.Tensor)
    if tensor.is_nested:
        tensor = _parts(tensor)
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        tensor = tensor.values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if has_storage(tensor) and not has_memory(tensor):
        return None  # the operations below would read it
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_complex():
        tensor = _magnitudes(tensor)
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.dtype in (torch.uint16, torch.uint32):
        tensor = tensor.to(torch.int64)
    elif tensor.dtype is torch.uint64:  # numbers beyond int64 become its largest number
        tensor = tensor.view(torch.int64)
        tensor = torch.where(tensor < 0, torch.iinfo(torch.int64).max, tensor)
    if tensor.dtype is _FLOAT4:
        return None  # torch has no copy of it to another dtype: on a device that fails when the kernel runs
    if tensor.dtype.is_floating_point and tensor.dtype not in FLOATS:
        tensor = tensor.to(torch.float32)
    return tensor


def _parts(nested: torch.Tensor) -> torch.Tensor:
    """All elements of all parts of a nested tensor of either layout."""
    return torch.cat([part.reshape(-1) for part in nested.unbind()])


def _magnitudes(tensor: torch.Tensor) -> torch.Tensor:
    """Absolute values of complex numbers, non-finite only where a part is. Overflow of finite parts is clamped."""
    parts = torch.view_as_real(tensor.resolve_conj()).double()
    sizes = torch.hypot(parts[..., 0], parts[..., 1])
    largest = parts.abs().amax(-1)
    sizes = torch.where(largest.isfinite() & ~sizes.isfinite(), torch.finfo(torch.float64).max, sizes)
    return torch.where(parts.isnan().any(-1), torch.nan, sizes)
