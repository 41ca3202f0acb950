"""Three ranks train models of transformers, by name, each on data of its own. A bit of the last one flips on rank 1."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

folder, *names = sys.argv[1:]
sys.path.insert(0, folder)
from models import ARCHITECTURES, inputs_of, model_of  # noqa: E402

dist.init_process_group("gloo")
rank = dist.get_rank()
for architecture in (each for name in names for each in ARCHITECTURES if each.name == name):
    model = model_of(architecture, torch.float32)
    ranks = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        if step == 2 and architecture.name == names[-1] and rank == 1:
            weight = next(each for each in model.parameters() if each.dim() > 1)
            weight.detach().numpy().reshape(-1)[:1].view("int32")[0] ^= 1
        torch.manual_seed(10 * step + rank)
        ranks(**inputs_of(architecture, model, torch.float32, 10 * step + rank)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
