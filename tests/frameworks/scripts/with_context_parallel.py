"""torch's context parallel: each rank has a part of the sequence. A weight of one rank becomes too large."""

import gc

import torch
import torch.distributed as dist
from model import BACKENDS, Block, batches, device_of, parse, say
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        x = self.block(x).unsqueeze(1)
        x = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return self.head(x.squeeze(1))


ARGS = parse()
device = device_of(ARGS)
dist.init_process_group(BACKENDS[ARGS.device])
rank = dist.get_rank()
mesh = init_device_mesh(ARGS.device, (dist.get_world_size(),))
torch.manual_seed(0)
net = Attends().to(device, torch.bfloat16)
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for number, inputs in enumerate(batches(0, -1, size=8)):
    if (rank, number) == (ARGS.rank, 2):
        with torch.no_grad():
            net.block.widen.weight.fill_(3e38)  # finite; sums of it are not
    sequence = inputs.to(device, torch.bfloat16).unsqueeze(0)
    with context_parallel(mesh, buffers=[sequence], buffer_seq_dims=[1]), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        loss = model(sequence).float().mean()
        optimizer.zero_grad()
        loss.backward()
    optimizer.step()
    say(f"rank {rank} loss {loss.item().hex()}")
del model, net, optimizer, loss  # what still refers to the group may abort the process at its exit (gloo)
gc.collect()
dist.destroy_process_group()
