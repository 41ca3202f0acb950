"""A model that takes keyword arguments only and returns a dict; rank 1 overflows in `decoder.out` in batch 2."""

import torch
import torch.distributed as dist
from torch import nn


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 4, bias=False)
        nn.init.constant_(self.out.weight, 2.0)

    def forward(self, *, hidden, mask):
        return {"logits": self.out(hidden), "extra": [hidden, {"mask": mask}]}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = Decoder()

    def forward(self, *, tokens, mask=None):
        return {"loss": None, **self.decoder(hidden=tokens, mask=mask)}


dist.init_process_group("gloo")
model = Model()
for batch in range(4):
    tokens = torch.ones(2, 4)
    if dist.get_rank() == 1 and batch == 2:
        tokens *= 1e38
    model(tokens=tokens, mask=torch.tensor([0.0, float("-inf")]))
    dist.barrier()
dist.barrier()  # gloo may abort the process when its peer has left before it
dist.destroy_process_group()
