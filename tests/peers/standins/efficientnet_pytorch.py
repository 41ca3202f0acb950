"""Stands in for efficientnet_pytorch: a small convolution net with the names of the layers that a program uses."""

from __future__ import annotations

from typing import Any

from torch import nn


class EfficientNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = nn.Conv2d(3, 8, 3, 4), nn.BatchNorm2d(8)
        self._fc = nn.Linear(8, 10)

    @classmethod
    def from_pretrained(cls, name: str) -> EfficientNet:
        return cls()

    def forward(self, x: Any) -> Any:
        return self._fc(self._bn0(self._conv_stem(x)).relu().mean((2, 3)))
