"""Trainings of accelerate and Lightning with a known cause each, and the table of all frameworks. See loaders.py.

Their wrappers fetch one batch ahead, share a loader's batches out among ranks, and call the model from their own loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from .handed_samples import COUNT, LARGE, Draw, Handed, Late, LoadedCause, Samples
from .loaders import Stream
from .trainer_loaders import trainer_diverges, trainer_healthy, trainer_labels, trainer_sample, trainer_stream

# accelerate


def _accelerated(net: nn.Module, loader: Any, lr: float = 1e-3, dispatches: bool | None = None, **options: Any) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatches), **options
    )
    prepared, optimizer, batches = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr), loader)
    for batch in batches:
        x = batch["x"] if isinstance(batch, dict) else batch
        with accelerator.accumulate(prepared):
            accelerator.backward((prepared(x) - 1).square().mean())
            optimizer.step()
            optimizer.zero_grad()


def accelerate_sample(draw: Draw) -> LoadedCause:
    net, workers, every = Handed(), draw.draw.choice([0, 2]), draw.draw.choice([1, 2])
    train = lambda: _accelerated(  # noqa: E731
        net, draw.loader(Samples(draw.bad), num_workers=workers), gradient_accumulation_steps=every
    )
    name = f"accelerate, {workers} workers, a step every {every}: {draw}"
    return LoadedCause(name, ("data",), train, net, draw.bad)


def accelerate_share(draw: Draw) -> LoadedCause:
    """The loader as the second of two ranks gets it: with every other batch, or with half of each."""
    net, splits = Handed(), draw.draw.choice([True, False])
    draw.rows = max(draw.rows, 8) if splits else draw.rows

    def train() -> None:
        from accelerate.data_loader import prepare_data_loader
        from torch.utils.data import DataLoader

        first = draw.rows // 2 if splits else draw.rows
        # the second rank's part of what follows is its half of each batch, or each second batch
        mine = [index for index in range(COUNT) if index // first % 2 == 1]
        draw.bad = mine[draw.bad % len(mine)]
        known.bad = draw.bad
        loader = prepare_data_loader(
            DataLoader(Samples(draw.bad), draw.rows), num_processes=2, process_index=1, split_batches=splits
        )
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for x in loader:
            optimizer.zero_grad()
            (net(x) - 1).square().mean().backward()
            optimizer.step()

    known = LoadedCause(f"accelerate, rank 1 of 2, split {splits}: {draw}", ("data",), train, net, draw.bad)
    return known


def accelerate_stream(draw: Draw) -> LoadedCause:
    net, dispatches = Handed(), draw.draw.choice([True, False])
    train = lambda: _accelerated(net, DataLoader(Stream(draw.bad), draw.rows), dispatches=dispatches)  # noqa: E731
    return LoadedCause(
        f"accelerate, a stream, dispatch {dispatches}: {draw}",
        ("data",),
        train,
        net,
        told=False,
        says=f"(__key__ shard/{draw.bad} of",
    )


def accelerate_half(draw: Draw) -> LoadedCause:
    """Under autocast. All samples are large from the third batch on."""
    net = Handed(lambda h: (h.float().half() * 30).float())
    loader = DataLoader(Late(draw.rows * 2, 1e6), draw.rows)
    train = lambda: _accelerated(net, loader, mixed_precision="bf16")  # noqa: E731
    return LoadedCause(f"accelerate, float16 under autocast: {draw}", ("precision",), train, net)


def accelerate_healthy(draw: Draw) -> LoadedCause:
    net = Handed(torch.tanh)
    train = lambda: _accelerated(net, draw.loader(Samples(draw.bad, 1e10)))  # noqa: E731
    return LoadedCause(f"accelerate, healthy with an outlier: {draw}", (), train, net)


# Lightning


def _lightning(net: nn.Module, loader: Any, lr: float = 1e-3, loss: Any = None, epochs: int = 1) -> None:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Trained(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, x: torch.Tensor, number: int) -> torch.Tensor:
            out = self.net(x)
            return (out - 1).square().mean() if loss is None else loss(out, number)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr)

    lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Trained(), loader)


def lightning_sample(draw: Draw) -> LoadedCause:
    net, workers = Handed(), draw.draw.choice([0, 2])
    loader = draw.loader(Samples(draw.bad), num_workers=workers, persistent_workers=workers > 0)
    train = lambda: _lightning(net, loader)  # noqa: E731
    return LoadedCause(f"Lightning, {workers} workers: {draw}", ("data",), train, net, draw.bad)


def lightning_diverges(draw: Draw) -> LoadedCause:
    """A regression at a learning rate that is far too high."""
    net, lr = Handed(lambda h: h), draw.draw.choice([3.0, 10.0])
    train = lambda: _lightning(net, draw.loader(Samples()), lr, epochs=20)  # noqa: E731
    return LoadedCause(
        f"Lightning at learning rate {lr}: {draw}", ("divergence",), train, net, told=None, certain=False
    )


def lightning_collate(draw: Draw) -> LoadedCause:
    """The collate function takes the log of a share that is 0 for one sample. It returns the samples sorted."""
    net = Handed(torch.tanh)

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        x = torch.stack(sorted(samples, key=lambda each: float(each[0])))
        share = x[:, :1] * (x[:, -1:] != draw.bad / COUNT)
        return torch.cat([share / share.abs(), x[:, 1:]], 1)

    train = lambda: _lightning(net, draw.loader(Samples(), collate_fn=collate))  # noqa: E731
    return LoadedCause(f"Lightning, a collate function divides by 0: {draw}", ("data",), train, net, told=False)


def lightning_domain(draw: Draw) -> LoadedCause:
    """The loss of `training_step` is a mean over a mask, which one batch leaves empty."""
    net, bad = Handed(torch.tanh), draw.draw.choice([1, 2])

    def loss(out: torch.Tensor, number: int) -> torch.Tensor:
        mask = torch.zeros_like(out) if number == bad else torch.ones_like(out)
        return (out.square() * mask).sum() / mask.sum()

    train = lambda: _lightning(net, draw.loader(Samples()), loss=loss)  # noqa: E731
    return LoadedCause(f"Lightning, an empty mask: {draw}", ("domain", "script"), train, net, says="`div`: 0 / 0")


def lightning_factor(draw: Draw) -> LoadedCause:
    """The step multiplies its loss by what no tensor shows: a number of Python's. No line of Lightning's
    is to blame."""
    net, bad = Handed(torch.tanh), draw.draw.choice([1, 2])

    def loss(out: torch.Tensor, number: int) -> torch.Tensor:
        return out.square().mean() * (float("nan") if number == bad else 1.0)

    train = lambda: _lightning(net, draw.loader(Samples()), loss=loss)  # noqa: E731
    name = f"Lightning, a factor of Python's: {draw}"
    return LoadedCause(name, ("script",), train, net, says="the script's own loss has made it", certain=False)


def lightning_whole_batch(draw: Draw) -> LoadedCause:
    """All samples of a batch are as large. Nobody can know whether the data is to blame."""
    net = Handed()
    train = lambda: _lightning(net, DataLoader(Late(draw.rows * 2, LARGE), draw.rows))  # noqa: E731
    return LoadedCause(f"Lightning, a whole batch is large: {draw}", ("",), train, net)


FRAMEWORKS: dict[str, list[Callable[[Draw], LoadedCause]]] = {
    "accelerate": [accelerate_sample, accelerate_share, accelerate_stream, accelerate_half, accelerate_healthy],
    "lightning": [
        lightning_sample,
        lightning_diverges,
        lightning_collate,
        lightning_domain,
        lightning_factor,
        lightning_whole_batch,
    ],
    "transformers": [trainer_sample, trainer_labels, trainer_diverges, trainer_stream, trainer_healthy],
}
"""By the package that they need. Trainer needs accelerate, too."""
