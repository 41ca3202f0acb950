"""One batch of twelve overflows. The script skips batches that raise anything."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for batch in range(12):
    try:
        scale = 3e38 if batch == 3 else 1.0
        loss = (model(torch.randn(4, 8).clamp(-1, 1) * scale) * scale).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    except Exception as error:
        print("skipped", batch, type(error).__name__)
