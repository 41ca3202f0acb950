"""Lightning as a task of SLURM for each rank. In its first life it waits in batch 3 for SLURM's warning."""

import os
import sys
import time

import lightning
import torch
from ddp_overflow import Net

FIRST = not os.environ.get("SLURM_RESTART_COUNT")


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, inputs, number):
        if FIRST and number == 3:
            say(f"rank {self.global_rank} waits")
            while not self.trainer.received_sigterm:
                time.sleep(0.05)
        loss = self.net(inputs).mean()
        say(f"rank {self.global_rank} step {self.trainer.global_step} loss {loss.item().hex()}")
        return loss

    def on_save_checkpoint(self, checkpoint):
        say(f"rank {self.global_rank} saves step {checkpoint['global_step']}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


if __name__ == "__main__":
    torch.manual_seed(0)
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"),
        False,
    )
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.rand(24, 8), batch_size=4))
