"""What trainings with a loader have in common: samples, a model that notes those it is handed, and the known cause.

Each sample carries its index as its last number. So the model itself notes which samples it was handed, and what is
said of them is compared with that. Nothing here knows what decides.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

COUNT, WIDTH = 64, 6
LARGE = 1e30


@dataclass
class LoadedCause:
    """`kinds`: as in DrawnCause; empty where the training is healthy."""

    name: str
    kinds: tuple[str, ...]
    train: Callable[[], None]
    net: Handed
    bad: int | None = None
    """The index that the cause must name; None where it names none, or nobody can know it."""
    told: bool | None = True
    """Whether the report can tell the indices of the batch. None: nobody needs them."""
    says: str = ""
    """A part of the cause's statement."""
    certain: bool = field(default=True)
    """Whether `established` may be said."""


class Handed(nn.Module):
    """Squares what a layer makes of its input, and notes the indices of the samples that it was handed."""

    def __init__(self, site: Callable[[torch.Tensor], torch.Tensor] = torch.square) -> None:
        super().__init__()
        self.site, self.rows = site, list[list[int]]()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is threading.main_thread():  # no second run
            self.rows.append([round(last * COUNT) for last in x[:, -1].tolist()])
        return self.leave(self.site(self.enter(x)))


def sample(index: int, bad: int = -1, value: float = LARGE) -> torch.Tensor:
    """[WIDTH], drawn with its index as the seed. The last number is the index, of the bad one, too."""
    x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
    x = x * value if index == bad else x
    x[-1] = index / COUNT
    return x


class Samples(Dataset[Any]):
    def __init__(self, bad: int = -1, value: float = LARGE, count: int = COUNT) -> None:
        self.bad, self.value, self.count = bad, value, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return sample(index, self.bad, self.value)


class Late(Samples):
    """From one index on, all of its samples are large."""

    def __init__(self, first: int, value: float) -> None:
        super().__init__(value=value)
        self.first = first

    def __getitem__(self, index: int) -> Any:
        return sample(index, index if index >= self.first else -1, self.value)


class Draw:
    """What is drawn for one training: the bad sample, the rows of a batch, and the order."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.bad, self.rows, self.seed = draw.randrange(COUNT), draw.choice([4, 8, 16]), draw.randrange(10**6)
        torch.manual_seed(self.seed)

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def loader(self, data: Dataset[Any], **options: Any) -> DataLoader[Any]:
        return DataLoader(data, self.rows, shuffle=True, generator=self.generator(), **options)

    def __str__(self) -> str:
        return f"bad {self.bad}, {self.rows} rows, seed {self.seed}"
