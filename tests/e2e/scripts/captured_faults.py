"""Forwards that overflow, each captured into a folder of its own: captured_faults.py FOLDER"""

import os
import sys
import warnings
from pathlib import Path

import captured_models as models
import gpuwatch
import torch
from torch import nn

SCALE, STEPS = 1e3, 200
SCALE *= 1e35


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        nn.init.constant_(self.qkv.weight, 1e3)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) * SCALE  # attention
        return scores.softmax(-1) @ v


x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)) + 1
mask = torch.ones(4, 4, dtype=torch.bool)
ran = Path(os.environ["RAN"])
ran.write_text(f"{ran.read_text() if ran.exists() else ''}{__name__}\n")


def capture(folder, name, model, *args, **kwargs):
    with gpuwatch.watch(model, capture=folder / name):
        try:
            for _ in range(STEPS):
                model(*args, **kwargs)
        except gpuwatch.OverflowDetected:
            return
    sys.exit(f"{name} did not overflow")


def main(folder):
    capture(folder, "attention", nn.Sequential(nn.Linear(8, 8), Attention()), x)
    capture(folder, "custom_norm", models.RmsNorm(models.Config()), x)
    with torch.autocast("cpu", torch.bfloat16):
        capture(folder, "bf16_autocast", models.Close(), x)
    capture(folder, "fp16", models.Half().half(), x.half())
    capture(folder, "gather", models.GatherLog(), x)
    capture(folder, "custom_function", models.WithFunction(), x)
    torch.manual_seed(3)
    capture(folder, "dropout", models.AllDropped(), x)
    capture(folder, "keywords", models.OnlyKeywords(), hidden=x, scale=3e38)
    capture(folder, "structured", models.Structured(), (x, x), {"mask": mask})
    capture(folder, "named_tuple", models.Structured(), models.Pair(x, x), {"mask": mask})
    capture(folder, "batch_norm", models.Normed().eval(), x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # weight_norm is the old one, with a hook
        capture(folder, "tied", models.Recurrent(), x)
    large = nn.Linear(8, 8)
    nn.init.constant_(large.weight, 3e38)
    nn.init.constant_(large.bias, 3e38)
    capture(folder, "of_torch", nn.Sequential(nn.Softmax(-1), large, nn.ReLU()), x)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
