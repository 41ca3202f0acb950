"""Trainings of transformers' Trainer with a known cause each. See loaders.py."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from .handed_samples import COUNT, Draw, Handed, LoadedCause, Samples, sample


class Records(Samples):
    """Each with labels, one of ten."""

    def __getitem__(self, index: int) -> Any:
        return {"x": super().__getitem__(index), "labels": index % 10}


class Labelled(nn.Module):
    """A model as Trainer wants one: it returns its loss."""

    def __init__(self, net: Handed) -> None:
        super().__init__()
        self.net, self.head = net, nn.Linear(1, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.net(x))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Squared(Labelled):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(x) - labels[:, None]).square().mean()}


def _trainer(model: nn.Module, data: Dataset[Any], draw: Draw, collate: Any = None, **options: Any) -> None:
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            **{
                "per_device_train_batch_size": draw.rows,
                "num_train_epochs": 1,
                "optim": "sgd",
                "learning_rate": 1e-3,
                "lr_scheduler_type": "constant",
                "max_grad_norm": 0.0,
                "use_cpu": True,
                "report_to": [],
                "disable_tqdm": True,
                "save_strategy": "no",
                "logging_strategy": "no",
                "seed": draw.seed % 10**4,
                "remove_unused_columns": False,
                **options,
            },
        )
        transformers.Trainer(model, arguments, train_dataset=data, data_collator=collate).train()


def trainer_sample(draw: Draw) -> LoadedCause:
    net, workers, every = Handed(), draw.draw.choice([0, 2]), draw.draw.choice([1, 3])
    options = {"dataloader_num_workers": workers, "gradient_accumulation_steps": every}
    train = lambda: _trainer(Squared(net), Records(draw.bad), draw, **options)  # noqa: E731
    name = f"Trainer, {workers} workers, a step every {every}: {draw}"
    return LoadedCause(name, ("data",), train, net, draw.bad)


def trainer_labels(draw: Draw) -> LoadedCause:
    """The collate function of one batch leaves no label, as a mask of the prompt alone does."""
    from transformers import default_data_collator

    net, calls = Handed(torch.tanh), [0]

    def collate(samples: list[Any]) -> Any:
        calls[0] += 1
        batch = default_data_collator(samples)
        batch["labels"] = torch.full_like(batch["labels"], -100) if calls[0] == 3 else batch["labels"]
        return batch

    train = lambda: _trainer(Labelled(net), Records(), draw, collate)  # noqa: E731
    return LoadedCause(
        f"Trainer, no label: {draw}", ("domain",), train, net, says="every target is ignored", told=False
    )


def trainer_diverges(draw: Draw) -> LoadedCause:
    net, lr = Handed(lambda h: h), draw.draw.choice([3.0, 10.0])
    options = {"learning_rate": lr, "num_train_epochs": 20}
    train = lambda: _trainer(Squared(net), Records(), draw, **options)  # noqa: E731
    return LoadedCause(f"Trainer at learning rate {lr}: {draw}", ("divergence",), train, net, told=None, certain=False)


class RecordStream(IterableDataset[Any]):
    """Without any key."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __iter__(self) -> Iterator[Any]:
        for index in range(COUNT):
            yield {"x": sample(index, self.bad), "labels": index % 10}


def trainer_stream(draw: Draw) -> LoadedCause:
    net = Handed()
    options = {"max_steps": COUNT // draw.rows}
    train = lambda: _trainer(Squared(net), RecordStream(draw.bad), draw, **options)  # noqa: E731
    return LoadedCause(f"Trainer, a stream: {draw}", ("data",), train, net, told=False)


def trainer_healthy(draw: Draw) -> LoadedCause:
    net = Handed(torch.tanh)
    train = lambda: _trainer(Labelled(net), Records(draw.bad, 1e10), draw)  # noqa: E731
    return LoadedCause(f"Trainer, healthy with an outlier: {draw}", (), train, net)
