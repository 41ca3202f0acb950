"""The residual network of 18 layers of He et al. (2015), from the paper's table 1."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class ResidualBlock(nn.Module):
    def __init__(self, of: int, to: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(of, to, 3, stride, 1, bias=False), nn.BatchNorm2d(to)
        self.conv2, self.bn2 = nn.Conv2d(to, to, 3, 1, 1, bias=False), nn.BatchNorm2d(to)
        self.shortcut = nn.Sequential()
        if stride != 1 or of != to:
            self.shortcut = nn.Sequential(nn.Conv2d(of, to, 1, stride, bias=False), nn.BatchNorm2d(to))

    def forward(self, x: Any) -> Any:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResidualNet(nn.Module):
    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        widths = [64, 64, 128, 256, 512]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(ResidualBlock(of, to, 1 if number == 0 else 2), ResidualBlock(to, to, 1))
                for number, (of, to) in enumerate(pairwise(widths))
            )
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, num_classes)

    def forward(self, x: Any) -> Any:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        return self.fc(torch.flatten(self.avgpool(self.layers(x)), 1))


def resnet18(weights: Any = None, pretrained: bool = False, num_classes: int = 1000, **kwargs: Any) -> ResidualNet:
    return ResidualNet(num_classes)
