"""Train a small network to hear which note is played, in fp16, with DistributedDataParallel.

Run:  torchrun --standalone --nproc-per-node 2 train_notes.py
The recordings are made here: notes of one octave, with overtones and noise, as numbers from -1 to 1. One recording of
the last rank was left as the integers of a 16-bit file. Its spectrum is larger than 65504, the largest fp16 number, so
the loss becomes nan: on all ranks, since they share the gradients. With --normalize the network trains.
Each rank uses the GPU of its local rank where there are GPUs, else the CPU.
"""

import argparse
import gc
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SAMPLES_PER_S = 8000
NOTES = 12
FRAMES, FRAME = 16, 64  # a recording is so many frames of so many samples
RECORDINGS, BATCH_SIZE = 96, 4  # of each rank
UNSCALED = 82  # the recording that is left as integers
SCALE = 32767


class Spectrum(nn.Module):
    """How strong each frequency is in each frame: (batch, frames, samples) -> (batch, frames, frequencies)."""

    def __init__(self) -> None:
        super().__init__()
        angle = 2 * math.pi / FRAME * torch.outer(torch.arange(FRAME // 2), torch.arange(FRAME))
        self.register_buffer("cos", angle.cos() * 2 / FRAME)
        self.register_buffer("sin", angle.sin() * 2 / FRAME)

    def forward(self, x: Tensor) -> Tensor:
        re, im = F.linear(x, self.cos), F.linear(x, self.sin)
        return re * re + im * im


class NoteClassifier(nn.Module):
    """A transformer over the logarithms of the spectrum."""

    def __init__(self, d_model: int, n_layers: int) -> None:
        super().__init__()
        self.spectrum = Spectrum()
        self.embed = nn.Linear(FRAME // 2, d_model)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(d_model, 4, 4 * d_model, batch_first=True, norm_first=True)
            for _ in range(n_layers)
        )
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, NOTES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(torch.log(self.spectrum(x) + 1e-3))
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h).mean(1))


def make_recordings(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """This rank's recordings, (RECORDINGS, samples), and their notes."""
    random = torch.Generator().manual_seed(rank)
    notes = torch.randint(NOTES, (RECORDINGS,), generator=random)
    hertz = 220 * 2 ** (notes / 12)
    phase = torch.rand(RECORDINGS, 1, generator=random)
    time = torch.arange(FRAMES * FRAME) / SAMPLES_PER_S
    sound = sum(torch.sin(2 * math.pi * n * (hertz[:, None] * time + phase)) / n for n in (1, 2, 3))
    sound += 0.1 * torch.randn(sound.shape, generator=random)
    sound /= sound.abs().amax(1, keepdim=True)
    if rank == world_size - 1:
        sound[UNSCALED] = (sound[UNSCALED] * SCALE).round()
    return sound, notes


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--normalize", action="store_true", help="scale each recording to a peak of 1")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--d-model", type=int, default=64)
    parser.add_argument("--n-layers", type=int, default=2)
    return parser.parse_args()


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)  # DDP copies rank 0's weights to the other ranks
    sound, notes = make_recordings(rank, dist.get_world_size())
    if args.normalize:
        sound /= sound.abs().amax(1, keepdim=True)
    model = DistributedDataParallel(NoteClassifier(args.d_model, args.n_layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    for step in range(args.steps):
        chosen = torch.arange(step * BATCH_SIZE, (step + 1) * BATCH_SIZE) % RECORDINGS
        x, target = sound[chosen].unflatten(1, (FRAMES, FRAME)).to(device), notes[chosen].to(device)
        with torch.autocast(device.type, dtype=torch.float16):
            logits = model(x)
        loss = F.cross_entropy(logits.float(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
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
