import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.scale = width**0.5

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) * self.scale
        return scores.softmax(-1) @ v


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), Attention(16)).half()
with torch.no_grad():
    for batch in range(12):
        model(torch.randn(2, 4, 16).half() * 2.0**batch)
