"""transformers' Trainer, with an evaluation and a checkpoint.

`--how debug` turns on its own detection of overflows. `--how find_batch_size` has it look for the size of its batches:
the first is too large for the memory, as far as it can tell. `--how log` logs to TensorBoard, and gpuwatch's values
with it.
"""

import gc
import tempfile

import gpuwatch
import torch
from model import Net, parse, say
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

ARGS = parse()
SIZE = 4
FINDS = ARGS.how == "find_batch_size"


class Rows(Dataset):
    """Four rows a rank and batch. In the third batch of all ranks, the rows of rank `bad` are too large."""

    def __init__(self, bad):
        self.rows = torch.rand(16 * ARGS.ranks, 8, generator=torch.Generator().manual_seed(1))
        if bad >= 0:
            first = 4 * (2 * ARGS.ranks + bad)
            self.rows[first : first + 4] = 3e38

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return {"x": self.rows[number]}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return {"loss": self.net(x).mean()}


class InOrder(Trainer):
    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def training_step(self, *args, **kwargs):
        if self._train_batch_size > SIZE:
            raise RuntimeError("CUDA out of memory.")
        loss = super().training_step(*args, **kwargs)
        say(f"rank {self.args.process_index} loss {loss.item().hex()}")
        return loss


torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=SIZE + FINDS,  # the next that it tries is nine tenths of it
        auto_find_batch_size=FINDS,
        debug="underflow_overflow" if ARGS.how == "debug" else "",
        num_train_epochs=1,
        optim="sgd",
        learning_rate=1e-6,
        use_cpu=ARGS.device == "cpu",
        report_to=["tensorboard"] if ARGS.how == "log" else [],
        logging_steps=1 if ARGS.how == "log" else 500,
        disable_tqdm=True,
        eval_strategy="epoch",
        save_strategy="epoch",
        label_names=[],
        prediction_loss_only=True,
    )
    trainer = InOrder(Model(), arguments, train_dataset=Rows(ARGS.rank), eval_dataset=Rows(-1))
    if ARGS.how == "log":
        trainer.add_callback(gpuwatch.TrainerCallback(trainer))
    trainer.train()
del trainer
gc.collect()  # what still refers to the group may abort the process at its exit (torch 2.13 with gloo)
torch.distributed.destroy_process_group()
