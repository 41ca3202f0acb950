"""transformers' Trainer with torch.compile: on one rank a weight is set to nan through `.data`, between two steps."""

import gc
import os
import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

RANK = int(os.environ["RANK"])


class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        ids = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": ids, "labels": ids}


class Breaks(TrainerCallback):
    """After the third step, on rank 1."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 3 and RANK == 1:
            model.transformer.h[1].mlp.c_fc.weight.data[0, 0] = float("nan")


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2))
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        max_steps=8,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        torch_compile="--compiled" in sys.argv,
        torch_compile_backend="aot_eager" if "--compiled" in sys.argv else None,
    )
    Trainer(model, arguments, train_dataset=Rows(), callbacks=[Breaks()]).train()
del model
gc.collect()  # what still refers to the group may abort the process at its exit (torch 2.13 with gloo)
torch.distributed.destroy_process_group()
