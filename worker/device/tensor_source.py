"""Where the numbers of a tensor are on its device: the memory that a reader reads, found without waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..record.float_formats import CODES
from ..record.plain_tensor import has_memory, is_unfinished, sole_inner, to_plain, unwrapped


class KernelDtype(NamedTuple):
    """How the kernel reads a dtype: its number in kernel_elements.py, the dtype it loads, and the shape of a block."""

    code: int
    read_as: torch.dtype
    deep: int
    wide: int


def _kinds() -> dict[torch.dtype, KernelDtype]:
    kinds = {
        torch.float64: KernelDtype(1, torch.float64, 4, 256),
        torch.float32: KernelDtype(2, torch.float32, 4, 512),
        torch.float16: KernelDtype(3, torch.float16, 4, 1024),
        torch.bfloat16: KernelDtype(4, torch.bfloat16, 4, 1024),
        torch.bool: KernelDtype(0, torch.uint8, 2, 1024),
    }
    for name in ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32"):
        dtype = getattr(torch, name)
        kinds[dtype] = KernelDtype(0, dtype, 2, 512)
    kinds[torch.uint64] = KernelDtype(5, torch.int64, 2, 512)
    for code, name in enumerate(("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu"), start=6):
        float8 = getattr(torch, f"float8_{name}", None)  # torch 2.5 lacks some of them
        if isinstance(float8, torch.dtype):
            kinds[float8] = KernelDtype(code, torch.int8, 4, 1024)
    return kinds


KINDS = _kinds()
DTYPES = {CODES[dtype]: dtype for dtype in KINDS}
"""Code of a dtype (core/values.py) -> the dtype, for those that a reader knows."""
_TENSOR, _PARAMETER, _STRIDED = torch.Tensor, torch.nn.Parameter, torch.strided


class TensorSource(NamedTuple):
    """Where the numbers of a tensor are: `elements` in runs of `inner`, which begin `stride` apart.

    >>> source_of(torch.zeros(3, 10)[:, :4])[1:]
    (12, 4, 10)
    """

    tensor: torch.Tensor
    elements: int
    inner: int
    stride: int


def dense(tensor: torch.Tensor, elements: int) -> TensorSource:
    """The source of a tensor that lies in one piece, in order."""
    return _new_source(TensorSource, (tensor, elements, elements, 0))


_new_source: Callable[[type[TensorSource], tuple[torch.Tensor, int, int, int]], TensorSource] = tuple.__new__
"""Makes a named tuple three times as fast as its class does."""


def source_of(tensor: torch.Tensor) -> TensorSource | None:
    """The memory to read for a tensor. None if there is none, or if it cannot be read without waiting."""
    plain = _plain(tensor)
    if plain is None or plain.dtype not in KINDS:
        return None
    count = plain.numel()
    if plain.is_contiguous():  # the fast path: nearly all are
        end = (plain.storage_offset() + count) * plain.itemsize
        if not count or not plain.data_ptr() or plain.untyped_storage().nbytes() < end:
            return None
        return dense(plain, count)
    if not count or not has_memory(plain):
        return None  # a kernel must not read freed memory
    source = _runs(plain)
    if source is None:  # holes of more than one size
        plain = plain.contiguous()
        source = TensorSource(plain, plain.numel(), plain.numel(), 0)
    return source


def _plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """As `to_plain`, but without waiting, and without a conversion if the reader knows the dtype."""
    tensor = unwrapped(tensor)
    cls = type(tensor)
    plain = (cls is _TENSOR or cls is _PARAMETER) and tensor.layout is _STRIDED and not tensor.is_nested
    if plain and tensor.dtype in KINDS:
        return tensor.resolve_neg() if tensor.is_neg() else tensor
    local = getattr(tensor, "_local_tensor", None)
    if isinstance(local, torch.Tensor):
        return _plain(local)
    if cls.__name__ == "AsyncCollectiveTensor":
        # a wait of ours would make the script's stream wait: see `is_unfinished`
        return _plain(tensor.trigger_wait()) if not is_unfinished(tensor) else None  # type: ignore[attr-defined]
    if tensor.layout is torch.jagged:
        # unbind() would wait for the offsets. Parts with explicit lengths have holes between them.
        values: torch.Tensor | None = getattr(tensor, "_values", None)
        return _plain(values) if values is not None and getattr(tensor, "_lengths", None) is None else None
    inner = sole_inner(tensor)
    return _plain(inner) if inner is not None else to_plain(tensor)


def _runs(tensor: torch.Tensor) -> TensorSource | None:
    """The memory of a strided tensor with holes as runs of equal length. None if one stride cannot describe it."""
    # an expanded dimension repeats the same elements, so it is dropped
    dims = sorted((step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and step)
    inner, outer, stride = 1, 1, 0
    for step, size in dims:
        if outer == 1 and step == inner:
            inner *= size
        elif outer == 1 or step == stride * outer:
            stride = stride or step
            outer *= size
        else:
            return None
    return TensorSource(tensor, inner * outer, inner, stride)
