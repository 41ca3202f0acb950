"""A forward that overflows in a module whose weights take 400 kB."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(100, 1000), nn.Linear(1000, 1))
nn.init.constant_(model[1].weight, 3e38)
model(torch.full((4, 100), 100.0))
