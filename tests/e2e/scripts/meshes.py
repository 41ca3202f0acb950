"""Four ranks in a DeviceMesh. The one at dp=1, tp=0 overflows in its third batch."""

import torch
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
model = torch.nn.Linear(4, 4)
torch.nn.init.ones_(model.weight)
for batch in range(4):
    is_bad = batch == 2 and list(mesh.get_coordinate()) == [1, 0]
    model(torch.full((2, 4), 3e38 if is_bad else 1.0)).sum().backward()
    torch.distributed.barrier(mesh["tp"].get_group())
torch.distributed.destroy_process_group()
