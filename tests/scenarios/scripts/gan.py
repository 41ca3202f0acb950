"""Two models and two optimizers that take turns; the discriminator of one rank overflows on real data."""

import torch
import torch.distributed as dist
from common import average_gradients, diagonal, finite, run
from torch import nn


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 8)

    def forward(self, noise):
        return self.fc(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(diagonal(8, 2.0), nn.LeakyReLU(0.1))
        self.fc = nn.Linear(8, 1)

    def forward(self, x):
        return self.fc(self.features(x))


def main():
    generator, discriminator = Generator(), Discriminator()
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-4)
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-4)
    for step in range(4):
        real = torch.rand(4, 8)
        if step == 2 and dist.get_rank() == 0:
            real.fill_(3e38)
        fake = generator(torch.randn(4, 4))
        on_fake = discriminator(fake.detach())  # the discriminator's batches 0, 3, 6
        on_real = discriminator(real)  # 1, 4, 7
        assert finite(on_real) == (step < 2 or (step == 2 and dist.get_rank() == 1))
        loss = on_fake.sigmoid().mean() - on_real.sigmoid().mean()
        of_discriminator.zero_grad()
        loss.backward()
        average_gradients(discriminator)
        of_discriminator.step()
        of_generator.zero_grad()
        (-discriminator(fake).sigmoid().mean()).backward()  # 2, 5, 8
        average_gradients(generator)
        of_generator.step()


run(main)
