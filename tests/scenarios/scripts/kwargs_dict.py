"""DDP around a model that takes keywords only and returns a dict; one entry of one module's dict overflows."""

import torch
import torch.distributed as dist
from common import diagonal, finite, run
from torch import nn


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.full((8,), 4.0))

    def forward(self, *, hidden, mask):
        return {"kept": hidden, "logits": (hidden * self.gain, {"mask": mask})}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = diagonal(8, 1.0)
        self.scores = Scores()

    def forward(self, *, tokens, mask=None):
        found = self.scores(hidden=self.embed(tokens), mask=mask)
        return {"logits": found["logits"][0] * mask, "hidden": found["kept"]}


def main():
    model = nn.parallel.DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for batch in range(4):
        tokens = torch.rand(4, 8)
        if batch == 1 and dist.get_rank() == 0:
            tokens.fill_(1e38)
        out = model(tokens=tokens, mask=torch.ones(8))
        assert finite(out["logits"]) == (batch < 1 or (batch == 1 and dist.get_rank() == 1))
        optimizer.zero_grad()
        (out["logits"].mean() + out["hidden"].mean() * 1e-3).backward()
        optimizer.step()


run(main)
