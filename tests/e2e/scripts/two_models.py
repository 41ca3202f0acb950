"""Two models in one script, a generator and a discriminator; the discriminator of rank 0 overflows in its batch 5."""

import torch
import torch.distributed as dist
from torch import nn


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 1)
        nn.init.constant_(self.fc.weight, 2.0)

    def forward(self, x):
        return self.fc(x)


dist.init_process_group("gloo")
torch.manual_seed(0)
generator, discriminator = Generator(), Discriminator()
for step in range(4):
    fake = generator(torch.rand(2, 4))
    real = torch.rand(2, 4)
    if dist.get_rank() == 0 and step == 2:
        real = torch.full((2, 4), 3e38)
    discriminator(fake.detach())
    discriminator(real)  # the second call of a step: batches 1, 3, 5
    dist.barrier()
dist.barrier()  # gloo may abort the process when its peer has left before it
dist.destroy_process_group()
