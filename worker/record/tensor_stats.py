"""The numbers of one tensor in host memory: abs min, abs max and non-finite flags, in one pass over its bits.

core/values.py says why integers are enough. Everything here must be called with gradients off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...core.frames import ROW_KINDS, RowKind
from ...core.signal_errors import from_outside
from ...core.torch_names import name_in_torch
from ...core.values import COUNTED, DTYPE_CODES, INF_BITS, MIN_NORMAL_BITS, SHARE, SIGN_MASK, NonFinite, ValueEncoding
from .host_reduce import below, read_floats


class TensorStats(NamedTuple):
    """The numbers of a tensor, for its row. `kind`, the number of a RowKind, says whether the other three are valid."""

    low: int
    high: int
    meta: int
    kind: int

    @property
    def content(self) -> RowKind:
        """`kind` as the enum."""
        return ROW_KINDS[self.kind]


class TensorReading(NamedTuple):
    """The numbers and the shape of a tensor that a compiled graph has read."""

    numbers: TensorStats
    shape: tuple[int, ...]


class FloatFormat(NamedTuple):
    """A floating point type whose bits are read directly."""

    code: int
    """Index of its name in core.values.DTYPE_NAMES."""
    bits: torch.dtype
    size: int
    """Bytes"""
    mask: int
    meta: int
    """`meta` of a finite tensor."""
    inf: int
    low: bool
    """Whether the type is of low precision."""


CODES: dict[torch.dtype, int] = {
    dtype: code for name, code in DTYPE_CODES.items() if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
"""dtype -> its index in core.values.DTYPE_NAMES."""

LOW_PRECISION = {
    dtype
    for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
"""dtypes in which small numbers vanish: their zeros and subnormals are counted."""


def _float(dtype: torch.dtype, bits: torch.dtype, encoding: ValueEncoding) -> FloatFormat:
    mask, inf = SIGN_MASK[encoding], INF_BITS[encoding]
    return FloatFormat(CODES[dtype], bits, bits.itemsize, mask, encoding << 8, inf, dtype in LOW_PRECISION)


FLOATS = {
    torch.float32: _float(torch.float32, torch.int32, ValueEncoding.FLOAT32),
    torch.float16: _float(torch.float16, torch.int16, ValueEncoding.FLOAT16),
    torch.bfloat16: _float(torch.bfloat16, torch.int16, ValueEncoding.BFLOAT16),
    torch.float64: _float(torch.float64, torch.int64, ValueEncoding.FLOAT64),
}

_TENSOR, _PARAMETER = torch.Tensor, torch.nn.Parameter
_is_wrapped = name_in_torch("torch._C._functorch.is_functorch_wrapped_tensor", lambda tensor: False)
_unwrap = name_in_torch("torch._C._functorch.get_unwrapped")
_is_functional = name_in_torch("torch._is_functional_tensor", lambda tensor: False)
_has_storage = name_in_torch("torch._C._has_storage", lambda tensor: True)
_FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)
_MEASURED = RowKind.MEASURED.number
_new: Callable[[type[TensorStats], tuple[int, int, int, int]], TensorStats] = tuple.__new__
"""Makes a named tuple three times as fast as its class does."""
_EMPTY = TensorStats(0, 0, 0, RowKind.EMPTY.number)
NOT_MEASURABLE = TensorStats(0, 0, 0, RowKind.NOT_MEASURABLE.number)


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
        # raises for an inference tensor: "Inference tensors do not track version counter"
        return unwrapped(tensor)._version
    except RuntimeError as error:
        if from_outside(error):
            raise
        return -1


def measure(tensor: torch.Tensor, count: bool = False) -> TensorStats:
    """TensorStats of a tensor in host memory, of any dtype, layout and class. Never raises: see `RowKind`.

    `count`: also count zeros and subnormals, if the dtype is of low precision.
    """
    place = in_memory(tensor)
    if place is not None:
        return stats_in_memory(tensor, *place, count)
    numbers = _measure_any(tensor)
    if count and numbers[3] == _MEASURED and tensor.dtype in LOW_PRECISION:
        try:
            return numbers._replace(meta=numbers.meta | _shares(tensor))
        except Exception as error:  # the numbers are valid without the shares
            if from_outside(error):
                raise
    return numbers


def in_memory(tensor: torch.Tensor) -> tuple[int, int, FloatFormat] | None:
    """As `place_of`, for a tensor in host memory. None for others."""
    place = place_of(tensor)
    return place if place is not None and tensor.is_cpu else None


def place_of(tensor: torch.Tensor) -> tuple[int, int, FloatFormat] | None:
    """(address, elements, type) of a contiguous tensor of floats, as nearly all are, on any device. None for others."""
    cls = type(tensor)
    if cls is not _TENSOR and cls is not _PARAMETER:
        return None
    kind = FLOATS.get(tensor.dtype)
    if kind is None:
        return None
    try:
        # is_neg: the memory of `x.conj().imag` holds the numbers with the other sign
        if not tensor.is_contiguous() or tensor.is_neg():
            return None
        address, count = tensor.data_ptr(), tensor.numel()
        # FSDP frees storages. A view with an offset into a freed storage still has an address that is not 0.
        end = (tensor.storage_offset() + count) * kind.size
        if not count or not address or tensor.untyped_storage().nbytes() < end:
            return None
    except Exception as error:  # a layout without these attributes
        if from_outside(error):
            raise
        return None
    return address, count, kind


def stats_in_memory(tensor: torch.Tensor, address: int, count: int, kind: FloatFormat, shares: bool) -> TensorStats:
    """TensorStats of a tensor at the place that `in_memory` returned. `shares`: also count zeros and subnormals."""
    low, high, meta = read_floats(address, count, kind.code)
    if high >= kind.inf:
        meta |= _non_finite_flags(tensor)
    if shares and kind.low:
        meta |= _shares_in(kind, address, count)
    return _new(TensorStats, (low, high, meta, _MEASURED))


def _measure_any(tensor: torch.Tensor) -> TensorStats:
    try:
        return _measure(tensor)
    except Exception as error:  # a nested tensor or a negated view may look like an ordinary tensor
        if from_outside(error):
            raise
    try:
        plain = to_plain(tensor)
        return _measure(plain) if plain is not None else NOT_MEASURABLE
    except Exception as error:  # an unknown tensor class must not end the run
        if from_outside(error):
            raise
        return NOT_MEASURABLE


def _measure(tensor: torch.Tensor) -> TensorStats:
    kind = FLOATS.get(tensor.dtype)
    plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    if not plain or tensor.layout is not torch.strided or kind is None:
        local = to_plain(tensor)
        if local is None:
            return NOT_MEASURABLE
        tensor = local
        kind = FLOATS.get(tensor.dtype)
    if tensor.numel() == 0:
        return _EMPTY
    if not has_memory(tensor):
        return NOT_MEASURABLE
    if kind is None:
        return _measure_integers(tensor)
    # the bits as integers: their order without the sign is that of the numbers, and inf and nan are above all others
    bits = tensor.view(kind.bits)
    if tensor.is_cpu:
        flat = _flat(bits).contiguous()
        return stats_in_memory(tensor, flat.data_ptr(), flat.numel(), kind, False)
    low, high = (int(number.item()) for number in torch.aminmax(bits.bitwise_and(kind.mask)))  # waits for the device
    meta = kind.meta | (_non_finite_flags(tensor) if high >= kind.inf else 0)
    return TensorStats(low, high, meta, _MEASURED)


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


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in one dimension, in any order. Copies only if the memory has holes."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)  # an expanded dimension repeats one element
    if not tensor.is_contiguous():
        by_stride = sorted(range(tensor.dim()), key=lambda dim: tensor.stride(dim), reverse=True)
        tensor = tensor.permute(by_stride)
    return tensor.reshape(-1)


def _shares(tensor: torch.Tensor) -> int:
    """The part of `meta` with the share of zeros and the share of subnormals.

    A float8 tensor is converted to float32. Its elements are subnormal below the smallest normal number of float8.
    """
    smallest = torch.finfo(tensor.dtype).smallest_normal
    plain = to_plain(tensor)
    if plain is None:
        return 0
    total = plain.numel()
    if plain.dtype is tensor.dtype:
        kind = FLOATS[plain.dtype]
        flat = _flat(plain.view(kind.bits)).cpu().contiguous()
        return _shares_in(kind, flat.data_ptr(), flat.numel())
    zeros = total - int(torch.count_nonzero(plain).item())
    small = int((plain.abs() < smallest).sum().item())
    return share_bits(zeros, small - zeros, total)


def _shares_in(kind: FloatFormat, address: int, count: int) -> int:
    zeros, small = below(address, count, kind.size, MIN_NORMAL_BITS[ValueEncoding(kind.meta >> 8)])
    return share_bits(zeros, small - zeros, count)


def share_bits(zeros: int, subnormals: int, total: int) -> int:
    """Two counts as the shares in `meta`. A count that is not 0 never becomes 0."""
    shares = [max(min(n, 1), round(n / total * SHARE)) for n in (zeros, subnormals)]
    return COUNTED | shares[0] << 16 | shares[1] << 32


def _non_finite_flags(tensor: torch.Tensor) -> int:
    """Flags for nan, +inf and -inf of a tensor that holds at least one of them."""
    flags = NonFinite.NONE
    if tensor.is_nested:  # it may lie in memory as an ordinary tensor does, and has few operations
        tensor = torch.cat([part.reshape(-1) for part in tensor.unbind()])
    if torch.isnan(tensor).any().item():
        flags |= NonFinite.NAN
    if torch.isposinf(tensor).any().item():
        flags |= NonFinite.POSINF
    if torch.isneginf(tensor).any().item():
        flags |= NonFinite.NEGINF
    return int(flags)


def _measure_integers(tensor: torch.Tensor) -> TensorStats:
    if tensor.dtype is torch.bool:
        tensor = tensor.view(torch.uint8)
    low_t, high_t = torch.aminmax(tensor)
    low, high = int(low_t.item()), int(high_t.item())
    if low < 0:
        # abs() of the smallest integer overflows and stays negative: exclude it here, and include it in `high`
        sizes = tensor.abs()
        sizes = sizes[sizes >= 0]
        high = max(-low, high)
        low = int(sizes.amin().item()) if sizes.numel() else -low
    limit = (1 << 63) - 1
    return TensorStats(min(low, limit), min(high, limit), ValueEncoding.INTEGER << 8, _MEASURED)


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
    if _has_storage(tensor) and not has_memory(tensor):
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
