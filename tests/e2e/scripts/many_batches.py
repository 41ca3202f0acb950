"""Many batches of a small model; prints by how much the memory has grown since batch 1,000. Under torchrun."""

import sys

import psutil
import torch
from torch import nn

BATCHES = int(sys.argv[1])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 1)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
process = psutil.Process()
memory = []
for batch in range(BATCHES):
    criterion = nn.MSELoss()  # a module that is made anew in every step
    loss = criterion(model(torch.rand(8, 16)), torch.zeros(8, 1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if batch in (1000, BATCHES - 1):
        memory.append(process.memory_info().rss)
sys.stdout.write(f"grown {memory[1] - memory[0]}\n")
