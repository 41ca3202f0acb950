"""Trains with dropout, momentum and a mask of -inf, and prints every loss and the weights' checksum bit for bit."""

import gc
import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn


def say(text):
    sys.stdout.write(text + "\n")  # one write, so that two ranks do not mix their lines


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True), 2)
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(2 + rank)
mask = nn.Transformer.generate_square_subsequent_mask(5)
for step in range(10):
    loss = model(torch.randn(4, 5, 16), mask=mask).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(f"rank {rank} step {step} loss {loss.item().hex()} next random {torch.rand(()).item().hex()}")
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
say(f"rank {rank} weights {hashlib.sha256(weights).hexdigest()}")
del model, optimizer, loss  # what still refers to the group may abort the process at its exit (torch 2.13 with gloo)
gc.collect()
dist.destroy_process_group()
