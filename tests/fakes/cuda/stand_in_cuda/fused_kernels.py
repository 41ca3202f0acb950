"""Fused kernels that torch has for CUDA alone, or under another name than for the CPU."""

from __future__ import annotations

from typing import Any

import torch

from .views import view

_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """As `_scaled_dot_product_flash_attention`. Raises NotImplementedError for a dropout."""
    if dropout_p:
        raise NotImplementedError("flash attention: the stand-in for CUDA has no dropout in it")
    from .operations import issue

    output = torch.empty_like(query)
    logarithms = query.new_empty(query.shape[:-1], dtype=torch.float32)
    seeds = [query.new_empty((), dtype=torch.int64) for _ in range(2)]  # scalars, also where nothing is dropped
    given = [view(tensor) for tensor in (query, key, value)]
    targets = [view(output), view(logarithms)]

    def compute() -> None:
        found = _flash_attention(*(each.tensor() for each in given), 0.0, is_causal, scale=scale)
        for target, each in zip(targets, found, strict=True):
            target.tensor().copy_(each)

    issue(query.get_device(), compute)
    sizes = query.shape[-2], key.shape[-2]
    return output, logarithms, None, None, *sizes, *seeds, query.new_empty(())


def flash_attention_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Any,
    philox_offset: Any,
    *,
    scale: float | None = None,
) -> Any:
    """As `_scaled_dot_product_flash_attention_backward`."""
    from .operations import issue

    gradients = [torch.empty_like(tensor) for tensor in (query, key, value)]
    given = [view(tensor) for tensor in (grad_out, query, key, value, out, logsumexp)]
    targets = [view(tensor) for tensor in gradients]

    def compute() -> None:
        found = _flash_attention_backward(*(each.tensor() for each in given), 0.0, is_causal, scale=scale)
        for target, each in zip(targets, found, strict=True):
            target.tensor().copy_(each)

    issue(query.get_device(), compute)
    return tuple(gradients)


def rms_norm_backward(
    grad_out: Any, input: Any, normalized_shape: list[int], rstd: Any, weight: Any, output_mask: list[bool]
) -> Any:
    """As `_fused_rms_norm_backward`. The CPU has no such operation: it is a few of others there."""
    from .operations import issue

    targets = [torch.empty_like(input), None if weight is None else torch.empty_like(weight)]
    given = [None if tensor is None else view(tensor) for tensor in (grad_out, input, rstd, weight)]
    views = [None if tensor is None else view(tensor) for tensor in targets]

    def compute() -> None:
        gradient, x, scale, factor = (None if each is None else each.tensor().to(rstd.dtype) for each in given)
        normal = x * scale
        scaled = gradient if factor is None else gradient * factor
        inner = tuple(range(x.dim() - len(normalized_shape), x.dim()))
        found = scale * (scaled - normal * (scaled * normal).mean(inner, keepdim=True))
        for target, each in zip(views, (found, (gradient * normal).sum_to_size(normalized_shape)), strict=True):
            if target is not None:
                target.tensor().copy_(each)

    issue(input.get_device(), compute)
    return tuple(target if wanted else None for target, wanted in zip(targets, output_mask, strict=True))


KERNELS = {
    "_scaled_dot_product_flash_attention": flash_attention,
    "_scaled_dot_product_flash_attention_backward": flash_attention_backward,
    "_fused_rms_norm_backward": rms_norm_backward,
}
