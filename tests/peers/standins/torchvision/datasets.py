"""Images that a seed draws: a bright square whose place tells its class, with noise around it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset

IMAGES = int(os.environ.get("PEERS_IMAGES", "640"))
"""Most programs take subsets of up to 640; a greater index wraps around."""


class DrawnImages(Dataset[Any]):
    """`data` [N, H, W] or [N, H, W, 3], uint8; `targets` [N], int64."""

    shape: tuple[int, ...] = (28, 28)
    classes = 10
    length: int | None = None

    def __init__(
        self,
        root: str = "",
        train: bool = True,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Any = None,
        download: bool = False,
        split: str = "train",
    ) -> None:
        self.transform = transform
        number = self.length or IMAGES
        source = torch.Generator().manual_seed(1 if train else 2)
        self.targets = torch.randint(self.classes, (number,), generator=source)
        self.data = torch.randint(40, (number, *self.shape), generator=source, dtype=torch.uint8)
        side = self.shape[0] // 4
        for image, target in zip(self.data, self.targets.tolist(), strict=True):
            row, column = side * (target // 4 % 4), side * (target % 4)
            image[row : row + side, column : column + side] = 255

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        index %= len(self)
        image = self.data[index]
        return (self.transform(image) if self.transform else image), int(self.targets[index])


class MNIST(DrawnImages):
    pass


class FashionMNIST(DrawnImages):
    pass


class CIFAR10(DrawnImages):
    shape = (32, 32, 3)


class CIFAR100(CIFAR10):
    classes = 100


class STL10(CIFAR10):
    shape = (96, 96, 3)


class FakeData(DrawnImages):
    shape = (224, 224, 3)
    length = 16

    def __init__(
        self, size: int = 16, image_size: tuple[int, ...] = (3, 224, 224), num_classes: int = 10, transform: Any = None
    ) -> None:
        self.shape = (*image_size[1:], image_size[0])
        self.classes = num_classes
        super().__init__(transform=transform)
