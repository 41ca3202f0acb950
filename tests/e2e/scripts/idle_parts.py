"""Two ranks train with DDP. `faulty`: parts of the model do not learn, by mistake. `healthy`: as is meant."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

STEPS = 64


class Faulty(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.dead = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.flat = nn.Sequential(nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 4))
        nn.init.constant_(self.dead[0].bias, -100.0)
        nn.init.constant_(self.flat[0].bias, 100.0)

    def forward(self, x):
        x = torch.tanh(self.body(x))
        return self.head(x + self.dead(x)) + self.flat(x)


class Expert(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


class Healthy(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(1000, 16)
        self.kinds = nn.Embedding(4, 16, padding_idx=0)
        self.norm = nn.LayerNorm(16)
        self.experts = nn.ModuleList(Expert() for _ in range(3))
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
        nn.init.zeros_(self.up.weight)
        self.head, self.unused, self.uncalled = nn.Linear(16, 4), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x):
        words = x.argmax(-1)
        x = self.norm(self.words(words) + self.kinds(words * 0))
        first, without_weight, without_tokens = self.experts
        x = x + first(x) + without_weight(x) * 0 + without_tokens(x[:0]).sum(0)
        x = self.base(x) + self.up(self.down(x))
        return self.head(x), self.unused(x)


dist.init_process_group("gloo")
torch.manual_seed(0)
is_faulty = sys.argv[1] == "faulty"
model = Faulty() if is_faulty else Healthy()
parallel = DistributedDataParallel(model, find_unused_parameters=not is_faulty)
if is_faulty:
    others = [parameter for name, parameter in model.named_parameters() if not name.startswith("body.")]
    optimizer = torch.optim.AdamW([{"params": model.body.parameters(), "lr": 0.0}, {"params": others}], lr=1e-3)
else:
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 16))
torch.manual_seed(dist.get_rank())
for _ in range(STEPS):
    out = parallel(torch.randn(32, 8))
    out = out if is_faulty else out[0]
    functional.cross_entropy(out, torch.randint(4, (32,))).backward()
    optimizer.step()
    warmup.step()
    optimizer.zero_grad()
dist.destroy_process_group()
