"""The outputs of one module grow by 2 % a batch, until they are over float16's largest number. A batch takes 60 ms."""

import time

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).half()
x = torch.ones(4, 16).half()
with torch.no_grad():
    for batch in range(2000):
        model[1].weight.fill_(1.02**batch / 16)
        model[0].weight.fill_(1.0)
        model(x)
        dist.barrier()
        time.sleep(0.06)
dist.destroy_process_group()
