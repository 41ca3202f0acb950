"""Two ranks share a data set, of which the sample with index 21 is far too large: one of them gets it.

Each sample has its index as its last number, and each rank says which it was handed. `--how`: accelerate, lightning, or
transformers.
"""

import json
import os
import tempfile
import threading

import torch
from model import parse, say
from torch import nn
from torch.utils.data import DataLoader, Dataset, SequentialSampler

ARGS = parse()
COUNT, BAD, SIZE = 32, 21 if ARGS.rank >= 0 else -1, 4


class Samples(Dataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(index)) * (1e30 if index == BAD else 1)
        x[-1] = index / COUNT
        return {"x": x}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        if threading.current_thread() is threading.main_thread():  # no second run
            handed = [round(last * COUNT) for last in x[:, -1].tolist()]
            say(f"rank {os.environ['RANK']} handed {json.dumps(handed)}")
        return {"loss": self.leave(self.enter(x).square()).square().mean()}


def with_accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Samples(), SIZE))
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()


def with_lightning():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Model()

        def training_step(self, batch, number):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(Samples(), SIZE))


def with_transformers():
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *args):
            return SequentialSampler(self.train_dataset)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=SIZE,
            num_train_epochs=1,
            optim="sgd",
            learning_rate=1e-6,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            label_names=[],
        )
        InOrder(Model(), arguments, train_dataset=Samples()).train()


torch.manual_seed(0)
{"accelerate": with_accelerate, "lightning": with_lightning, "transformers": with_transformers}[ARGS.how]()
