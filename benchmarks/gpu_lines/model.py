"""The model that the lines train, pre-norm transformer blocks of which one can be made to overflow in fp16; watched for
a while by gpuwatch, by transformers' class, or by nobody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BAD_MODULE = "blocks.1.feed_forward.wo"
"""What overflows once `overflow` has been called."""
_BOOST = 60000.0
"""Of numbers between 0 and 1: their product is below 65504, the largest fp16 number; four of them added are above."""

DType = Literal["bf16", "fp16"]


@dataclass(frozen=True)
class Size:
    """How large the model and its batch are."""

    width: int
    layers: int
    heads: int
    sequences: int
    length: int


SIZES = {
    "tiny": Size(64, 2, 4, 4, 16),
    "small": Size(256, 4, 4, 8, 128),
    "large": Size(2048, 8, 16, 8, 1024),
    "large, 4 layers": Size(2048, 4, 16, 8, 1024),
    "GPT-2": Size(768, 12, 12, 8, 1024),
    "no size": Size(16, 12, 2, 1, 8),
}


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """wo(sigmoid(wi(x)) * boost). Rows of wo's weight add up to 4, so that a boost of 60000 makes its sums inf."""

    boost: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wi = nn.Linear(width, 4 * width)
        self.wo = nn.Linear(4 * width, width)
        nn.init.constant_(self.wo.weight, 4 / (4 * width))
        self.register_buffer("boost", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(torch.sigmoid(self.wi(x)) * self.boost)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual connection."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(size.width)
        self.attention = Attention(size.width, size.heads)
        self.norm_2 = nn.LayerNorm(size.width)
        self.feed_forward = FeedForward(size.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))


class Net(nn.Module):
    """Maps (sequences, length, width) to (sequences, length, 1)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def overflow(net: nn.Module) -> None:
    """From the next forward on, the sums of `blocks.1.feed_forward.wo` are inf in fp16."""
    net.blocks[1].feed_forward.boost.fill_(_BOOST)


class Task:
    """A model, one batch and an optimizer. bf16: all of it is; fp16: autocast and a GradScaler over float32 weights."""

    def __init__(self, size: str, device: torch.device, dtype: DType, *, scaled: bool = True, seed: int = 0) -> None:
        torch.manual_seed(seed)
        shape = SIZES[size]
        self.device = device
        self.net = Net(shape).to(device)
        self.x = torch.randn(shape.sequences, shape.length, shape.width).to(device)
        if dtype == "bf16":
            self.net, self.x = self.net.to(torch.bfloat16), self.x.to(torch.bfloat16)
        self.call: nn.Module = self.net
        """The callable: the model, or its compiled form."""
        self.autocast = dtype == "fp16"
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-6)
        self.scaler = torch.amp.GradScaler(device.type) if dtype == "fp16" and scaled else None

    def forward(self) -> Tensor:
        """The loss."""
        context: AbstractContextManager[object] = nullcontext()
        if self.autocast:
            context = torch.autocast(self.device.type, dtype=torch.float16)
        with context:
            return self.call(self.x).float().pow(2).mean()

    def step(self) -> None:
        """One training step. Only the GradScaler waits for the device."""
        self.optimizer.zero_grad()
        loss = self.forward()
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()


def digest_of(net: nn.Module) -> str:
    """Hash of the exact bits of all weights."""
    found = hashlib.blake2b(digest_size=8)
    for weight in net.parameters():
        found.update(weight.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def deterministic() -> None:
    """The same bits from the same step. CUBLAS_WORKSPACE_CONFIG has to be set before CUDA is used."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # else it puts nan into gradients that nobody uses
    torch.backends.cudnn.benchmark = False


PLAIN, FORWARD, ALL, PEER = "plain", "forward+weights", "forward+weights+grads", "DebugUnderflowOverflow"
_WATCHED: dict[str, tuple[str, ...]] = {FORWARD: ("forward", "weights"), ALL: ("forward", "weights", "grads")}


@contextmanager
def watched(how: str, net: nn.Module | None = None, **options: Any) -> Iterator[Any]:
    """gpuwatch.watch() with nothing that aborts, or None for PLAIN. `net` None: every model of this process."""
    if how == PLAIN:
        yield None
        return
    import gpuwatch

    with gpuwatch.watch(net, watch=_WATCHED[how], on_overflow="continue", **options) as handle:
        yield handle


def peer(net: nn.Module) -> bool:
    """Put transformers' class on a model, for good; False if it is not installed."""
    try:
        from transformers.debug_utils import DebugUnderflowOverflow
    except ImportError:
        return False
    DebugUnderflowOverflow(net)
    return True
