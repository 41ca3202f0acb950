"""The numbers of one tensor in host memory: abs min, abs max and non-finite flags, in one pass over its bits.

core/values.py says why integers are enough. Everything here must be called with gradients off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...core.frames import ROW_KINDS, RowKind
from ...core.signal_errors import from_outside
from ...core.values import COUNTED, MIN_NORMAL_BITS, SHARE, NonFinite, ValueEncoding
from .float_formats import FLOATS, LOW_PRECISION, FloatFormat
from .host_reduce import below, read_floats
from .plain_tensor import has_memory, has_storage, to_plain


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


_TENSOR, _PARAMETER = torch.Tensor, torch.nn.Parameter
_MEASURED = RowKind.MEASURED.number
_new: Callable[[type[TensorStats], tuple[int, int, int, int]], TensorStats] = tuple.__new__
"""Makes a named tuple three times as fast as its class does."""
_EMPTY = TensorStats(0, 0, 0, RowKind.EMPTY.number)
NOT_MEASURABLE = TensorStats(0, 0, 0, RowKind.NOT_MEASURABLE.number)


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
    if kind is None or not has_storage(tensor):
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
    if not plain or tensor.layout is not torch.strided or kind is None or not has_storage(tensor):
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
