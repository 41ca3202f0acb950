"""Train a small T5-like encoder-decoder on Python source text, in fp16, with DistributedDataParallel.

Run:  torchrun --standalone --nproc-per-node 2 train_transformer.py
The text is the standard library of the Python that runs this, as bytes: the encoder reads one chunk, the decoder
predicts the next. The default --lr, usual for SGD, is too high for Adam: the loss falls at first, then the activations
grow until one passes 65504, the largest fp16 number, and the loss becomes nan. With --lr 1e-3 the model trains.
Each rank uses the GPU of its local rank where there are GPUs, else the CPU.
"""

import argparse
import gc
import os
import pathlib
import sysconfig

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

BOS = 256  # the bytes are tokens 0 to 255; the decoder's input starts with this one
VOCAB_SIZE = 257


class RMSNorm(nn.Module):
    """T5's layer norm: no mean, no bias, computed in fp32."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Attention(nn.Module):
    """Multi-head attention of x over a context, which is x itself in self-attention."""

    def __init__(self, d_model: int, n_heads: int, causal: bool = False) -> None:
        super().__init__()
        self.n_heads, self.causal = n_heads, causal
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, d_model, bias=False)
        self.o = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for t in (self.q(x), self.k(context), self.v(context))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """T5 v1.1's gated-GELU feed-forward."""

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.wi_0 = nn.Linear(d_model, d_ff, bias=False)
        self.wi_1 = nn.Linear(d_model, d_ff, bias=False)
        self.wo = nn.Linear(d_ff, d_model, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(self.dropout(F.gelu(self.wi_0(x), approximate="tanh") * self.wi_1(x)))


class Block(nn.Module):
    """One pre-norm layer; a decoder's layer also attends to the encoder's output."""

    def __init__(self, args: argparse.Namespace, is_decoder: bool) -> None:
        super().__init__()
        self.self_attention_norm = RMSNorm(args.d_model)
        self.self_attention = Attention(args.d_model, args.n_heads, causal=is_decoder)
        if is_decoder:
            self.cross_attention_norm = RMSNorm(args.d_model)
            self.cross_attention = Attention(args.d_model, args.n_heads)
        self.feed_forward_norm = RMSNorm(args.d_model)
        self.feed_forward = FeedForward(args.d_model, args.d_ff)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        y = self.self_attention_norm(x)
        x = x + self.self_attention(y, y)
        if memory is not None:
            x = x + self.cross_attention(self.cross_attention_norm(x), memory)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Stack(nn.Module):
    """The encoder or the decoder: position embedding, blocks, final norm."""

    def __init__(self, args: argparse.Namespace, is_decoder: bool) -> None:
        super().__init__()
        self.position = nn.Embedding(args.chunk, args.d_model)
        self.block = nn.ModuleList(Block(args, is_decoder) for _ in range(args.n_layers))
        self.final_norm = RMSNorm(args.d_model)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.block:
            x = block(x, memory)
        return self.final_norm(x)


class Transformer(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, args.d_model)
        self.encoder = Stack(args, is_decoder=False)
        self.decoder = Stack(args, is_decoder=True)
        self.lm_head = nn.Linear(args.d_model, VOCAB_SIZE, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        decoder_input = F.pad(target[:, :-1], (1, 0), value=BOS)
        memory = self.encoder(self.embedding(source))
        return self.lm_head(self.decoder(self.embedding(decoder_input), memory))


def load_shard(rank: int, world_size: int, max_bytes: int) -> Tensor:
    """This rank's share of the standard library's sources: every world_size-th file, up to max_bytes."""
    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files[rank::world_size])[:max_bytes]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lr", type=float, default=1e-1, help="peak learning rate; the default is too high")
    parser.add_argument("--warmup", type=int, default=50, help="steps of linear warmup")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=1, help="sequences per rank")
    parser.add_argument("--chunk", type=int, default=64, help="bytes read by the encoder, and by the decoder")
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--d-ff", type=int, default=512)
    parser.add_argument("--n-heads", type=int, default=4)
    parser.add_argument("--n-layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=2)
    return parser.parse_args()


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed * world_size + rank)  # DDP copies rank 0's weights to the other ranks

    data = load_shard(rank, world_size, max_bytes=2_000_000)
    model = DistributedDataParallel(Transformer(args).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warmup))

    for step in range(args.steps):
        starts = torch.randint(len(data) - 2 * args.chunk, (args.batch_size,)).tolist()
        batch = torch.stack([data[i : i + 2 * args.chunk] for i in starts]).long()
        source, target = batch.to(device).split(args.chunk, dim=1)
        with torch.autocast(device.type, dtype=torch.float16):
            logits = model(source, target)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


def main() -> None:
    args = parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(args, device)
    gc.collect()  # what still refers to the group may abort the process at its exit (torch 2.13 with gloo)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
